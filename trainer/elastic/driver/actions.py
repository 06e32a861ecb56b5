"""The actions of the driver of an elastic job: `membership` decides on them, `driver` executes them.

A worker is a process of the job. A round is a period with a fixed assignment of ranks to workers; these workers are
the members of the round. The field `worker` is the name of a worker, and `number` is the number of its request.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.trainer.env.environment import RankPlacement
from datasvc.trainer.rendezvous.messages import Notice, RankAssignment


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
    """Answer a worker's request for a rank: the job has no rank for this worker, so it must exit."""

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

    Args:
        exit_status: exit status of the launcher.
        reason: reason of the failure, empty after success. If `worker` is set, a text that follows "it", such as
            "exited with status 1".
        worker: name of the worker that failed first; None if no worker is the cause.
        others: one line for each other worker that failed since the last round began.
    """

    exit_status: int
    reason: str = ""
    worker: str | None = None
    others: tuple[str, ...] = ()


Action = Start | TerminateWorker | DenyRank | AssignRank | Break | Announce | PrintMessage | Finish
