"""What workers and the driver of an elastic job say to each other, through the job's store.

A worker pushes its words onto one queue, the driver answers under a key of the worker's own. The newest change of
hosts lies under one key, which rank 0 reads at every commit.
"""

import dataclasses
import json
from dataclasses import dataclass

from trainer.environment import Place

WORDS_QUEUE = "elastic/words"
HOSTS_KEY = "elastic/hosts"


def answer_key(worker: str, number: int) -> str:
    """Where the answer to a worker's ``number``-th ask lies."""
    return f"elastic/answers/{worker}/{number}"


def broken_key(round_number: int) -> str:
    """Exists as soon as a member of the round is gone."""
    return f"elastic/broken/{round_number}"


@dataclass(frozen=True)
class Ask:
    """A worker wants a place in the next round.

    Args:
        worker: who.
        number: how many times it has asked, from 1.
        serial: of its committed state; see ``places``.
        wants_sync: whether the ranks must copy rank 0's state before they go on.
    """

    worker: str
    number: int
    serial: int
    wants_sync: bool


@dataclass(frozen=True)
class ScriptError:
    """The program of a worker fails for a reason that no new round would mend."""

    worker: str
    text: str


@dataclass(frozen=True)
class Seat:
    """The answer to an ask: a place in a round.

    Args:
        round_number: of all rounds of the job, from 1.
        place: in this round.
        needs_sync: whether the ranks must copy rank 0's state before they go on.
        notice: the newest change of hosts that this round has in it.
    """

    round_number: int
    place: Place
    needs_sync: bool
    notice: int


@dataclass(frozen=True)
class Leave:
    """The answer to an ask: there is no place, end in peace."""

    reason: str


@dataclass(frozen=True)
class Notice:
    """Hosts have changed since the round began.

    Args:
        number: counts notices.
        result: 1 removed, 2 added, 3 both, see ``HostUpdateResult``.
    """

    number: int = 0
    result: int = 0


Word = Ask | ScriptError
Answer = Seat | Leave

_KINDS = {kind.__name__: kind for kind in (Ask, ScriptError, Seat, Leave, Notice)}


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
    assert isinstance(message, Seat | Leave)
    return message


def decode_notice(data: bytes) -> Notice:
    """The newest change of hosts."""
    message = _decode(data)
    assert isinstance(message, Notice)
    return message


def _decode(data: bytes) -> object:
    fields = json.loads(data)
    kind = _KINDS[fields.pop("kind")]
    if kind is Seat:
        fields["place"] = Place(**fields["place"])
    return kind(**fields)
