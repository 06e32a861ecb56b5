"""The actions of the driver of an elastic job: `membership` decides on them, `driver` executes them."""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.trainer.env.environment import RankPlacement
from datasvc.trainer.rendezvous.messages import Notice, RankAssignment


@dataclass(frozen=True)
class Start:
    """Start the process of a worker. The worker gets the rank in `placement` if all expected workers join."""

    worker: str
    host: str
    placement: RankPlacement


@dataclass(frozen=True)
class TerminateWorker:
    """Terminate the process of a worker."""

    worker: str


@dataclass(frozen=True)
class DenyRank:
    """Answer a worker's request for a rank: the job has no rank for it, so it must exit."""

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
    """Report that a member of a round is lost, so that members that wait to connect to it stop waiting."""

    round_number: int
    reason: str


@dataclass(frozen=True)
class Announce:
    """Send members of the round a notice that hosts have changed."""

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
        reason: reason of the failure; empty after success.
        worker: worker that failed first; None if none failed. If it is set, `reason` is text that follows its name.
        others: one line for each other worker that failed since the last round began.
    """

    exit_status: int
    reason: str = ""
    worker: str | None = None
    others: tuple[str, ...] = ()


Action = Start | TerminateWorker | DenyRank | AssignRank | Break | Announce | PrintMessage | Finish
