"""Batches in the decoding process's memory, mapped into a job without a copy.

The mapping is private (copy on write): a change that the user makes in a batch is visible in this job only. A new
mapping costs as much as a copy, so a mapping is reused for the next batch in the same memory. It is not reused after
a write: pages that were written have become private and would hide the next batch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from datasvc.loaders.decode_sharing.memory import Span
from datasvc.loaders.decode_sharing.packing import unpack

# Bits of /proc/self/pagemap, from the kernel's Documentation/admin-guide/mm/pagemap.rst.
_IS_PRESENT: Final = np.uint64(1 << 63)
_IS_SWAPPED: Final = np.uint64(1 << 62)
_IS_OF_FILE: Final = np.uint64(1 << 61)


class _Loan(NamedTuple):
    """A reference to a batch of the decoding process, held by this job.

    Attributes:
        number: number of the batch in the decoding process.
        memory: number of the buffer that holds the batch.
        mapped: mapping of that buffer.
        address: address of the mapping.
    """

    number: int
    memory: int
    mapped: mmap.mmap
    address: int


class MappedBatches:
    """The batches that this job holds of one decoding process.

    Args:
        num_kept: maximum number of unused mappings that are kept for reuse.
    """

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._kept: dict[int, mmap.mmap] = {}
        self._returned: deque[_Loan] = deque()

    def read(self, number: int, memory: int, descriptor: int, spans: Sequence[Span]) -> Any:
        """Return a batch whose arrays are views of the memory; the reference ends with the last view.

        Args:
            number: number of the batch in the decoding process.
            memory: number of the buffer that holds it.
            descriptor: file descriptor of the buffer; the caller may close it afterwards.
            spans: offset and length in bytes of each part of the batch.

        Raises:
            OSError: the buffer cannot be mapped.
        """
        mapped = self._kept.pop(memory, None) or mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        # Every view of the batch keeps this object alive, and nothing else does: its end is the end of the batch.
        owner = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        loan = _Loan(number, memory, mapped, ctypes.addressof(owner))
        # Any thread may drop the last view at any moment, so the finalizer only appends to a deque, which is atomic.
        weakref.finalize(owner, self._returned.append, loan).atexit = False
        content = memoryview(owner).cast("B")
        return unpack([content[offset : offset + length] for offset, length in spans])

    def collect(self) -> list[int]:
        """Return the numbers of the batches that were dropped since the last call."""
        numbers = []
        while self._returned:
            loan = self._returned.popleft()
            numbers.append(loan.number)
            if not _has_private_pages(loan):
                self._kept[loan.memory] = loan.mapped
        while len(self._kept) > self._num_kept:
            del self._kept[next(iter(self._kept))]
        return numbers


def _has_private_pages(loan: _Loan) -> bool:
    """Return whether a page of the mapping was written and copied; True if the kernel does not report it."""
    num_pages = -(-len(loan.mapped) // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            content = os.pread(pagemap.fileno(), 8 * num_pages, loan.address // mmap.PAGESIZE * 8)
    except OSError:
        return True
    if len(content) < 8 * num_pages:
        return True
    pages = np.frombuffer(content, np.uint64)
    is_private = ((pages & (_IS_PRESENT | _IS_SWAPPED)) != 0) & ((pages & _IS_OF_FILE) == 0)
    return bool(is_private.any())
