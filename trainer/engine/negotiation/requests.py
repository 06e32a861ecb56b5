"""What a rank asks for: everything about an operation that the ranks must agree on, and no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

GLOBAL_SET: Final = 0
"""The process set of all ranks."""


class CollectiveKind(Enum):
    """Which collective."""

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
    """How the ranks' values are combined."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


class Key(NamedTuple):
    """What makes submissions of several ranks one operation."""

    process_set: int
    name: str

    def describe(self) -> str:
        """For people."""
        return f"'{self.name}'" + (f" of process set {self.process_set}" if self.process_set else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One rank's submission of one named operation.

    `dtypes` and `shapes` have one entry per tensor: one, or several if `is_grouped`. `reduce_op` and
    the factors belong to allreduce and reducescatter, `root_rank` to broadcast, `splits` to alltoall: rows
    for each rank of the set; `ranks` to the process set that is added, or removed. `layout` is a checksum of what
    the submitter has put where in a flat tensor.
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
        """Set and name."""
        return Key(self.process_set, self.name)


def request_fields(request: Request) -> list[Any]:
    """The request as JSON values, in a fixed order."""
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
    """The inverse of `request_fields`, also after a trip through JSON."""
    name, kind, process_set, dtypes, shapes, device_type, reduce_op, root_rank, *rest = fields
    prescale, postscale, is_grouped, splits, ranks, layout = rest
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
