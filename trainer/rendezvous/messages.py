"""What workers and the driver of an elastic job say to each other, through the job's store.

A worker pushes its words onto one queue, the driver answers under a key of the worker's own. Changes of hosts are
pushed onto a queue of each worker's, at which a thread of it waits.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from datasvc.trainer.env.environment import RankPlacement

WORDS_QUEUE = "elastic/words"
# Ends whoever waits at a queue.
END_OF_QUEUE = b""


def notice_queue(worker: str) -> str:
    """Where a worker hears of changes of hosts."""
    return f"elastic/notices/{worker}"


def answer_key(worker: str, number: int) -> str:
    """Where the answer to a worker's `number`-th ask lies."""
    return f"elastic/answers/{worker}/{number}"


def training_key(worker: str) -> str:
    """Exists from a worker's first ask until its training function has returned.

    A program without one removes it when it ends in order.
    """
    return f"elastic/training/{worker}"


def broken_key(round_number: int) -> str:
    """Exists as soon as a member of the round is gone."""
    return f"elastic/broken/{round_number}"


@dataclass(frozen=True)
class Ask:
    """A worker wants a place in the next round.

    Args:
        worker: who.
        number: how many times it has asked, from 1.
        serial: of its committed state; see `places`.
        wants_sync: whether the ranks must copy rank 0's state before they go on.
    """

    worker: str
    number: int
    serial: int
    wants_sync: bool


@dataclass(frozen=True)
class ScriptError:
    """The program of a worker is about to end with an exception.

    Args:
        worker: whose.
        text: the exception.
        ends_job: whether no new round would mend it, so that the others need not try.
    """

    worker: str
    text: str
    ends_job: bool = False


@dataclass(frozen=True)
class RankAssignment:
    """The answer to an ask: a place in a round.

    Args:
        round_number: of all rounds of the job, from 1.
        place: in this round.
        needs_sync: whether the ranks must copy rank 0's state before they go on.
        notice: the newest change of hosts that this round has in it.
        num_deaths: how many workers have died before this round.
    """

    round_number: int
    place: RankPlacement
    needs_sync: bool
    notice: int
    num_deaths: int = 0


@dataclass(frozen=True)
class Leave:
    """The answer to an ask: there is no place, end in peace."""

    reason: str


@dataclass(frozen=True)
class Notice:
    """Hosts have changed since the round began.

    Args:
        number: counts notices.
        result: 1 removed, 2 added, 3 both, see `HostUpdateResult`.
    """

    number: int = 0
    result: int = 0


Word = Ask | ScriptError
Answer = RankAssignment | Leave

_KINDS = {kind.__name__: kind for kind in (Ask, ScriptError, RankAssignment, Leave, Notice)}


def encode(message: Word | Answer | Notice) -> str:
    """The message as JSON."""
    return json.dumps({"kind": type(message).__name__, **dataclasses.asdict(message)})


def decode_word(data: bytes) -> Word:
    """What a worker said."""
    message = _decode(data)
    assert isinstance(message, Ask | ScriptError)
    return message


def decode_answer(data: bytes) -> Answer:
    """What the driver answered."""
    message = _decode(data)
    assert isinstance(message, RankAssignment | Leave)
    return message


def decode_notice(data: bytes) -> Notice:
    """The newest change of hosts."""
    message = _decode(data)
    assert isinstance(message, Notice)
    return message


def _decode(data: bytes) -> object:
    fields = json.loads(data)
    kind = _KINDS[fields.pop("kind")]
    if kind is RankAssignment:
        fields["place"] = RankPlacement(**fields["place"])
    return kind(**fields)
