"""Copies of a state in memory of the host that is used again: what a save writes while the training goes on.

Memory is allocated once per buffer, not per save, and of as many buffers as there may be saves at a time, so that a
save costs one pass over the bytes and the memory is bounded. Nothing that changes after `copy` reaches the copies.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from datasvc.errors import ConfigError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_ALIGNMENT: Final = 64
_PAGE: Final = mmap.PAGESIZE
_MADV_WIPEONFORK: Final = 18  # linux/mman.h; Python does not name it


@dataclass(frozen=True)
class HostCopies:
    """Tensors on the host, in a buffer that must not be copied into again while they are read.

    Attributes:
        tensors: by the names of the originals; tensors that were the same bytes are the same ones.
        nbytes: of all, those that are the same counted once.
    """

    tensors: Mapping[str, torch.Tensor]
    nbytes: int
    _events: tuple[tuple[torch.device, Any, Any], ...]

    def wait(self) -> float:
        """Return once devices have copied, with the seconds for which the busiest of them did nothing else."""
        import torch

        longest_s = 0.0
        for device, began, ended in self._events:
            # Another thread's current device is the first, which this process may have nothing to do with.
            with torch.cuda.device(device):
                ended.synchronize()
                longest_s = max(longest_s, began.elapsed_time(ended) / 1000)
        return longest_s


class HostBuffer:
    """Memory that holds one state at a time; it grows to the largest. Safe for threads."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._is_pinned = False
        # Whose driver was asked to pin the memory, which it may have refused; None: none was.
        self._pinned_for: torch.device | None = None
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Size of the memory."""
        return 0 if self._memory is None else self._memory.numel()

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> HostCopies:
        """Copy tensors of any device; those on CUDA are copied by their current streams, without a wait.

        Work that these streams are given later, such as the next update of the weights, comes after the copies.
        Copies that an earlier call returned are overwritten.

        Raises:
            ConfigError: memory does not suffice.
        """
        import torch

        places, nbytes = plan_places(tensors)
        copies: dict[str, torch.Tensor] = {}
        filled: dict[int, torch.Tensor] = {}
        events = _CopyEvents()
        with self._lock, torch.no_grad():
            self._grow(nbytes, pinned_for=next((each.device for each in tensors.values() if each.is_cuda), None))
            for name, tensor in tensors.items():
                place = places[name]
                if not tensor.numel():
                    copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                    continue
                if place not in filled:
                    filled[place] = self._fill(place, tensor.detach(), events)
                copies[name] = filled[place]
        return HostCopies(copies, nbytes, events.end())

    def reserve_like(self, other: HostBuffer) -> None:
        """Have as much memory as `other`, touched already, so that the first `copy` does not wait for it.

        Nothing happens where there is memory already. Raises ConfigError: memory does not suffice.
        """
        with self._lock:
            if self._memory is None and other.capacity_bytes:
                self._grow(other.capacity_bytes, pinned_for=other._pinned_for)
                self._touch()

    def release(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._release()

    def _touch(self) -> None:
        assert self._memory is not None
        self._memory.zero_()

    def _release(self) -> None:
        if self._memory is not None and self._is_pinned:
            _unpin(self._memory)
        self._memory, self._is_pinned, self._pinned_for = None, False, None

    def _grow(self, nbytes: int, *, pinned_for: torch.device | None) -> None:
        if nbytes <= self.capacity_bytes and (self._pinned_for is not None or pinned_for is None):
            return
        self._release()
        self._memory, self._pinned_for = _map_memory(nbytes), pinned_for
        self._is_pinned = pinned_for is not None and _pin(self._memory, pinned_for)

    def _fill(self, place: int, tensor: torch.Tensor, events: _CopyEvents) -> torch.Tensor:
        assert self._memory is not None
        room = self._memory[place : place + tensor.numel() * tensor.element_size()]
        copied = room.view(tensor.dtype).view(tensor.shape)
        if tensor.is_cuda:
            events.begin(tensor.device)
            # It may be of another stream, on which its memory is given to something else once it is freed.
            tensor.record_stream(events.stream(tensor.device))
            # Resolved on the device: `copy_` would do it on the host, without waiting for the bytes.
            copied.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)
        else:
            copied.copy_(tensor)
        return copied


class _CopyEvents:
    """When each device began to copy, and when it ended."""

    def __init__(self) -> None:
        self._began: dict[Any, Any] = {}

    def begin(self, device: torch.device) -> None:
        if device not in self._began:
            self._began[device] = self._record(device)

    def end(self) -> tuple[tuple[torch.device, Any, Any], ...]:
        return tuple((device, began, self._record(device)) for device, began in self._began.items())

    @staticmethod
    def stream(device: torch.device) -> torch.cuda.Stream:
        import torch

        return torch.cuda.current_stream(device)

    def _record(self, device: torch.device) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream(device))
        return event


def plan_places(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], int]:
    """Return where in a buffer each tensor goes, in bytes, and the size of the buffer.

    Tensors that are the same elements of the same memory, such as tied weights, get one place.
    """
    places: dict[str, int] = {}
    known: dict[Any, int] = {}
    end = 0
    for name, tensor in tensors.items():
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        same = (tensor.device, tensor.data_ptr(), *layout)
        if same not in known:
            known[same] = end
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        places[name] = known[same]
    return places, end


def _map_memory(nbytes: int) -> torch.Tensor:
    """Return memory that a forked child has empty: every page would be copied at the next save otherwise."""
    import torch

    try:
        mapped = mmap.mmap(-1, -(-nbytes // _PAGE) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"there is no memory for a copy of {nbytes} bytes ({error}), and two are needed to save while the "
            "training goes on; datasvc.models.save() needs none"
        ) from error
    for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
        try:
            mapped.madvise(advice)
        except OSError:
            logger.debug("the kernel takes no advice %d", advice)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Let devices write to the memory while the processor goes on; returns whether they can.

    `device` is one that the process uses: asking on behalf of another would take memory there.
    """
    import torch

    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        result = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(result) != 0:
        logger.warning(
            "%d bytes cannot be pinned (%s): saves from CUDA stop the training longer", memory.numel(), result
        )
        return False
    return True


def _unpin(memory: torch.Tensor) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
