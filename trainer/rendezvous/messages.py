"""Messages between the workers and the driver of an elastic job, and their keys in the job's store, a `TCPStore`.

A worker is a process that the driver starts. A round is a period with a fixed assignment of ranks to workers. All
workers push their messages onto one queue. The driver stores the answer to each request under a separate key. It
pushes notices of changed hosts onto one queue per worker, which a thread of the worker reads.

Any process that reaches the port of the store can write to it. Therefore all keys of the job have a random prefix,
which the workers get by their environment, and a message that `decode` does not accept is ignored. This protects
against mistakes, not against an attacker, who can list the keys of the store: the job needs a trusted network.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from datasvc.trainer.env.environment import RankPlacement

# The environment variable with the name of a worker. The driver sets it for each process that it starts.
WORKER_VARIABLE = "TRAINER_ELASTIC_WORKER"
# The environment variable with the prefix of all keys of the job, for the workers only.
PREFIX_VARIABLE = "TRAINER_ELASTIC_PREFIX"
# The queue of the messages of all workers to the driver.
MESSAGE_QUEUE = "elastic/words"
# The last message of a queue. The thread that reads the queue ends when it gets this message.
END_OF_QUEUE = b""


def notice_queue(worker: str) -> str:
    """Return the name of the queue for the notices to a worker about changes of hosts."""
    return f"elastic/notices/{worker}"


def answer_key(worker: str, number: int) -> str:
    """Return the key of the answer to request `number` of a worker."""
    return f"elastic/answers/{worker}/{number}"


def training_key(worker: str) -> str:
    """Return the key that exists from a worker's first request until its training function has returned.

    If the program has no training function, the key is removed when the program exits normally. The driver warns if
    a worker exits with status 0 while the key exists.
    """
    return f"elastic/training/{worker}"


def arrival_key(rank: int) -> str:
    """Return the key that `init` sets in a job that is not elastic; the launcher reports ranks without this key."""
    return f"trainer/arrived/{rank}"


def dropped_key(rank: int) -> str:
    """Return the key that exists when a job with parameter servers goes on without a worker that was silent."""
    return f"trainer/dropped/{rank}"


def broken_key(round_number: int) -> str:
    """Return the key that exists as soon as a member of the round is lost; its value is the reason, for messages."""
    return f"elastic/broken/{round_number}"


@dataclass(frozen=True)
class RankRequest:
    """Request of a worker for a rank in the next round.

    Attributes:
        number: number of the request of this worker, from 1.
        serial: serial number of the worker's state (`State.serial`); equal numbers mean equal states.
        wants_sync: whether this worker needs all ranks to copy the state of rank 0 before they continue.
        multiple: a round needs a multiple of this number of ranks, at least 1; equal on all workers.
    """

    worker: str
    number: int
    serial: int
    wants_sync: bool
    multiple: int = 1


@dataclass(frozen=True)
class ScriptError:
    """Report that the program of a worker exits because of an exception, with its type and message.

    `ends_job` is set if a new round cannot repair the error.
    """

    worker: str
    text: str
    ends_job: bool = False


@dataclass(frozen=True)
class SilentRanks:
    """Report that members of a round do not answer the others, as if they were stopped; `ranks` are their numbers."""

    round_number: int
    ranks: list[int]


@dataclass(frozen=True)
class RankAssignment:
    """Answer to a request: the rank of a worker in a round.

    Attributes:
        needs_sync: whether the ranks must copy the state of rank 0 before they continue.
        notice: number of the newest change of hosts that this round includes.
        num_deaths: number of workers that died before this round.
    """

    round_number: int
    placement: RankPlacement
    needs_sync: bool
    notice: int
    num_deaths: int = 0


@dataclass(frozen=True)
class Leave:
    """Answer to a request: there is no rank for the worker; it exits with status 0."""

    reason: str


@dataclass(frozen=True)
class Notice:
    """Notice, with a number from 1 (0: none), of a change of hosts since the round began; see `HostUpdateResult`."""

    number: int = 0
    result: int = 0


Message = RankRequest | ScriptError | SilentRanks | RankAssignment | Leave | Notice

_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> str:
    """Return the message as JSON."""
    # Include the class name, because one queue has messages of several classes.
    return json.dumps({"kind": type(message).__name__, **dataclasses.asdict(message)})


def decode(data: bytes) -> Message:
    """Return the message that `encode` has encoded.

    Raises:
        ValueError: `data` is no message.
    """
    try:
        fields = json.loads(data)
        kind = _KINDS[fields.pop("kind")]
        if kind is RankAssignment:
            fields["placement"] = _checked(RankPlacement(**fields["placement"]))
        message: Message = _checked(kind(**fields))
    # What JSON of any other form raises: a list, an unknown kind, a missing field, or a hundred thousand brackets.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{data[:80]!r} is no message of an elastic job: {error!r}") from error
    return message


def _checked(value: Any) -> Any:
    """Return a dataclass. Raises TypeError: a field has another type than declared."""
    for name, kind in get_type_hints(type(value)).items():
        if not isinstance(getattr(value, name), get_origin(kind) or kind):
            raise TypeError(f"{name} is {getattr(value, name)!r}; expected {kind.__name__}")
    return value


class HostUpdateResult:
    """The kinds of changes of hosts, as bits."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name; it is not an error
    """Hosts have changed: the ranks form a new round (a new assignment of ranks) and keep their current state.

    It is raised on all ranks in the same call of `State.commit` or `State.check_host_updates`.

    Args:
        skip_sync: whether ranks were only removed, so that the remaining ranks have equal states and copy none.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have changed; the ranks form a new round")
        self.skip_sync = skip_sync


class LeaveJob(SystemExit):
    """The worker has no rank in the job any more. As a `SystemExit`, it ends the process with status 0."""

    def __init__(self) -> None:
        super().__init__(0)
