"""The bytes of a tensor: its elements in row-major order, as arrays `uint8[size]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from datasvc.errors import ConfigError
from datasvc.models.tensors.chunks import Shape
from datasvc.models.tensors.codec import Bytes
from datasvc.models.tensors.tensor_table import ITEM_BYTES

if TYPE_CHECKING:
    import torch

_BLOCK_WORDS: Final = 64 << 10


def _magnitude(word: type[np.unsignedinteger[Any]], least: int) -> tuple[type[np.unsignedinteger[Any]], Any, Any]:
    return word, word(np.iinfo(word).max >> 1), word(least)


# Words, the bits of them that are no sign, and the least of these that is no finite number: IEEE 754 gives it an
# exponent of ones; float8_e4m3fn has no infinities and one NaN.
_MAGNITUDES: Final = {
    "float64": _magnitude(np.uint64, 0x7FF0 << 48),
    "float32": _magnitude(np.uint32, 0x7F80 << 16),
    "float16": _magnitude(np.uint16, 0x7C00),
    "bfloat16": _magnitude(np.uint16, 0x7F80),
    "float8_e5m2": _magnitude(np.uint8, 0x7C),
    "float8_e4m3fn": _magnitude(np.uint8, 0x7F),
    "complex64": _magnitude(np.uint32, 0x7F80 << 16),
    "complex128": _magnitude(np.uint64, 0x7FF0 << 48),
}


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
    is_strange = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested
    if is_strange or dtype_name(tensor) not in ITEM_BYTES:
        layout = "meta" if tensor.is_meta else "nested" if tensor.is_nested else tensor.layout
        kind = f"{layout}, {dtype_name(tensor)}"
        raise ConfigError(f"tensor {name!r} ({kind}) cannot be stored; make it a dense tensor with data first")


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's bytes, copied only where it is not contiguous on the CPU."""
    import torch

    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory can be filled as it lies."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def tensor_of(content: Bytes, dtype: str, shape: Shape) -> torch.Tensor:
    """Return a tensor over `content`, which it shares."""
    import torch

    return torch.from_numpy(content).view(getattr(torch, dtype)).reshape(shape)


def count_nonfinite(content: Bytes, dtype: str) -> int:
    """Return how many elements of a tensor's bytes are NaN or infinite.

    Not by torch: its own threads would be started for each thread that asks, and take the processors from each other.
    """
    found = _MAGNITUDES.get(dtype)
    if found is None:
        return 0
    word, mask, least = found
    words = content.view(word)
    count = 0
    for start in range(0, words.size, _BLOCK_WORDS):
        magnitudes = np.bitwise_and(words[start : start + _BLOCK_WORDS], mask)
        if magnitudes.max() >= least:
            parts = (magnitudes >= least).reshape(-1, 2 if dtype.startswith("complex") else 1)
            count += int(np.count_nonzero(parts.any(axis=1)))
    return count
