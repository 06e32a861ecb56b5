"""How the process of a worker is started on its host."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from datasvc.trainer.elastic.driver.actions import Start
from datasvc.trainer.launch.ranks.job import LaunchJob
from datasvc.trainer.launch.ranks.placement import plan_environment, plan_threads
from datasvc.trainer.launch.ranks.rank_process import RankStart
from datasvc.trainer.launch.ranks.remote_shell import choose_passed, is_local, plan_remote_command
from datasvc.trainer.launch.ranks.store import list_addresses, plan_interfaces

# Of a launcher around this one: its nodes are not the job's.
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
    """What to start for a worker.

    Args:
        start: the worker, its host, and the place that it will have if all others come too.
        job: the command, and how hosts are reached.
        environ: the launcher's.
        listener: where the store is, or will be, served.
        num_neighbours: how many workers share the host's processors.
        other_hosts: names of hosts other than this machine, as far as they are known; None if there will be none.

    Raises:
        ValueError: a network interface does not exist.
    """
    given = {name: value for name, value in {**environ, **job.variables}.items() if name not in _NOT_INHERITED}
    own = {
        **plan_environment(start.place, start.host, listener.getsockname()[1]),
        "TRAINER_ELASTIC_WORKER": start.worker,
        "HOROVOD_ELASTIC": "1",
    }
    slot, _, incarnation = start.worker.removeprefix(f"{start.host}:").partition(":")
    is_here = is_local(start.host, environ)
    if is_here:
        addresses = () if other_hosts is None else list_addresses(other_hosts[:1], job.remote.network_interfaces)
        own |= plan_threads(num_neighbours, given) | plan_interfaces(job.remote, addresses, given)
        variables = {**given, **own}
    else:
        # Its guard finds out the interface and the number of processors there.
        addresses = list_addresses([start.host], job.remote.network_interfaces)
        own |= plan_interfaces(job.remote, (), given)
        variables = {**choose_passed(given, [*job.passed_names, *job.variables]), **own}
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
