"""A local file that is mapped, and can be read past its mapping too."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError

Bytes = npt.NDArray[np.uint8]


class MappedFile:
    """A local file, open and mapped for reading for as long as this object or a view of it lives.

    Args:
        path: the file, whose name may go afterwards.

    Raises:
        NotFoundError: it does not exist.
        CorruptDataError: it is empty.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"{path} does not exist") from error
        weakref.finalize(self, os.close, self._descriptor)
        try:
            # Mapped by Python: Arrow's own way to make a mapping takes ten times as long.
            self.mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise CorruptDataError(f"{path} is no Arrow IPC file: it is empty") from error
        self._start = _address_of(np.frombuffer(self.mapping, np.uint8))

    def read(self, view: Bytes, buffer: Bytes) -> Bytes:
        """Fill a buffer from the file with what a view of the mapping shows.

        Args:
            view: `uint8[size]`.
            buffer: `uint8[size]`.

        Returns:
            The buffer; or the view itself where it is none of the mapping.

        Raises:
            CorruptDataError: the file has become shorter.
            UnavailableError: the disk cannot be read.
        """
        offset = _address_of(view) - self._start
        if not 0 <= offset <= len(self.mapping) - len(view):
            return view
        num_read = 0
        while num_read < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[num_read:].data], offset + num_read)
            except OSError as error:
                raise UnavailableError(f"{self._path} cannot be read: {error}; is its disk well?") from error
            if not count:
                raise CorruptDataError(f"{self._path} has become shorter while it was open: something truncated it")
            num_read += count
        return buffer

    def let_go(self) -> None:
        """Unmap the pages that were touched. Views stay valid: what they touch again is mapped again."""
        self.mapping.madvise(mmap.MADV_DONTNEED)


def _address_of(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
