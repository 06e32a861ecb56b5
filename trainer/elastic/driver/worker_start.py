"""Start plan for the process of a worker: command, environment and output on its host."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from datasvc.trainer.elastic.driver.actions import Start
from datasvc.trainer.launch.ranks.job import LaunchJob
from datasvc.trainer.launch.ranks.placement import plan_environment, plan_threads
from datasvc.trainer.launch.ranks.rank_process import RankStart
from datasvc.trainer.launch.ranks.remote_shell import choose_passed, is_local, plan_remote_command
from datasvc.trainer.launch.ranks.store import list_addresses, plan_interfaces

# Set by an outer launcher, such as torchrun, for its own nodes; they do not describe the nodes of this job.
_NOT_INHERITED = frozenset({"GROUP_RANK", "GROUP_WORLD_SIZE"})


def plan_worker_start(
    start: Start,
    job: LaunchJob,
    environ: Mapping[str, str],
    listener: socket.socket,
    *,
    num_neighbours: int,
    other_hosts: Sequence[str] | None,
) -> RankStart:
    """Return what to start for a worker.

    Args:
        start: action that names the worker, its host and its expected placement.
        job: job with the command and the settings of remote hosts.
        environ: environment of the launcher.
        listener: listening socket of the job's store.
        num_neighbours: number of workers that share the processors of the host.
        other_hosts: names of the known hosts other than this machine; None if the job uses this machine only.

    Raises:
        ValueError: a network interface does not exist.
    """
    inherited = {name: value for name, value in {**environ, **job.variables}.items() if name not in _NOT_INHERITED}
    rank_variables = {
        **plan_environment(start.placement, start.host, listener.getsockname()[1]),
        "TRAINER_ELASTIC_WORKER": start.worker,
        "HOROVOD_ELASTIC": "1",
    }
    slot, _, incarnation = start.worker.removeprefix(f"{start.host}:").partition(":")
    is_here = is_local(start.host, environ)
    if is_here:
        addresses = () if other_hosts is None else list_addresses(other_hosts[:1], job.remote.network_interfaces)
        rank_variables |= plan_threads(num_neighbours, inherited)
        rank_variables |= plan_interfaces(job.remote, addresses, inherited)
        variables = {**inherited, **rank_variables}
    else:
        # The guard on that host determines the interface and the number of processors.
        addresses = list_addresses([start.host], job.remote.network_interfaces)
        rank_variables |= plan_interfaces(job.remote, (), inherited)
        variables = {**choose_passed(inherited, [*job.passed_names, *job.variables]), **rank_variables}
    folder = job.output_folder
    return RankStart(
        worker_id=start.worker,
        command=job.command,
        environ=variables,
        host=start.host,
        remote_command=None if is_here else plan_remote_command(start.host, job.remote),
        master_addresses=() if is_here else addresses,
        num_neighbours=num_neighbours,
        label=f"{start.host}:{slot}" if job.prefixes_lines else "",
        stamps_lines=job.stamps_lines,
        output_folder=folder and folder / f"worker.{start.host}.{slot}.{incarnation}",
    )
