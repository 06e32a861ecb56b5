"""Placement of the ranks on the hosts, and the environment and the command of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from datasvc.threads import count_processors
from datasvc.trainer.env.environment import RankPlacement, placement_variables
from datasvc.trainer.launch.ranks.hosts import choose_passed, is_local, plan_remote_command
from datasvc.trainer.launch.ranks.job import Host, LaunchJob
from datasvc.trainer.launch.ranks.rank_process import RankStart
from datasvc.trainer.launch.ranks.store import AGENT_STORE, LOOPBACK, plan_interfaces


@dataclass(frozen=True)
class HostedRank:
    """The host of a rank, and its placement in the job."""

    host: str
    placement: RankPlacement


def place_ranks(num_ranks: int, hosts: Sequence[Host]) -> list[HostedRank]:
    """Fill the hosts in their order, and return the placements in rank order.

    As in Horovod, the cross size of a rank is the number of hosts that have its local rank, and its cross rank is the
    position of its host among these.

    Raises:
        ValueError: there are too few slots.
    """
    num_slots = sum(host.num_slots for host in hosts)
    if num_ranks > num_slots:
        listed = ", ".join(f"{host.name}:{host.num_slots}" for host in hosts)
        raise ValueError(
            f"{num_ranks} ranks need as many slots, but {listed} have {num_slots}; "
            "give more with -H or --slots-per-host, or start fewer ranks"
        )
    ranks_per_host = []
    num_remaining = num_ranks
    for host in hosts:
        ranks_per_host.append(min(num_remaining, host.num_slots))
        num_remaining -= ranks_per_host[-1]
    ranks: list[HostedRank] = []
    for index, host in enumerate(hosts):
        local_size = ranks_per_host[index]
        for local_rank in range(local_size):
            # A host has this local rank if it has more ranks than that number.
            cross_rank = sum(count > local_rank for count in ranks_per_host[:index])
            cross_size = sum(count > local_rank for count in ranks_per_host)
            placement = RankPlacement(len(ranks), num_ranks, local_rank, local_size, cross_rank, cross_size)
            ranks.append(HostedRank(host.name, placement))
    return ranks


def plan_environment(placement: RankPlacement, host: str, port: int) -> dict[str, str]:
    """Return the environment variables of a rank: its placement, and the address of the store."""
    return {
        **placement_variables(placement),
        # The guard of a rank on another host replaces this address by one that is reachable from there.
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        **AGENT_STORE,
        "HOROVOD_HOSTNAME": host,
    }


def plan_rank_start(
    job: LaunchJob,
    rank: HostedRank,
    environ: Mapping[str, str],
    *,
    worker_id: str,
    label: str,
    folder_name: str,
    num_neighbours: int,
    port: int,
    addresses: Sequence[str],
) -> RankStart:
    """Return the description of a process for a rank, on this machine or on another host.

    Args:
        job: job with the command and the settings.
        rank: host and placement of the rank.
        environ: environment of the launcher, with the variables of the job.
        worker_id: see `RankStart`.
        label: prefix of lines of output, if the job has prefixes.
        folder_name: name of the folder for output files, if the job has an output folder.
        num_neighbours: number of ranks, this one included, that share the processors of the host.
        port: port of the store.
        addresses: addresses of this machine that other hosts may reach; empty if the job has no other hosts.
    """
    is_here = is_local(rank.host, environ)
    variables = plan_environment(rank.placement, rank.host, port)
    if is_here:
        variables |= plan_threads(num_neighbours, environ) | plan_interfaces(job.remote, addresses, environ)
        variables = {**environ, **variables}
    else:
        # The guard on that host determines the interface and the number of processors.
        variables |= plan_interfaces(job.remote, (), environ)
        variables = {**choose_passed(environ, [*job.passed_names, *job.variables]), **variables}
    return RankStart(
        worker_id=worker_id,
        command=job.command,
        environ=variables,
        host=rank.host,
        remote_command=None if is_here else plan_remote_command(rank.host, job.remote),
        master_addresses=() if is_here else addresses,
        num_neighbours=num_neighbours,
        label=label if job.prefixes_lines else "",
        stamps_lines=job.stamps_lines,
        output_folder=None if job.output_folder is None else job.output_folder / folder_name,
    )


def plan_threads(num_local_ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable for the threads of each local rank: the user's value, or an equal share of processors."""
    # Without the variable, OpenMP would start a thread for every processor, in each rank.
    num_threads = max(1, count_processors() // num_local_ranks)
    return {"OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", str(num_threads))}
