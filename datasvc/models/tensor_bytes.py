"""The bytes of a tensor: its elements in row-major order, as arrays `uint8[size]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from datasvc.errors import ConfigError
from datasvc.models.codec import Bytes
from datasvc.models.pieces import Shape
from datasvc.models.records import ITEM_BYTES

if TYPE_CHECKING:
    import torch


def dtype_name(tensor: torch.Tensor) -> str:
    """Return torch's name of a tensor's dtype, "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError, naming it, unless a tensor has bytes of its own to store. Does not touch them."""
    import torch

    if hasattr(tensor, "placements"):
        raise ConfigError(
            f"tensor {name!r} is a DTensor, of which each rank holds a part; save it with "
            "torch.distributed.checkpoint and datasvc.models.dcp, or its full_tensor()"
        )
    is_strange = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta
    if is_strange or dtype_name(tensor) not in ITEM_BYTES:
        kind = f"{'meta' if tensor.is_meta else tensor.layout}, {dtype_name(tensor)}"
        raise ConfigError(f"tensor {name!r} ({kind}) cannot be stored; make it a dense tensor with data first")


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's bytes, copied only where it is not contiguous on the CPU."""
    import torch

    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def tensor_of(content: Bytes, dtype: str, shape: Shape) -> torch.Tensor:
    """Return a tensor over `content`, which it shares."""
    import torch

    return torch.from_numpy(content).view(getattr(torch, dtype)).reshape(shape)


def count_nonfinite(tensor: torch.Tensor) -> int:
    """Return how many elements are NaN or infinite."""
    import torch

    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    if tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.float32)
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    # One pass without memory: any NaN or infinity makes the sum one. A sum that overflows is looked at again.
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    if bool(torch.isfinite(values.sum(dtype=wide))):
        return 0
    return int((~torch.isfinite(tensor)).sum())
