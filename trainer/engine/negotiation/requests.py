"""Requests: descriptions of operations without their tensors.

When the program of a rank submits an operation, its engine sends a request to the other ranks. The requests of all
ranks for one operation must have most properties in common; `negotiation` checks this.
"""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

GLOBAL_SET: Final = 0
"""The number of the process set of all ranks."""


class CollectiveKind(Enum):
    """The kind of a collective operation."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"
    ADD_PROCESS_SET = "add_process_set"
    REMOVE_PROCESS_SET = "remove_process_set"


class ReduceOp(Enum):
    """The reduction of the values of the ranks."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


class Key(NamedTuple):
    """The key of an operation: submissions of several ranks with the same key form one operation."""

    process_set: int
    name: str

    def describe(self) -> str:
        """Return the key as text, for messages."""
        # Most jobs have one process set, which the messages do not mention.
        return f"'{self.name}'" + (f" of process set {self.process_set}" if self.process_set else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of one rank for one named operation.

    Attributes:
        name, process_set: name of the operation, and number of its set; no other operation in flight has the same.
        dtypes, shapes: one entry per tensor; only a grouped operation may have several tensors.
        device_type: device of the tensors, such as "cuda".
        reduce_op, prescale_factor, postscale_factor: reduction, and the factors before and after it (allreduce,
            reducescatter).
        root_rank: rank whose tensor the others get (broadcast).
        splits: number of rows for each rank of the set (alltoall).
        ranks: members of the process set (add_process_set, remove_process_set).
        layout: checksum of the shapes of the tensors in a flat tensor, and of their strides if it has their memory
            order; it must be equal on all ranks.
        round: round of an averaging optimizer, such as "step 8 of local:8"; it must be equal on all ranks.
    """

    name: str
    kind: CollectiveKind
    process_set: int = GLOBAL_SET
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device_type: str = "cpu"
    reduce_op: ReduceOp | None = None
    root_rank: int | None = None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    is_grouped: bool = False
    splits: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    layout: int = 0
    round: str = ""

    @property
    def key(self) -> Key:
        """The process set and the name, by which the requests of the ranks are matched."""
        return Key(self.process_set, self.name)


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(Request))


def request_fields(request: Request) -> list[Any]:
    """Return the request as JSON values, in the order of its fields."""
    values = [getattr(request, name) for name in _FIELDS]
    return [value.value if isinstance(value, Enum) else value for value in values]


def request_from_fields(values: list[Any]) -> Request:
    """Return the request for values from `request_fields`, which may have been converted to JSON and back."""
    fields = {name: _with_tuples(value) for name, value in zip(_FIELDS, values, strict=True)}
    fields["kind"] = CollectiveKind(fields["kind"])
    if fields["reduce_op"] is not None:
        fields["reduce_op"] = ReduceOp(fields["reduce_op"])
    return Request(**fields)


def _with_tuples(value: Any) -> Any:
    # JSON has no tuples. A request with lists would not be equal to the request of another rank.
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


# Invariant: every rank calls `remember` with the same requests in the same order, so a number stands for the same
# request on every rank. A cycle resolves all its numbers before it remembers requests, so no number in a message is
# reused before it is resolved. Training steps repeat their requests, so most negotiations need one bit per request.


class RequestCache:
    """A cache of the `capacity` most recently agreed requests, one for each process set and name.

    With a capacity of 0 it stores nothing, so every request is sent in full.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._numbers: OrderedDict[Key, int] = OrderedDict()  # least recently agreed key first
        self._requests: list[Request] = []
        self._bits_of_set: dict[int, int] = {}  # by process set, one bit for the number of each of its requests

    def __len__(self) -> int:
        """The number of stored requests; their numbers are those below it."""
        return len(self._requests)

    def bits_of_set(self, process_set: int) -> int:
        """Return an integer with bit n set for each stored request of a process set, where n is its number."""
        return self._bits_of_set.get(process_set, 0)

    def find(self, request: Request) -> int | None:
        """Return the number of this request; None if no request or a different one is stored under its key."""
        number = self._numbers.get(request.key)
        return number if number is not None and self._requests[number] == request else None

    def resolve(self, number: int) -> Request:
        """Return the request with a number."""
        return self._requests[number]

    def remember(self, request: Request) -> None:
        """Store a request. In a full cache, a new key gets the number of the least recently agreed key."""
        key = request.key
        if self._capacity == 0:
            return
        if key in self._numbers:
            # A changed request, such as one with another shape, replaces the request with the same key.
            self._requests[self._numbers[key]] = request
        elif len(self._requests) < self._capacity:
            self._numbers[key] = len(self._requests)
            self._requests.append(request)
        else:
            # Reuse the number of that key, so that numbers stay below the capacity.
            evicted, number = self._numbers.popitem(last=False)
            self._bits_of_set[evicted.process_set] &= ~(1 << number)
            self._numbers[key] = number
            self._requests[number] = request
        self._bits_of_set[key.process_set] = self.bits_of_set(key.process_set) | 1 << self._numbers[key]
        self._numbers.move_to_end(key)


# The encoding is JSON, not pickle. It is compact enough, because a cached request is sent as its number in the
# request cache, and an empty message has no bytes. The message is a list: is_leaving and entries, followed by failure
# and tuning if at least one of them is set.


@dataclass(frozen=True, slots=True)
class Tuning:
    """Values of engine settings. All ranks adopt them at the end of the cycle in which rank 0 sends them."""

    fusion_bytes: int
    cycle_time_s: float
    is_hierarchical: bool = False


@dataclass(frozen=True, slots=True)
class CycleMessage:
    """The message of one rank in one cycle.

    Attributes:
        entries: new submissions in order, each as a request or as its number in the cache.
        is_leaving: whether the rank leaves the job after this cycle, as after `shutdown`.
        failure: reason why the job cannot continue; empty if it can.
        tuning: values that all ranks adopt; None for no change. Only those of rank 0 are used.
    """

    entries: tuple[Request | int, ...] = ()
    is_leaving: bool = False
    failure: str = ""
    tuning: Tuning | None = None


def encode_message(message: CycleMessage) -> bytes:
    """Return the bytes of a message; no bytes for an empty message."""
    # Most messages of an idle job are empty. They are sent without bytes, so that no rank has to parse JSON.
    if message == CycleMessage():
        return b""
    entries = [entry if isinstance(entry, int) else request_fields(entry) for entry in message.entries]
    fields = [int(message.is_leaving), entries]
    if message.failure or message.tuning:
        tuning = message.tuning
        fields += [message.failure, astuple(tuning) if tuning else None]
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_message(data: bytes) -> CycleMessage:
    """Return the message for bytes from `encode_message`."""
    if not data:
        return CycleMessage()
    # `encode_message` leaves out the last two fields if both are empty.
    is_leaving, entries, *optional = json.loads(data)
    failure, tuning = optional or ("", None)
    decoded = tuple(entry if isinstance(entry, int) else request_from_fields(entry) for entry in entries)
    return CycleMessage(decoded, bool(is_leaving), failure, None if tuning is None else Tuning(*tuning))
