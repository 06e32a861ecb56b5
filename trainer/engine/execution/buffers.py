"""Scratch memory for fusion: allocated once per dtype and device, grown when needed, used again and again."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# One is packed while another travels.
_MAX_OF_A_KIND = 2

_BufferKind = tuple[torch.dtype, torch.device]


class FusionBuffers:
    """Hands out memory that nobody else uses until it is given back."""

    def __init__(self) -> None:
        self._free: dict[_BufferKind, list[Tensor]] = {}
        self._num_made: dict[_BufferKind, int] = {}
        self._changed = threading.Condition()
        self._failure: str | None = None

    def take(self, dtype: torch.dtype, device: torch.device, num_elements: int) -> Tensor:
        """An uninitialised contiguous `dtype[num_elements]` on the device; waits where two are in use.

        Raises:
            RuntimeError: `fail` was called: what is in use never comes back.
        """
        kind = (dtype, device)
        with self._changed:
            while not self._free.get(kind) and self._num_made.get(kind, 0) == _MAX_OF_A_KIND:
                if self._failure is not None:
                    raise RuntimeError(self._failure)
                self._changed.wait()
            if self._free.get(kind):
                buffer = self._free[kind].pop()
            else:
                self._num_made[kind] = self._num_made.get(kind, 0) + 1
                buffer = torch.empty(0, dtype=dtype, device=device)
        if buffer.numel() < num_elements:
            buffer = torch.empty(num_elements, dtype=dtype, device=device)
        return buffer[:num_elements]

    def give_back(self, taken: Tensor) -> None:
        """Takes back what `take` handed out."""
        whole = taken if taken._base is None else taken._base  # noqa: SLF001 - torch has no other way to the whole
        with self._changed:
            self._free.setdefault((whole.dtype, whole.device), []).append(whole)
            self._changed.notify_all()

    def clear(self) -> None:
        """Lets go of the memory that nobody uses."""
        with self._changed:
            self._free.clear()
            self._num_made.clear()

    def fail(self, failure: str) -> None:
        """Wakes whoever waits, with these words: nothing comes back any more."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
