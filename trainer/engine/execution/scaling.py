"""Multiplication by the factors of an allreduce, in place, with Horovod's arithmetic for every dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_(tensor: Tensor, *, factor: float, divisor: int = 1) -> None:
    """Set `tensor` to `tensor * factor / divisor`.

    Integers are scaled in float64 and truncated toward zero. Half precision is scaled in float32 and rounded once.
    """
    if factor == 1.0 and divisor == 1:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor / divisor)
    else:
        # A division, not a multiplication by the reciprocal: 49 * (1 / 49) truncates to 0.
        tensor.copy_(tensor.to(torch.float64).mul_(factor).div_(divisor))
