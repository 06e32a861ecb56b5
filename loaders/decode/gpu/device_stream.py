"""A stream of a GPU beside the caller's: copies and kernels on it run while those of the caller do.

Law: what is made here is handed over. The caller's stream waits for it, and torch's allocator gives its memory out
again only when the caller's stream is done with it too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError

if TYPE_CHECKING:
    import torch

Levels = npt.NDArray[np.uint8]


class StreamEvent(Protocol):
    """A moment on a stream; that of torch is `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether it is past."""

    def synchronize(self) -> None:
        """Wait for it."""


class DeviceStream(Protocol):
    """What an upload needs of a GPU."""

    def allocate(self, shape: tuple[int, ...]) -> Levels:
        """Return page-locked memory of the host with arbitrary values."""

    def active(self) -> AbstractContextManager[object]:
        """Queue the work inside on this stream."""

    def copy(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Begin to copy an array, inside `active`; it must not change until a moment recorded afterwards is past."""

    def record(self) -> StreamEvent:
        """Return the moment when all that was queued so far is done."""

    def hand_over(self, tensor: torch.Tensor, done: StreamEvent) -> None:
        """Let the caller's stream wait for `done`, and keep the tensor's memory until that stream is through."""


def current_gpu() -> int:
    """Return the number of torch's current GPU. Raises ConfigError: torch finds none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', and torch finds no GPU here; give device='cpu'")
    return torch.cuda.current_device()


class CudaStream:
    """A `DeviceStream` of CUDA.

    Args:
        device: "cuda:1".

    Raises:
        ConfigError: torch has no such GPU.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (self._device.index or 0) >= count:
            raise ConfigError(
                f"device is {device!r}, and torch finds {count} GPUs here; give device='cpu' or another"
            )
        make: Any = torch.cuda.Stream  # which has no types
        self._stream: torch.cuda.Stream = make(self._device)

    def allocate(self, shape: tuple[int, ...]) -> Levels:
        """See `DeviceStream`."""
        with self._torch.cuda.device(self._device):  # else page-locking opens a context on another GPU
            memory: Levels = self._torch.empty(shape, dtype=self._torch.uint8, pin_memory=True).numpy()
        return memory

    def active(self) -> AbstractContextManager[object]:
        """See `DeviceStream`."""
        stream: AbstractContextManager[object] = self._torch.cuda.stream(self._stream)
        return stream

    def copy(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """See `DeviceStream`."""
        return self._torch.from_numpy(array).to(self._device, non_blocking=True)

    def record(self) -> StreamEvent:
        """See `DeviceStream`."""
        done: StreamEvent = self._stream.record_event()
        return done

    def hand_over(self, tensor: torch.Tensor, done: StreamEvent) -> None:
        """See `DeviceStream`."""
        # Of the thread that calls: where the batch is used.
        current: Any = self._torch.cuda.current_stream(self._device)
        current.wait_event(done)
        tensor.record_stream(current)


def place(array: npt.NDArray[Any], device: str | torch.device) -> torch.Tensor:
    """Return a small array on a device, copied in the order of the current stream; the host does not wait.

    Args:
        array: may be used again once this returns, unless the device is the CPU, which shares its memory.
        device: "cpu", "cuda:1".
    """
    import torch

    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()  # a copy, which torch's allocator keeps until it was read
    return tensor.to(device, non_blocking=True)
