"""Requests: descriptions of operations without their tensors.

When the program of a rank submits an operation, its engine sends a request to the other ranks. The requests of all
ranks for one operation must have most properties in common; `agreement` checks this.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
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
        layout: checksum of the shapes and strides of the gradients in a flat tensor; it must be equal on all ranks.
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
