"""The actions of the driver of an elastic job: `membership` decides on them, `driver` executes them.

A worker is a process of the job. A round is a period with a fixed assignment of ranks to workers. `worker` is a
worker's name, `number` that of its request.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from datasvc.trainer.env.environment import RankPlacement
from datasvc.trainer.launch.ranks.hosts import is_local
from datasvc.trainer.launch.ranks.job import LaunchJob
from datasvc.trainer.launch.ranks.placement import HostedRank, plan_rank_start
from datasvc.trainer.launch.ranks.rank_process import RankStart
from datasvc.trainer.launch.ranks.store import list_addresses
from datasvc.trainer.rendezvous.messages import WORKER_VARIABLE, Notice, RankAssignment

# An outer launcher, such as torchrun, sets these for its own nodes; they do not describe the nodes of this job.
_NOT_INHERITED = frozenset({"GROUP_RANK", "GROUP_WORLD_SIZE"})


@dataclass(frozen=True)
class Start:
    """Start the process of a worker. The rank in `placement` is only expected; `AssignRank` gives the actual one."""

    worker: str
    host: str
    placement: RankPlacement


@dataclass(frozen=True)
class TerminateWorker:
    """Terminate the process of a worker."""

    worker: str


@dataclass(frozen=True)
class DenyRank:
    """Answer a request for a rank: the job has none for this worker, so it must exit."""

    worker: str
    number: int
    reason: str


@dataclass(frozen=True)
class AssignRank:
    """Answer a worker's request with its rank in the next round."""

    worker: str
    number: int
    assignment: RankAssignment


@dataclass(frozen=True)
class Break:
    """Report that a member of a round is lost, so that other members no longer wait to connect to it."""

    round_number: int
    reason: str


@dataclass(frozen=True)
class Announce:
    """Send members of the current round a notice that hosts have changed."""

    notice: Notice
    workers: tuple[str, ...]


@dataclass(frozen=True)
class PrintMessage:
    """Print a message on standard error of the launcher."""

    text: str


@dataclass(frozen=True)
class Finish:
    """End the job.

    `reason` is empty after success. If `worker`, the worker that failed first, is set, `reason` follows "it", such as
    "exited with status 1". `others` has a line for each other worker that failed since the last round began.
    """

    exit_status: int
    reason: str = ""
    worker: str | None = None
    others: tuple[str, ...] = ()


Action = Start | TerminateWorker | DenyRank | AssignRank | Break | Announce | PrintMessage | Finish


def plan_worker_start(
    start: Start,
    job: LaunchJob,
    environ: Mapping[str, str],
    listener: socket.socket,
    *,
    num_neighbours: int,
    other_hosts: Sequence[str] | None,
) -> RankStart:
    """Return the description by which `RankGroup.start` starts the process of a worker.

    Args:
        start: name, host and expected placement of the worker.
        job: job with the command and the settings of remote hosts.
        environ: environment of the launcher.
        listener: socket of the store that the launcher serves.
        num_neighbours: number of ranks that share the processors of the host, this one included.
        other_hosts: known hosts other than this machine; None if the job uses this machine only.

    Raises:
        ValueError: a network interface does not exist.
    """
    inherited = {name: value for name, value in {**environ, **job.variables}.items() if name not in _NOT_INHERITED}
    own_addresses: Sequence[str] = ()  # of this machine
    if not is_local(start.host, environ):
        # The worker connects to the store at one of these addresses.
        own_addresses = list_addresses([start.host], job.remote.network_interfaces)
    elif other_hosts is not None:
        # A worker on this machine uses the interface towards the other hosts. One host is enough to find it.
        own_addresses = list_addresses(other_hosts[:1], job.remote.network_interfaces)
    # A worker's name is `host:slot:seniority`, see `Worker`. Remove the host first: it may contain colons (IPv6).
    slot, _, seniority = start.worker.removeprefix(f"{start.host}:").partition(":")
    return plan_rank_start(
        job,
        HostedRank(start.host, start.placement),
        inherited | {WORKER_VARIABLE: start.worker, "HOROVOD_ELASTIC": "1"},
        worker_id=start.worker,
        label=f"{start.host}:{slot}",
        folder_name=f"worker.{start.host}.{slot}.{seniority}",
        num_neighbours=num_neighbours,
        port=listener.getsockname()[1],
        addresses=own_addresses,
    )
