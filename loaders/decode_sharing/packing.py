"""Serialization of a batch as byte arrays: one per array or tensor, and a header that describes them.

`GroupFolder` writes these byte arrays, the parts of the batch, to shared memory. The header is a pickle. This is
safe, because both processes belong to one user and run the same program, and nothing is stored.
"""

from __future__ import annotations

import io
import pickle  # between processes of one user; nothing is stored
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Part = npt.NDArray[np.uint8]


def pack(batch: object) -> list[Part]:
    """Return the parts of the batch, the header last. Parts are views of contiguous arrays, and copies of others."""
    arrays: list[Part] = []

    # Not a method of the pickler: it would make a reference cycle, which keeps the batch until garbage collection.
    def collect_bytes(buffer: pickle.PickleBuffer) -> None:
        arrays.append(np.frombuffer(buffer.raw(), np.uint8))

    header = io.BytesIO()
    _Pickler(header, protocol=5, buffer_callback=collect_bytes).dump(batch)
    return [*arrays, np.frombuffer(header.getvalue(), np.uint8)]


def unpack(parts: Sequence[memoryview]) -> Any:
    """Return the batch that `pack` serialized. Its arrays and tensors are views of `parts` and keep them alive."""
    return pickle.loads(parts[-1], buffers=parts[:-1])  # noqa: S301 - written by a process of this user, see above


class _Pickler(pickle.Pickler):
    """A pickler that stores the bytes of tensors outside of the pickle, as pickle itself does for NumPy arrays."""

    def reducer_override(self, value: object) -> Any:
        torch = sys.modules.get("torch")  # a process without torch has no tensors, and need not import it
        if torch is not None and isinstance(value, torch.Tensor):
            return _reduce_tensor(value, torch)
        return NotImplemented


def _reduce_tensor(tensor: Any, torch: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and its arguments, from which pickle rebuilds a tensor. The first argument has the bytes.

    The bytes are those of its storage, so its axes may be in any order, and its dtype may be one that NumPy lacks.
    """
    tensor = tensor.detach().cpu()
    flat = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(tensor.untyped_storage())
    if flat.numel() != tensor.numel():  # a view of a larger storage: all of the storage would be sent
        tensor = tensor.contiguous().clone()
        flat = tensor.reshape(-1)
    values = np.asarray(flat.view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8))
    return _make_tensor, (values, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())


def _make_tensor(values: Part, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    import torch

    torch_dtype = getattr(torch, dtype)
    if not values.size:
        return torch.empty(shape, dtype=torch_dtype, device="cpu")
    return torch.from_numpy(values).view(torch_dtype).as_strided(shape, stride)
