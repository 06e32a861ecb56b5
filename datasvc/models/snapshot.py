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
class Copies:
    """Tensors on the host, in a buffer that must not be copied into again while they are read.

    Attributes:
        tensors: by the names of the originals; tensors that were the same bytes are the same ones.
        nbytes: of all, those that are the same counted once.
    """

    tensors: Mapping[str, torch.Tensor]
    nbytes: int
    _events: tuple[tuple[Any, Any], ...]

    def wait(self) -> float:
        """Return once devices have copied, with the seconds for which the busiest of them did nothing else."""
        for _, ended in self._events:
            ended.synchronize()
        return max((began.elapsed_time(ended) / 1000 for began, ended in self._events), default=0.0)


class HostBuffer:
    """Memory that holds one state at a time; it grows to the largest. Safe for threads."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._is_pinned = False
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Size of the memory."""
        return 0 if self._memory is None else self._memory.numel()

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> Copies:
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
        events = _Events()
        with self._lock, torch.no_grad():
            self._grow(nbytes, pinned=any(tensor.is_cuda for tensor in tensors.values()))
            for name, tensor in tensors.items():
                place = places[name]
                if not tensor.numel():
                    copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                    continue
                if place not in filled:
                    filled[place] = self._fill(place, tensor.detach(), events)
                copies[name] = filled[place]
        return Copies(copies, nbytes, events.end())

    def reserve_like(self, other: HostBuffer) -> None:
        """Have as much memory as `other`, touched already, so that the first `copy` does not wait for it.

        Nothing happens where there is memory already. Raises ConfigError: memory does not suffice.
        """
        with self._lock:
            if self._memory is None and other.capacity_bytes:
                self._grow(other.capacity_bytes, pinned=other._is_pinned)
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
        self._memory, self._is_pinned = None, False

    def _grow(self, nbytes: int, *, pinned: bool) -> None:
        if nbytes <= self.capacity_bytes and (self._is_pinned or not pinned):
            return
        self._release()
        memory = _map_memory(nbytes)
        self._memory, self._is_pinned = memory, pinned and _pin(memory)

    def _fill(self, place: int, tensor: torch.Tensor, events: _Events) -> torch.Tensor:
        assert self._memory is not None
        room = self._memory[place : place + tensor.numel() * tensor.element_size()]
        copied = room.view(tensor.dtype).view(tensor.shape)
        if tensor.is_cuda:
            events.begin(tensor.device)
            copied.copy_(tensor, non_blocking=True)
        else:
            copied.copy_(tensor)
        return copied


class _Events:
    """When each device began to copy, and when it ended."""

    def __init__(self) -> None:
        self._began: dict[Any, Any] = {}

    def begin(self, device: torch.device) -> None:
        if device not in self._began:
            self._began[device] = self._record(device)

    def end(self) -> tuple[tuple[Any, Any], ...]:
        return tuple((began, self._record(device)) for device, began in self._began.items())

    @staticmethod
    def _record(device: torch.device) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
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


def _pin(memory: torch.Tensor) -> bool:
    """Let devices write to the memory while the processor goes on; returns whether they can."""
    import torch

    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
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
