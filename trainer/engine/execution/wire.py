"""The form in which tensors are sent: dtypes and layouts of gloo and NCCL, and the tensors of a fusion buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import ReduceOp, Request

_SUMS: Final = (ReduceOp.SUM, ReduceOp.AVERAGE)
_LOW_BITS: Final = 32
_LOW_MASK: Final = 2**_LOW_BITS - 1

REDUCIBLE_DTYPES: Final = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def named_dtype(name: str) -> torch.dtype:
    """Return the dtype with a name such as "float32"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def is_integer(name: str) -> bool:
    """Return whether the named dtype is one of integers; bool is one too."""
    dtype = named_dtype(name)
    return not (dtype.is_floating_point or dtype.is_complex)


def wire_dtype(name: str, request: Request) -> torch.dtype:
    """Return the dtype in which values of the named dtype are reduced: one that holds the result of all ranks."""
    dtype = named_dtype(name)
    if not is_integer(name):
        return dtype
    if request.prescale_factor != 1.0 or request.postscale_factor != 1.0:
        return torch.float64
    if request.reduce_op in _SUMS and dtype != torch.bool:
        return torch.int64 if dtype.itemsize >= 4 else torch.int32
    if request.reduce_op is ReduceOp.PRODUCT and dtype.itemsize < 8:
        return torch.float64
    return torch.int32 if dtype in (torch.int16, torch.bool) else dtype  # gloo does not support int16


def num_lanes(name: str, request: Request) -> int:
    """Return how many values are sent for each value: 2 for sums of int64, see `split_lanes`."""
    is_sum = request.reduce_op in _SUMS and wire_dtype(name, request) == torch.int64
    return 2 if is_sum and named_dtype(name) == torch.int64 else 1


def max_wire_bytes(name: str) -> int:
    """Return the largest number of bytes that a value of the named dtype takes on the wire."""
    # Equal for all requests of a dtype, because all ranks must fill buffers alike.
    dtype = named_dtype(name)
    return dtype.itemsize if not is_integer(name) else 16 if dtype == torch.int64 else 8


def split_lanes(flat: Tensor) -> None:
    """Split the int64 values in the first half of `flat`: the high 32 bits stay, the low ones go to the second half.

    Sums of either do not overflow with fewer than 2^31 ranks.
    """
    high, low = flat.chunk(2)
    torch.bitwise_and(high, _LOW_MASK, out=low)
    high >>= _LOW_BITS


def join_lanes(high: Tensor, low: Tensor, divisor: int) -> tuple[Tensor, bool]:
    """Return sums of `split_lanes`, divided by `divisor` toward zero, and whether they fit int64."""
    # high * 2^32 + low, divided in two steps as by hand; `carried` is the high part of the quotient.
    quotient = torch.div(high, divisor, rounding_mode="floor")
    rest = ((high - quotient * divisor) << _LOW_BITS) + low
    low_quotient = rest // divisor
    carried = quotient + (low_quotient >> _LOW_BITS)
    result = (carried << _LOW_BITS) + (low_quotient & _LOW_MASK)
    result += (result < 0) & (rest != low_quotient * divisor)
    return result, not carried.numel() or _lies_within(carried, -(2**31), 2**31 - 1)


def fit_into(wide: Tensor, output: Tensor) -> bool:
    """Store reduced values in `output`; return False, and store nothing, if integers do not fit its dtype."""
    dtype = output.dtype
    if is_integer(str(dtype).removeprefix("torch.")) and dtype not in (torch.bool, wide.dtype) and wide.numel():
        limits = torch.iinfo(dtype)
        if not _lies_within(wide, limits.min, limits.max):
            return False
    output.copy_(wide.view(output.shape))
    return True


def _lies_within(values: Tensor, least: int, greatest: int) -> bool:
    low, high = (bound.item() for bound in values.aminmax())
    return bool(least <= low and high <= greatest)  # False for NaN; Python compares floats and integers exactly


def can_send_directly(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a tensor can be sent without a copy, if the wire form has this dtype and device."""
    return tensor.is_contiguous() and tensor.dtype == dtype and tensor.device == device


def copy_into(source: Tensor, target: Tensor) -> Tensor:
    """Copy the source to the target and return the target. Do not copy if both are the same tensor."""
    return target if target is source else target.copy_(source)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a flat uint8 tensor."""
    return tensor.reshape(-1).view(torch.uint8)


# Invariant: a grouped request, which may have several tensors, shares no buffer with other requests. With more than
# two ranks, the order of additions in a ring depends on the position in the buffer, so only a fixed packing gives the
# same bits in every run. Single requests are packed with all others that are ready at the same time. This is faster,
# but the packing may differ between runs.


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
        Buffers in the order of their first request. Only single requests of equal process set, dtype, reduction,
        factors and device share a buffer.
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
    if request.is_grouped:
        # The number is unique to this request, so no other request shares its buffers.
        return (operation, dtype)
    factors = (request.prescale_factor, request.postscale_factor)
    # None in place of a number, so that this key differs from those of grouped requests.
    return (None, request.process_set, dtype, request.reduce_op, factors, request.device_type)
