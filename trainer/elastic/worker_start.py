"""How the process of a worker is started on its host."""

import socket
from collections.abc import Mapping

from trainer.elastic.actions import Start
from trainer.environment import WORLD_VARIABLES
from trainer.launch.job import Job
from trainer.launch.placement import plan_threads
from trainer.launch.rank_process import RankStart
from trainer.launch.remote_shell import choose_passed, is_local, plan_remote_command
from trainer.launch.store import LOOPBACK, list_addresses

# Places change from round to round, so those of a launcher around this one would only mislead.
_NOT_INHERITED = frozenset(WORLD_VARIABLES) | {
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
}


def plan_worker_start(
    start: Start, job: Job, environ: Mapping[str, str], listener: socket.socket, *, num_neighbours: int
) -> RankStart:
    """What to start for a worker.

    Args:
        start: the worker and its host.
        job: the command, and how hosts are reached.
        environ: the launcher's.
        listener: where the store is, or will be, served.
        num_neighbours: how many workers share the host's processors.

    Raises:
        ValueError: a network interface does not exist.
    """
    given = {name: value for name, value in {**environ, **job.variables}.items() if name not in _NOT_INHERITED}
    own = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(listener.getsockname()[1]),
        "TRAINER_ELASTIC_WORKER": start.worker,
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_HOSTNAME": start.host,
    }
    if job.remote.network_interfaces:
        interfaces = ",".join(job.remote.network_interfaces)
        own |= {"GLOO_SOCKET_IFNAME": interfaces, "NCCL_SOCKET_IFNAME": interfaces}
    slot, _, incarnation = start.worker.removeprefix(f"{start.host}:").partition(":")
    is_here = is_local(start.host, environ)
    folder = job.output_folder
    return RankStart(
        worker_id=start.worker,
        command=job.command,
        environ=(
            {**given, **own, **plan_threads(num_neighbours, given)}
            if is_here
            else {**choose_passed(given, [*job.passed_names, *job.variables]), **own}
        ),
        host=start.host,
        remote_command=None if is_here else plan_remote_command(start.host, job.remote),
        master_addresses=() if is_here else list_addresses([start.host], job.remote.network_interfaces),
        label=f"{start.host}:{slot}" if job.prefixes_lines else "",
        output_folder=folder and folder / f"worker.{start.host}.{slot}.{incarnation}",
    )
