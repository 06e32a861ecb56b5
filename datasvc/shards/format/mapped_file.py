"""A local file that is mapped, and can be read past its mapping too."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError

Bytes = npt.NDArray[np.uint8]
Opened = TypeVar("Opened")


class MappedFile:
    """A local file, open and mapped for reading for as long as this object or a view of it lives.

    Args:
        path: the file, whose name may go afterwards.

    Raises:
        NotFoundError: it does not exist.
        CorruptDataError: it is empty.
        UnavailableError: the process may not open more files.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path
        self._descriptor = _open(path)
        # Not when the program ends: threads may still read, and the kernel closes it then.
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        try:
            # Mapped by Python: Arrow's own way to make a mapping takes ten times as long.
            self.mapping = _with_descriptors(lambda: mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ), path)
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
        assert len(view) == len(buffer), (len(view), len(buffer))
        assert view.flags.c_contiguous
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


def _open(path: Path | str) -> int:
    try:
        return _with_descriptors(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist") from error


def _with_descriptors(take: Callable[[], Opened], path: Path | str) -> Opened:
    """Take a descriptor; where the process has no more of them, as many as it is allowed to have.

    A mapping and its file take one each, and many systems give a process 1,024 until it asks for more.
    """
    try:
        return take()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        return take()
    except OSError as error:
        raise UnavailableError(f"{path} cannot be opened: {error}; allow more files, `ulimit -n`") from error


def _address_of(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
