"""A separate GPU stream for copies and kernels that run in parallel with those of the caller's stream.

Every tensor made on this stream must be passed to `hand_over`. Then the caller's stream waits until the tensor
is complete, and torch's allocator reuses the tensor's memory only after the caller's stream has used it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from datasvc.loaders.core.batch import check_gpu

if TYPE_CHECKING:
    import torch

Pixels = npt.NDArray[np.uint8]  # pixel values, 0 to 255


def current_gpu() -> int:
    """Return the index of torch's current GPU. Raises ConfigError: torch finds no GPU."""
    import torch

    check_gpu("cuda")
    return torch.cuda.current_device()


def make_stream(device: int | torch.device) -> torch.cuda.Stream:
    """Return a new stream of a GPU."""
    import torch

    make: Any = torch.cuda.Stream  # torch does not annotate its arguments
    stream: torch.cuda.Stream = make(device)
    return stream


class CudaStream:
    """A separate stream of a GPU, with the operations that an upload needs.

    Args:
        device: name of the device, such as "cuda:1".

    Raises:
        ConfigError: torch does not find this GPU.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        check_gpu(device)
        self._stream = make_stream(self._device)

    def allocate(self, shape: tuple[int, ...]) -> Pixels:
        """Return page-locked host memory with arbitrary values."""
        # Without this block, page-locking would create a CUDA context on the current GPU, which may be another one.
        with self._torch.cuda.device(self._device):
            memory: Pixels = self._torch.empty(shape, dtype=self._torch.uint8, pin_memory=True).numpy()
        return memory

    def active(self) -> AbstractContextManager[object]:
        """Return a context manager whose block queues its work on this stream."""
        stream: AbstractContextManager[object] = self._torch.cuda.stream(self._stream)
        return stream

    def copy(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Start a copy to the device. Call this inside `with stream.active()`.

        Do not change the array before the copy is complete: call `record` after this call, and wait for its event.
        """
        return self._torch.from_numpy(array).to(self._device, non_blocking=True)

    def record(self) -> torch.cuda.Event:
        """Return an event that marks the end of the work queued on this stream so far."""
        end: torch.cuda.Event = self._stream.record_event()
        return end

    def hand_over(self, tensor: torch.Tensor, end: torch.cuda.Event) -> None:
        """Make the caller's stream wait for `end`, and keep the tensor's memory until that stream has used it."""
        # The caller uses the batch on the current stream of its thread.
        current: Any = self._torch.cuda.current_stream(self._device)
        current.wait_event(end)
        tensor.record_stream(current)


def place(array: npt.NDArray[Any], device: str | torch.device) -> torch.Tensor:
    """Return a small array as a tensor on a device. The current stream copies it; the host does not wait.

    Args:
        array: the array. For a GPU, it may be changed as soon as this call returns. For the CPU it may not, because
            the tensor shares its memory.
        device: name of the device, such as "cpu" or "cuda:1".
    """
    import torch

    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()  # a copy, which torch's allocator keeps until the device has read it
    return tensor.to(device, non_blocking=True)
