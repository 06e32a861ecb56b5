"""Pool of fusion buffers, into which the executors pack tensors: at most two per dtype and device, reused."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# Two, so that one buffer is packed while another one is reduced.
_MAX_PER_KIND = 2

_BufferKind = tuple[torch.dtype, torch.device]


class FusionBuffers:
    """A pool of buffers; a buffer belongs to one user until `give_back`."""

    def __init__(self) -> None:
        self._free: dict[_BufferKind, list[Tensor]] = {}
        self._num_made: dict[_BufferKind, int] = {}
        self._changed = threading.Condition()
        self._failure: str | None = None

    def take(self, dtype: torch.dtype, device: torch.device, num_elements: int) -> Tensor:
        """Return an uninitialized contiguous `dtype[num_elements]` on the device; wait while two are in use.

        Raises:
            RuntimeError: `fail` was called, so buffers in use are never given back.
        """
        kind = (dtype, device)
        with self._changed:
            while not self._free.get(kind) and self._num_made.get(kind, 0) == _MAX_PER_KIND:
                if self._failure is not None:
                    raise RuntimeError(self._failure)
                self._changed.wait()
            if self._free.get(kind):
                buffer = self._free[kind].pop()
            else:
                self._num_made[kind] = self._num_made.get(kind, 0) + 1
                buffer = torch.empty(0, dtype=dtype, device=device)
        if buffer.numel() < num_elements:
            # The shorter buffer is dropped: a training step repeats its sizes, so buffers soon stop growing.
            buffer = torch.empty(num_elements, dtype=dtype, device=device)
        return buffer[:num_elements]

    def give_back(self, taken: Tensor) -> None:
        """Return a buffer from `take` to the pool."""
        buffer = taken if taken._base is None else taken._base  # noqa: SLF001 - torch has no public way to the base
        with self._changed:
            self._free.setdefault((buffer.dtype, buffer.device), []).append(buffer)
            self._changed.notify_all()

    def clear(self) -> None:
        """Release the memory of free buffers."""
        with self._changed:
            self._free.clear()
            self._num_made.clear()

    def fail(self, failure: str) -> None:
        """Raise an error with this message in every call of `take` that waits now or would have to wait later."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
