"""Conversions of tensors to the form in which they are sent, the wire form: dtypes and layouts of gloo and NCCL."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# The dtypes that are reduced as another dtype. gloo does not support int16. The wider type also keeps a sum from
# overflowing before it is averaged, and can hold a sum of bool values.
_WIRE_DTYPES: Final = {torch.int16: torch.int32, torch.bool: torch.int32}

REDUCIBLE_DTYPES: Final = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def named_dtype(name: str) -> torch.dtype:
    """Return the dtype with a name such as "float32"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def wire_dtype(name: str) -> torch.dtype:
    """Return the dtype in which values of the named dtype are reduced."""
    dtype = named_dtype(name)
    return _WIRE_DTYPES.get(dtype, dtype)


def can_send_directly(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a tensor can be sent without a copy, if the wire form has this dtype and device."""
    return tensor.is_contiguous() and tensor.dtype == dtype and tensor.device == device


def copy_into(source: Tensor, target: Tensor) -> Tensor:
    """Copy the source to the target and return the target. Do not copy if both are the same tensor."""
    return target if target is source else target.copy_(source)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a flat uint8 tensor."""
    return tensor.reshape(-1).view(torch.uint8)
