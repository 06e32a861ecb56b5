"""What the driver of an elastic job does next: decided in `membership`, done in `driver`. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.trainer.env.environment import RankPlacement
from datasvc.trainer.rendezvous.messages import Notice, RankAssignment


@dataclass(frozen=True)
class Start:
    """Start a worker's process; `place` is the one that it will have if all others come too."""

    worker: str
    host: str
    place: RankPlacement


@dataclass(frozen=True)
class Stop:
    """End a worker's process: nobody waits for it."""

    worker: str


@dataclass(frozen=True)
class StopWorker:
    """Answer a worker's ask: there is no place for it."""

    worker: str
    number: int
    reason: str


@dataclass(frozen=True)
class Seated:
    """Answer a worker's ask: this is its place."""

    worker: str
    number: int
    seat: RankAssignment


@dataclass(frozen=True)
class Break:
    """Tell the members of a round that one of them is gone, for those that still wait to connect to it."""

    round_number: int
    reason: str


@dataclass(frozen=True)
class Announce:
    """Tell these members of the round that hosts have changed."""

    notice: Notice
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Say:
    """Tell people."""

    text: str


@dataclass(frozen=True)
class Finish:
    """The job is over.

    Args:
        exit_status: of the launcher.
        reason: why it did not end well; empty if it did.
        worker: the one that failed first, if one did; `reason` then follows its name.
        others: what happened to further ones since the ranks met last, a line each.
    """

    exit_status: int
    reason: str = ""
    worker: str | None = None
    others: tuple[str, ...] = ()


Action = Start | Stop | StopWorker | Seated | Break | Announce | Say | Finish
