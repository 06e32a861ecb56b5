"""Shared memory of one decoded batch (`memfd`), for `GroupFolder`: one job writes it, others map it without a copy.

The memory has no name in a file system. The kernel frees it when no process has it open or mapped. A reader keeps a
shared lock on the memory as long as it references the batch. The writer writes the next batch only under the
exclusive lock, so a batch never changes while it is in use.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import mmap
import os
import pickle  # between processes of one user; nothing is stored
import stat
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

KEY_BYTES: Final = 16
_ALIGNMENT: Final = 64  # bytes: a cache line, and enough for any dtype
_HEADER: Final = struct.Struct(f"<{KEY_BYTES}sQ")  # key of the batch, number of its parts
_SPAN: Final = struct.Struct("<QQ")  # offset and length of each part, in bytes
# Bits of /proc/self/pagemap, from the kernel's Documentation/admin-guide/mm/pagemap.rst.
_IS_PRESENT: Final = np.uint64(1 << 63)
_IS_SWAPPED: Final = np.uint64(1 << 62)
_IS_OF_FILE: Final = np.uint64(1 << 61)


Part = npt.NDArray[np.uint8]


class SharedBuffer:
    """Memory for one batch, for the job that writes it.

    Attributes:
        descriptor: file descriptor of the memory, which other processes of the user open through `/proc`.
        size_bytes: size of the memory.

    Raises:
        OSError: the system has no memory or file descriptor left.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.descriptor = os.memfd_create("datasvc-decode", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, size_bytes)
            self._mapped = mmap.mmap(self.descriptor, size_bytes)
        except OSError:
            os.close(self.descriptor)
            raise

    def try_lock(self) -> bool:
        """Lock the memory, so that no job can read it until `unlock`. Return False if a job still uses it."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Let other jobs map the memory."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def write(self, key: bytes, parts: Sequence[Part]) -> None:
        """Write a batch. The memory must have at least `size_of(parts)` bytes, and be locked or not be linked yet."""
        content = np.frombuffer(self._mapped, np.uint8)
        spans = _lay_out(parts)
        for number, (part, (offset, length)) in enumerate(zip(parts, spans, strict=True)):
            np.copyto(content[offset : offset + length], part)
            _SPAN.pack_into(self._mapped, _HEADER.size + number * _SPAN.size, offset, length)
        _HEADER.pack_into(self._mapped, 0, key, len(parts))

    def close(self) -> None:
        """Unmap and close the memory; mappings of readers stay valid."""
        self._mapped.close()
        os.close(self.descriptor)


def size_of(parts: Sequence[Part]) -> int:
    """Return the size in bytes of the memory that a packed batch needs."""
    offset, length = _lay_out(parts)[-1]
    return offset + length


class MappedBatches:
    """Reads batches from the memory of other jobs, and keeps the mappings of this memory for later batches.

    A writer uses its memory for several batches, and a new mapping costs as much as a copy. So up to `num_kept`
    mappings whose batch is no longer used are kept. A mapping that the caller has written to is not kept: written
    pages have become private and would hide the next batch.
    """

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._kept: dict[int, _Mapping] = {}  # by inode number, oldest first
        self._returned: deque[_Mapping] = deque()  # with unused batches, and not yet passed to `_keep`

    def read(self, descriptor: int, key: bytes) -> Any | None:
        """Return the batch with a key in memory of another job; None if the memory has another batch now.

        The arrays of the batch are views of a private mapping: they do not change while they are referenced, and
        writing to them changes no other job's batch. The caller may close the descriptor.

        Raises:
            OSError: the memory cannot be mapped.
        """
        status = os.fstat(descriptor)
        # The link of a killed job may have led to any file of a new process with the same id.
        if not stat.S_ISREG(status.st_mode) or status.st_size < _HEADER.size:
            return None
        while self._returned:
            self._keep(self._returned.popleft())
        # Inode numbers identify memory: a mapping keeps its memory, so no new memory gets the same number.
        mapping = self._kept.pop(status.st_ino, None) or _Mapping(descriptor, status.st_ino)
        batch = mapping.read(key, self._returned)
        if batch is None:
            self._kept[status.st_ino] = mapping
        return batch

    def close(self) -> None:
        """Drop all mappings whose batch is no longer used. The others stay valid."""
        self._kept.clear()
        # Use a new deque: mappings in use are appended to the old one later, and freed with it.
        self._returned = deque()

    def _keep(self, mapping: _Mapping) -> None:
        """Keep a mapping, unless the caller has written to it, and drop the oldest mappings above the limit."""
        if not mapping.has_private_pages():
            self._kept[mapping.inode] = mapping
        while len(self._kept) > self._num_kept:
            del self._kept[next(iter(self._kept))]


class _Mapping:
    """A private mapping of another job's memory. Its descriptor holds the shared lock while its batch is in use."""

    def __init__(self, descriptor: int, inode: int) -> None:
        self.inode = inode
        self._pid = os.getpid()
        self._mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        self._descriptor = os.dup(descriptor)

    def read(self, key: bytes, returned: deque[_Mapping]) -> Any | None:
        """Return the batch with a key; None if the memory has another batch.

        When the last view of the batch is gone, the mapping is unlocked and appended to `returned`.
        """
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return None  # the job that owns the memory is writing the next batch
        # Read the header under the lock, so that it does not change after the comparison.
        stored_key, num_parts = _HEADER.unpack_from(self._mapped, 0)
        if stored_key != key:
            self._unlock()
            return None
        # Only the views of the batch keep `owner` alive, so it is finalized when the last view is gone.
        owner = (ctypes.c_char * len(self._mapped)).from_buffer(self._mapped)
        # Any thread may drop the last view, so `returned` is a deque: appending to it is atomic. At exit nothing has
        # to be done, because the kernel drops the lock.
        weakref.finalize(owner, self._return, returned).atexit = False
        content = memoryview(owner).cast("B")
        spans = _SPAN.iter_unpack(content[_HEADER.size : _HEADER.size + num_parts * _SPAN.size])
        return unpack([content[offset : offset + length] for offset, length in spans])

    def has_private_pages(self) -> bool:
        """Return whether the caller has written to a page of the mapping; True if the kernel does not report this."""
        num_pages = -(-len(self._mapped) // mmap.PAGESIZE)  # rounded up
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
                content = os.pread(pagemap.fileno(), 8 * num_pages, self._address // mmap.PAGESIZE * 8)
        except OSError:
            return True
        if len(content) < 8 * num_pages:
            return True
        pages = np.frombuffer(content, np.uint64)
        # A page that was never used is neither present nor swapped; a shared one belongs to the file of the memory.
        is_private = ((pages & (_IS_PRESENT | _IS_SWAPPED)) != 0) & ((pages & _IS_OF_FILE) == 0)
        return bool(is_private.any())

    def __del__(self) -> None:
        os.close(self._descriptor)

    def _return(self, returned: deque[_Mapping]) -> None:
        """Unlock the mapping and append it to `returned`. Called when the last view of the batch is gone."""
        if os.getpid() != self._pid:
            return  # a forked child shares the lock with its parent, which may still use the batch
        self._unlock()
        returned.append(self)

    def _unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def _lay_out(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Return the offset and length of each part. Parts follow the header and the spans, aligned for any dtype."""
    spans, end = [], _HEADER.size + len(parts) * _SPAN.size
    for part in parts:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT  # the next aligned offset
        spans.append((offset, part.size))
        end = offset + part.size
    return spans


# `GroupFolder` writes these byte arrays, the parts of the batch, to shared memory. The header is a pickle. This is
# safe, because both processes belong to one user and run the same program, and nothing is stored.


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
