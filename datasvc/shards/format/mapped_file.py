"""Local files that are mapped into memory. They can also be read with `preadv`, which does not touch mapped pages.

`Shard.map` opens shards as mapped files. `Shard.read` explains why images are read with `preadv`.
"""

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
    """A local file, open and mapped for reading as long as this object or a view of it is referenced.

    Args:
        path: the file; it may be deleted afterwards.

    Raises:
        NotFoundError: the file does not exist.
        CorruptDataError: the file is empty.
        UnavailableError: the file cannot be opened, for example because of the limit of open files.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path
        self._descriptor = _with_raised_limit(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)
        # Do not close the file when the interpreter exits: other threads may still read it. The kernel closes it.
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        try:
            # Use Python's mmap, because Arrow's memory map takes ten times as long to create.
            self.mapping = _with_raised_limit(lambda: mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ), path)
        except ValueError as error:
            raise CorruptDataError(f"{path} is not an Arrow IPC file: it is empty") from error
        self._start_address = _address_of(np.frombuffer(self.mapping, np.uint8))

    def read(self, view: Bytes, buffer: Bytes) -> Bytes:
        """Read from the file the bytes that `view` shows, into `buffer` of the same size, and return `buffer`.

        If `view` is not part of the mapping, nothing is read, and `view` itself is returned.

        Raises:
            CorruptDataError: the file was truncated.
            UnavailableError: the disk cannot be read.
        """
        assert len(view) == len(buffer), (len(view), len(buffer))
        assert view.flags.c_contiguous
        offset = _address_of(view) - self._start_address
        if not 0 <= offset <= len(self.mapping) - len(view):
            return view
        num_read = 0
        while num_read < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[num_read:].data], offset + num_read)
            except OSError as error:
                raise UnavailableError(f"{self._path} cannot be read: {error}; check the disk") from error
            if not count:
                raise CorruptDataError(f"{self._path} was truncated while it was open: restore it from another copy")
            num_read += count  # a read may return fewer bytes than requested
        return buffer

    def release_pages(self) -> None:
        """Unmap the pages that were accessed. Views stay valid: an access maps the page again."""
        self.mapping.madvise(mmap.MADV_DONTNEED)


def _with_raised_limit(open_file: Callable[[], Opened], path: Path | str) -> Opened:
    """Call `open_file`; at the limit of open files, raise the limit to its maximum and call it again."""
    try:
        return open_file()
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist") from error
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise UnavailableError(f"{path} cannot be opened: {error}; check the disk and its permissions") from error
    # The limit of open files is reached: a mapping and its file need a descriptor each, and many systems allow a
    # process only 1,024 by default.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # if the limit stays, the second call reports it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    try:
        return open_file()
    except OSError as error:
        raise UnavailableError(f"{path} cannot be opened: {error}; allow more open files with `ulimit -n`") from error


def _address_of(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
