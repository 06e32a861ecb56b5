"""What a rank asks for: everything about an operation that the ranks must agree on, and no tensor."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """Which collective."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    BARRIER = "barrier"


class ReduceOp(Enum):
    """How an allreduce combines the ranks' values."""

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One rank's submission of one named operation.

    ``dtypes`` and ``shapes`` have one entry per tensor: one, or several if ``is_grouped``. ``reduce_op`` and
    the factors belong to allreduce, ``root_rank`` to broadcast.
    """

    name: str
    kind: Kind
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device_type: str = "cpu"
    reduce_op: ReduceOp | None = None
    root_rank: int | None = None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    is_grouped: bool = False


def request_fields(request: Request) -> list[Any]:
    """The request as JSON values, in a fixed order."""
    return [
        request.name,
        request.kind.value,
        request.dtypes,
        request.shapes,
        request.device_type,
        request.reduce_op.value if request.reduce_op else None,
        request.root_rank,
        request.prescale_factor,
        request.postscale_factor,
        request.is_grouped,
    ]


def request_from_fields(fields: list[Any]) -> Request:
    """The inverse of ``request_fields``, also after a trip through JSON."""
    name, kind, dtypes, shapes, device_type, reduce_op, root_rank, prescale, postscale, is_grouped = fields
    return Request(
        name=name,
        kind=Kind(kind),
        dtypes=tuple(dtypes),
        shapes=tuple(tuple(shape) for shape in shapes),
        device_type=device_type,
        reduce_op=ReduceOp(reduce_op) if reduce_op is not None else None,
        root_rank=root_rank,
        prescale_factor=prescale,
        postscale_factor=postscale,
        is_grouped=is_grouped,
    )
