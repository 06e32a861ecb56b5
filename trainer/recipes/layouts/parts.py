"""Parts of tensors: what a rank stores of a distributed tensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank stores, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
