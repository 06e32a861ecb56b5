"""Serialization of a batch as byte arrays: one per array or tensor, and a header that describes them.

`GroupFolder` writes these arrays to shared memory. The header may be a pickle, because both processes belong to one
user and run the same program, and nothing is stored.
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
    """Return the batch as byte arrays, the header last. Arrays are views where memory is contiguous, else copies."""
    arrays: list[Part] = []

    # A function: a method of the pickler would make a reference cycle and keep the batch until garbage collection.
    def set_aside(buffer: pickle.PickleBuffer) -> None:
        arrays.append(np.frombuffer(buffer.raw(), np.uint8))

    header = io.BytesIO()
    _Pickler(header, protocol=5, buffer_callback=set_aside).dump(batch)
    return [*arrays, np.frombuffer(header.getvalue(), np.uint8)]


def unpack(parts: Sequence[memoryview]) -> Any:
    """Return the batch that `pack` serialized; its arrays and tensors are views of `parts` and keep them alive."""
    return pickle.loads(parts[-1], buffers=parts[:-1])  # noqa: S301 - of a process of this user, see `group_folder`


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return _reduce_tensor(value, torch)
        return NotImplemented


def _reduce_tensor(tensor: Any, torch: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Reduce a tensor to the bytes of its storage, for any dtype and any order of its axes."""
    tensor = tensor.detach().cpu()
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    if flat.numel() != tensor.numel():  # the tensor is a view of a larger storage, which must not be sent
        tensor = tensor.contiguous().clone()
        flat = tensor.reshape(-1)
    values = np.asarray(flat.view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8))
    return _make_tensor, (values, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())


def _make_tensor(values: Part, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if not values.size:
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(values).view(kind).as_strided(shape, stride)
