"""Requests: the properties of an operation on which the ranks must agree, without its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

GLOBAL_SET: Final = 0
"""The process set of all ranks."""


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
    """The key by which submissions of several ranks form one operation."""

    process_set: int
    name: str

    def describe(self) -> str:
        """Return the key as text, for messages."""
        return f"'{self.name}'" + (f" of process set {self.process_set}" if self.process_set else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of one rank for one named operation.

    `dtypes` and `shapes` have one entry per tensor: one, or several if `is_grouped`. `reduce_op` and the factors
    belong to allreduce and reducescatter; `root_rank` to broadcast; `splits`, the rows for each rank of the set, to
    alltoall; `ranks` to a process set that is added or removed. `layout` is a checksum of the layout of a flat
    tensor.
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
        """The process set and the name."""
        return Key(self.process_set, self.name)


def request_fields(request: Request) -> list[Any]:
    """Return the request as JSON values, in a fixed order."""
    return [
        request.name,
        request.kind.value,
        request.process_set,
        request.dtypes,
        request.shapes,
        request.device_type,
        request.reduce_op.value if request.reduce_op else None,
        request.root_rank,
        request.prescale_factor,
        request.postscale_factor,
        request.is_grouped,
        request.splits,
        request.ranks,
        request.layout,
    ]


def request_from_fields(fields: list[Any]) -> Request:
    """Return the request for values from `request_fields`, which may have been converted to JSON and back."""
    name, kind, process_set, dtypes, shapes, device_type, reduce_op, root_rank, *options = fields
    prescale, postscale, is_grouped, splits, ranks, layout = options
    return Request(
        name=name,
        kind=CollectiveKind(kind),
        process_set=process_set,
        dtypes=tuple(dtypes),
        shapes=tuple(tuple(shape) for shape in shapes),
        device_type=device_type,
        reduce_op=ReduceOp(reduce_op) if reduce_op is not None else None,
        root_rank=root_rank,
        prescale_factor=prescale,
        postscale_factor=postscale,
        is_grouped=is_grouped,
        splits=None if splits is None else tuple(splits),
        ranks=None if ranks is None else tuple(ranks),
        layout=layout,
    )
