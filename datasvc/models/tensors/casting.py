"""Tensors in another dtype, with nothing lost that is not said: a large number must not become an infinity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datasvc.errors import ConfigError

if TYPE_CHECKING:
    import torch


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in another dtype; itself where it has it.

    Raises:
        ConfigError: numbers would become infinite that are not; names the tensor and says how many.
    """
    made = tensor.to(dtype)
    if made is tensor or not (tensor.dtype.is_floating_point and dtype.is_floating_point):
        return made
    # Eight-bit dtypes without infinities say NaN.
    num = int((_isfinite(tensor) & ~_isfinite(made)).sum())
    if num:
        raise ConfigError(
            f"{num} of {tensor.numel()} numbers of tensor {name!r} are too large for "
            f"{str(dtype).removeprefix('torch.')}; take a dtype of a larger range, such as bfloat16 or float32"
        )
    return made


def _isfinite(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor)
