"""In which form a tensor travels."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# gloo has no int16. A wider sum also cannot overflow before it is averaged; nor can that of many ranks' True.
_WIRE_DTYPES: Final = {torch.int16: torch.int32, torch.bool: torch.int32}

REDUCIBLE_DTYPES: Final = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def named_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as "float32"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def wire_dtype(name: str) -> torch.dtype:
    """As what values of a dtype, given by its name, are reduced."""
    dtype = named_dtype(name)
    return _WIRE_DTYPES.get(dtype, dtype)


def can_travel(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a tensor can be sent as it lies."""
    return tensor.is_contiguous() and tensor.dtype == dtype and tensor.device == device


def copied(source: Tensor, target: Tensor) -> Tensor:
    """The target, with the source's values; they may be one tensor."""
    return target if target is source else target.copy_(source)


def bytes_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as flat uint8."""
    return tensor.reshape(-1).view(torch.uint8)
