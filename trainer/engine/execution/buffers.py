"""Pool of fusion buffers, into which tensors are packed so that one collective sends them together.

The pool has at most two buffers per dtype and device. It replaces a buffer only when a longer one is needed.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# Two, so that one buffer is packed while another one is reduced.
_MAX_PER_KIND = 2

# Buffers of one kind have the same dtype and device.
_BufferKind = tuple[torch.dtype, torch.device]


class FusionBuffers:
    """A pool of buffers. A buffer belongs to the caller of `take` until `give_back`, which any thread may call."""

    def __init__(self) -> None:
        self._free: dict[_BufferKind, list[Tensor]] = {}
        self._num_made: dict[_BufferKind, int] = {}  # number of buffers, free or in use
        self._changed = threading.Condition()
        self._failure: str | None = None

    def take(self, dtype: torch.dtype, device: torch.device, num_elements: int) -> Tensor:
        """Return an uninitialized contiguous `dtype[num_elements]` on the device.

        If both buffers of this dtype and device are in use, wait until one of them is given back.

        Raises:
            RuntimeError: `fail` was called before or during the wait. After a failure, a buffer in use may never be
                given back.
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
            # Replace the buffer by a longer one. This soon stops, because each training step needs the same sizes.
            buffer = torch.empty(num_elements, dtype=dtype, device=device)
        return buffer[:num_elements]

    def give_back(self, taken: Tensor) -> None:
        """Return a buffer from `take` to the pool."""
        buffer = taken if taken._base is None else taken._base  # noqa: SLF001 - torch has no public way to the base
        with self._changed:
            self._free.setdefault((buffer.dtype, buffer.device), []).append(buffer)
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget all buffers, and release the memory of the free ones. The engine calls this at its end."""
        with self._changed:
            self._free.clear()
            self._num_made.clear()

    def fail(self, failure: str) -> None:
        """Make each `take` that waits, or would have to wait later, raise RuntimeError with the message `failure`."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
