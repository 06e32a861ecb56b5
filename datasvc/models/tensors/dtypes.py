"""Storable dtypes: which tensors can be stored, and conversions between tensors and their bytes.

The bytes of a tensor are its elements in row-major order, as `uint8[size]`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from datasvc.errors import ConfigError
from datasvc.models.tensors.chunks import Shape
from datasvc.models.tensors.codec import Bytes
from datasvc.models.tensors.tensor_classes import has_memory, inner_tensors, is_sharded
from datasvc.models.tensors.tensor_table import ITEM_BYTES

if TYPE_CHECKING:
    import torch

# Words per block of `count_nonfinite`. The number is even, so that both words of a complex number are in one block.
_BLOCK_WORDS: Final = 64 << 10


def _magnitude(word: type[np.unsignedinteger[Any]], least: int) -> tuple[type[np.unsignedinteger[Any]], Any, Any]:
    """Return a value of `_MAGNITUDES`: the word type, a mask for all bits but the sign, and `least` as a word."""
    return word, word(np.iinfo(word).max >> 1), word(least)


# Per dtype: the word type, a mask for all bits but the sign, and the smallest magnitude that is not finite, where the
# magnitude is the word without its sign. In IEEE 754 this is an exponent of ones; float8_e4m3fn has no infinities and
# one NaN. Elements of other dtypes are always finite.
# Dtypes of a byte without infinities and with one NaN, which is not a magnitude: the bits of a negative 0, or all.
_ONLY_NAN: Final = {"float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80, "float8_e8m0fnu": 0xFF}
_MAGNITUDES: Final = {
    "float64": _magnitude(np.uint64, 0x7FF0 << 48),
    "float32": _magnitude(np.uint32, 0x7F80 << 16),
    "float16": _magnitude(np.uint16, 0x7C00),
    "bfloat16": _magnitude(np.uint16, 0x7F80),
    "float8_e5m2": _magnitude(np.uint8, 0x7C),
    "float8_e4m3fn": _magnitude(np.uint8, 0x7F),
    "complex32": _magnitude(np.uint16, 0x7C00),
    "complex64": _magnitude(np.uint32, 0x7F80 << 16),
    "complex128": _magnitude(np.uint64, 0x7FF0 << 48),
}


def dtype_name(tensor: torch.Tensor) -> str:
    """Return torch's name of a tensor's dtype, such as "float32"."""
    return _name_of(tensor.dtype)


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError, with the name, if the values of a tensor cannot be stored. Does not read them."""
    import torch

    if is_sharded(tensor):
        raise ConfigError(
            f"tensor {name!r} is a DTensor: each rank holds only a part of it. Save it on every rank with a "
            "CheckpointManager (repo.models.manager) or datasvc.models.dcp, or save its full_tensor()"
        )
    is_dense = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta or tensor.is_nested)
    if not is_dense:
        layout = "meta" if tensor.is_meta else "nested" if tensor.is_nested else tensor.layout
        kind = f"{layout}, {dtype_name(tensor)}"
        raise ConfigError(f"tensor {name!r} ({kind}) cannot be stored; make it a dense tensor with data first")
    if not has_memory(tensor):
        how = "or save it with a CheckpointManager" if inner_tensors(tensor) else "as it has no __tensor_flatten__"
        raise ConfigError(
            f"tensor {name!r} is a {type(tensor).__name__}, which has no memory of its own; store the tensors that "
            f"it is made of, {how}"
        )
    if dtype_name(tensor) not in ITEM_BYTES:
        raise ConfigError(
            f"tensor {name!r} has the dtype {dtype_name(tensor)}, which cannot be stored: torch itself cannot copy "
            "all values of this dtype; store tensor.view(torch.uint8)"
        )


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a tensor, as a view if it is contiguous on the CPU, else as a copy."""
    import torch

    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def tensor_of(content: Bytes, dtype: str, shape: Shape) -> torch.Tensor:
    """Return a tensor of `dtype` and `shape` that shares the memory of `content`."""
    import torch

    return torch.from_numpy(content).view(getattr(torch, dtype)).reshape(shape)


def count_nonfinite(content: Bytes, dtype: str) -> int:
    """Return the number of NaN and infinite elements in the bytes of a tensor.

    Uses numpy: torch would start a pool of threads for each calling thread, and these would compete for processors.
    """
    if dtype in _ONLY_NAN:
        return int(np.count_nonzero(content == _ONLY_NAN[dtype]))
    magnitude = _MAGNITUDES.get(dtype)
    if magnitude is None:
        return 0
    word, mask, least = magnitude
    words = content.view(word)
    count = 0
    for start in range(0, words.size, _BLOCK_WORDS):
        magnitudes = np.bitwise_and(words[start : start + _BLOCK_WORDS], mask)
        # Usually all elements are finite, and a block needs only this comparison.
        if magnitudes.max() >= least:
            # A complex element counts once, even if both of its words are not finite.
            is_nonfinite = (magnitudes >= least).reshape(-1, 2 if dtype.startswith("complex") else 1)
            count += int(np.count_nonzero(is_nonfinite.any(axis=1)))
    return count


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor converted to `dtype`; the tensor itself if it has this dtype.

    Only conversions between floating-point dtypes are checked.

    Raises:
        ConfigError: finite numbers would become infinite; the message names the tensor and says how many.
    """
    converted = tensor.to(dtype)
    if converted is tensor or not (tensor.dtype.is_floating_point and dtype.is_floating_point):
        return converted
    # Count numbers that became NaN too: an eight-bit dtype without infinities has NaN for too large numbers.
    num_overflowed = int((_isfinite(tensor) & ~_isfinite(converted)).sum())
    if num_overflowed:
        raise ConfigError(
            f"{num_overflowed} of {tensor.numel()} numbers of tensor {name!r} are too large for "
            f"{str(dtype).removeprefix('torch.')}; use a dtype with a larger range, such as bfloat16 or float32"
        )
    return converted


def _isfinite(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    # torch has no `isfinite` for float8_e4m3fn.
    return torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor)
