"""Plans the fusion buffers: which ready allreduces are packed together and reduced as one. All functions are pure.

Invariant: a grouped request, which may have several tensors, shares no buffer with other requests. With more than two
ranks, the order of additions in a ring depends on the position in the buffer, so only a fixed packing gives the same
bits in every run. Single requests are packed with all others that are ready at the same time. This is faster, but the
packing may differ between runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from datasvc.trainer.engine.negotiation.requests import Request


@dataclass(frozen=True, slots=True)
class FusionSlot:
    """The place, in elements, of one tensor in its buffer: tensor number `member` of request number `operation`."""

    operation: int
    member: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """The tensors that one collective reduces. The slots are in order of their offsets, without gaps."""

    dtype: str
    slots: tuple[FusionSlot, ...]

    @property
    def num_elements(self) -> int:
        """The total length in elements."""
        return self.slots[-1].offset + self.slots[-1].length

    @property
    def operations(self) -> list[int]:
        """The numbers of the requests in the buffer, each once, in order."""
        return list(dict.fromkeys(slot.operation for slot in self.slots))

    @property
    def operation(self) -> int:
        """The number of the first request. All requests have its process set, reduction, factors and device."""
        return self.slots[0].operation


def plan_fusion(requests: Sequence[Request], *, fusion_bytes: int, element_bytes: Mapping[str, int]) -> list[Buffer]:
    """Pack allreduces into buffers of at most `fusion_bytes`; a larger tensor has a buffer of its own.

    Args:
        requests: ready allreduces, in the agreed order.
        fusion_bytes: maximum size of a buffer with more than one tensor.
        element_bytes: size of an element of each dtype.

    Returns:
        Buffers in the order of their first request. Each tensor is in exactly one buffer; only single requests of
        equal process set, dtype, reduction, factors and device share a buffer.
    """
    open_buffers: dict[tuple[object, ...], list[FusionSlot]] = {}
    buffers: list[tuple[str, list[FusionSlot]]] = []
    # One open buffer per key, so that requests of alternating dtypes still share buffers.
    for operation, request in enumerate(requests):
        for member, (dtype, shape) in enumerate(zip(request.dtypes, request.shapes, strict=True)):
            key, length = _fusion_key(request, operation, dtype), prod(shape)
            slots = open_buffers.get(key)
            offset = slots[-1].offset + slots[-1].length if slots else 0
            if slots is None or (offset + length) * element_bytes[dtype] > fusion_bytes:
                slots, offset = [], 0
                open_buffers[key] = slots
                buffers.append((dtype, slots))
            slots.append(FusionSlot(operation, member, offset, length))
    return [Buffer(dtype, tuple(slots)) for dtype, slots in buffers]


def _fusion_key(request: Request, operation: int, dtype: str) -> tuple[object, ...]:
    """Return the value that tensors must have in common to share a buffer."""
    if request.is_grouped:
        # The number is unique to this request, so no other request shares its buffers.
        return (operation, dtype)
    factors = (request.prescale_factor, request.postscale_factor)
    # None in place of a number, so that this key differs from those of grouped requests.
    return (None, request.process_set, dtype, request.reduce_op, factors, request.device_type)
