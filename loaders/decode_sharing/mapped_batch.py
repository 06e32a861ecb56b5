"""Memory of the decoding process, seen from a job: mapped, lent to whoever uses the batch, and mapped no more.

Mapped privately: what the user changes in a batch, he alone sees, as if it were his own. Mapping costs as much as
copying, so a mapping is used again for the next batch in the same memory, unless something was written through it:
pages that were would hide what lies there next.
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

# The kernel's Documentation/admin-guide/mm/pagemap.rst: a page that is there, and is the file's.
_IS_PRESENT: Final = np.uint64(1 << 63)
_IS_SWAPPED: Final = np.uint64(1 << 62)
_IS_OF_FILE: Final = np.uint64(1 << 61)


class _Loan(NamedTuple):
    """A batch that the user has, or had.

    Attributes:
        number: by which the lender knows it.
        memory: number of the memory that it lies in.
        mapped: that memory.
        address: where it is mapped.
    """

    number: int
    memory: int
    mapped: mmap.mmap
    address: int


class BorrowedMemory:
    """What one lender lent to this process.

    Args:
        num_kept: mappings that are kept for use again, at most.
    """

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._kept: dict[int, mmap.mmap] = {}
        self._returned: deque[_Loan] = deque()

    def read(self, number: int, memory: int, descriptor: int, spans: Sequence[Span]) -> Any:
        """Return a batch: views of the memory, lent until the last of them is gone.

        Args:
            number: of the loan.
            memory: number of the memory.
            descriptor: of the memory; not needed any more afterwards.
            spans: where the batch's parts lie.

        Raises:
            OSError: it cannot be mapped.
        """
        mapped = self._kept.pop(memory, None) or mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        # An object of this loan alone, which every view of the batch keeps alive.
        owner = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        loan = _Loan(number, memory, mapped, ctypes.addressof(owner))
        # Any thread may drop the last view, at any moment: it only leaves a note.
        weakref.finalize(owner, self._returned.append, loan).atexit = False
        whole = memoryview(owner).cast("B")
        return unpack([whole[offset : offset + length] for offset, length in spans])

    def collect(self) -> list[int]:
        """Return the numbers of the loans that ended since the last call."""
        numbers = []
        while self._returned:
            loan = self._returned.popleft()
            numbers.append(loan.number)
            if not _has_own_pages(loan):
                self._kept[loan.memory] = loan.mapped
        while len(self._kept) > self._num_kept:
            del self._kept[next(iter(self._kept))]
        return numbers


def _has_own_pages(loan: _Loan) -> bool:
    """Whether pages of a mapping are not the file's any more, because they were written; True if that is unknown."""
    num_pages = -(-len(loan.mapped) // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            content = os.pread(pagemap.fileno(), 8 * num_pages, loan.address // mmap.PAGESIZE * 8)
    except OSError:
        return True
    if len(content) < 8 * num_pages:
        return True
    pages = np.frombuffer(content, np.uint64)
    own = ((pages & (_IS_PRESENT | _IS_SWAPPED)) != 0) & ((pages & _IS_OF_FILE) == 0)
    return bool(own.any())
