"""Host buffers: reusable host memory that holds a copy of a state while the training changes the original.

A buffer keeps its memory between saves, so that most saves allocate nothing. To bound its memory, a
`CheckpointManager` has two buffers for saves to the repository: one is written while the next save fills the other.
With versions on the nodes (`local`) it has a third, for the saves to the nodes only.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from datasvc.errors import ConfigError
from datasvc.models.tensors.tensor_classes import memory_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Bytes. `Tensor.view(dtype)` requires an offset that is a multiple of the element size; 64 is one for every dtype.
_ALIGNMENT: Final = 64
_PAGE_BYTES: Final = mmap.PAGESIZE
_MADV_WIPEONFORK: Final = 18  # linux/mman.h; Python does not name it


@dataclass(frozen=True)
class HostCopies:
    """Copies of tensors in host memory. Do not copy another state to their buffer while they are read.

    Attributes:
        tensors: copies by the names of the originals; originals that share memory share one copy.
        nbytes: bytes of all copies; a shared copy counts once.
    """

    tensors: Mapping[str, torch.Tensor]
    nbytes: int
    _events: tuple[tuple[torch.device, Any, Any], ...]  # device, and the CUDA events before and after its copies

    def wait(self) -> float:
        """Wait for the device copies; return the seconds for which the busiest device was copying."""
        import torch

        longest_s = 0.0
        for device, began, ended in self._events:
            # Without `device`, torch would create a context on the GPU cuda:0, which this process may not use.
            with torch.cuda.device(device):
                ended.synchronize()
                longest_s = max(longest_s, began.elapsed_time(ended) / 1000)
        return longest_s


class HostBuffer:
    """Host memory for one state at a time; grows to the size of the largest state. Safe for threads."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._is_pinned = False
        # CUDA device for which pinning of the memory was tried, also if it failed; None: not tried.
        self._pin_tried_for: torch.device | None = None
        # Reentrant, because `_grow` calls `release` while `copy` holds the lock.
        self._lock = threading.RLock()

    @property
    def capacity_bytes(self) -> int:
        """Size of the memory; 0 before the first copy and after `release`."""
        return 0 if self._memory is None else self._memory.numel()

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> HostCopies:
        """Copy tensors from any device to the host; copies from CUDA run asynchronously on the current streams.

        Work that is queued on these streams later, such as the next optimizer step, runs after the copies. The copies
        that an earlier call returned are overwritten.

        Raises:
            ConfigError: there is not enough memory.
        """
        import torch

        offsets, nbytes = plan_offsets(tensors)
        copies: dict[str, torch.Tensor] = {}
        copy_by_offset: dict[int, torch.Tensor] = {}
        start_events: dict[torch.device, Any] = {}
        with self._lock, torch.no_grad(), torch.inference_mode(mode=False):
            first_cuda = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
            if nbytes:
                self._grow(nbytes, pin_for=first_cuda)
            for name, tensor in tensors.items():
                offset = offsets[name]
                # An empty tensor has the same offset as the next tensor, so it is not added to `copy_by_offset`.
                if not tensor.numel():
                    copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    continue
                if offset not in copy_by_offset:
                    copy_by_offset[offset] = self._fill(offset, tensor.detach(), start_events)
                copies[name] = copy_by_offset[offset]
        events = tuple((device, event, _record_event(device)) for device, event in start_events.items())
        return HostCopies(copies, nbytes, events)

    def reserve_like(self, other: HostBuffer) -> None:
        """Allocate as much memory as `other` has and write to it, so that the first `copy` causes no page faults.

        Does nothing if this buffer has memory already. Raises ConfigError: there is not enough memory.
        """
        with self._lock:
            if self._memory is None and other.capacity_bytes:
                self._grow(other.capacity_bytes, pin_for=other._pin_tried_for)
                assert self._memory is not None
                self._memory.zero_()

    def release(self) -> None:
        """Free the memory."""
        with self._lock:
            if self._memory is not None and self._is_pinned:
                import torch

                torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
            self._memory, self._is_pinned, self._pin_tried_for = None, False, None

    def _grow(self, nbytes: int, *, pin_for: torch.device | None) -> None:
        """Allocate new memory if the present one is too small, or if it must be pinned and this was not tried yet.

        `pin_for`: CUDA device that will copy to the memory. Memory is pinned only when it is allocated.
        """
        must_pin = pin_for is not None and self._pin_tried_for is None
        if nbytes <= self.capacity_bytes and not must_pin:
            return
        self.release()
        self._memory, self._pin_tried_for = _map_memory(nbytes), pin_for
        self._is_pinned = pin_for is not None and _pin(self._memory, pin_for)

    def _fill(self, offset: int, tensor: torch.Tensor, start_events: dict[torch.device, Any]) -> torch.Tensor:
        """Copy a tensor into the memory at `offset` and return the copy.

        Before the first copy from a device, record an event in `start_events`.
        """
        import torch

        assert self._memory is not None
        target_bytes = self._memory[offset : offset + tensor.numel() * tensor.element_size()]
        copied = target_bytes.view(tensor.dtype).view(tensor.shape)
        if tensor.is_cuda:
            if tensor.device not in start_events:
                start_events[tensor.device] = _record_event(tensor.device)
            # The tensor may belong to another stream: that stream must not reuse its memory before the copy has run.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
            # Conjugate and negate on the device: `copy_` would do both on the host, before the bytes have arrived.
            copied.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)
        else:
            copied.copy_(tensor)
        return copied


def plan_offsets(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], int]:
    """Return the offset of each tensor in a buffer, and the size of the buffer, in bytes.

    Tensors that share the same memory with the same layout, such as tied weights, share one offset.
    """
    offsets: dict[str, int] = {}
    offset_by_memory: dict[Any, int] = {}
    end = 0
    for name, tensor in tensors.items():
        # Without memory of its own, a tensor shares it with no other.
        memory = memory_of(tensor) or name
        if memory not in offset_by_memory:
            offset_by_memory[memory] = end
            # Round up to a multiple of the alignment.
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        offsets[name] = offset_by_memory[memory]
    return offsets, end


def _map_memory(nbytes: int) -> torch.Tensor:
    """Return memory of `nbytes`, rounded up to pages, as uint8. Raises ConfigError: there is not enough memory."""
    import torch

    try:
        mapped = mmap.mmap(-1, -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"cannot allocate {nbytes} bytes for a copy of the state ({error}); background saves need two such "
            "copies, datasvc.models.save() needs none"
        ) from error
    # Huge pages cause fewer page faults. WIPEONFORK gives zeros to forked children, such as workers of a loader: if
    # they shared the pages with this process, the kernel would copy each page that the next save writes.
    for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
        try:
            mapped.madvise(advice)
        except OSError:
            logger.debug("the kernel does not support madvise %d", advice)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _record_event(device: torch.device) -> Any:
    """Record a timed event on the current stream of a device, and return the event."""
    import torch

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Pin the memory, so that devices copy into it asynchronously; return whether it is pinned."""
    import torch

    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    # Without `device`, CUDA would create a context on the current device, which this process may not use.
    with torch.cuda.device(device):
        result = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(result) != 0:
        logger.warning(
            "%d bytes cannot be pinned (%s): each save from a GPU will stop the training longer",
            memory.numel(),
            result,
        )
        return False
    return True
