"""Ranged reads of a store's files, returned as bytes or passed on as they arrive.

`stream` reads plain web servers by `http_ranges`, and other stores in blocks by fsspec's client.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import fsspec

from datasvc.errors import UnavailableError
from datasvc.repository.store import obstore_loop
from datasvc.repository.store.cancellation import CancellationToken
from datasvc.repository.store.http_ranges import HttpRanges
from datasvc.repository.store.obstore_errors import UnsupportedResponseError
from datasvc.repository.store.range_streams import Take
from datasvc.repository.store.retries import with_retries

_BLOCK_BYTES: Final = 16 << 20


class RangeReader:
    """Reader of ranges of the files of one store; thread-safe."""

    def __init__(self, file_system: fsspec.AbstractFileSystem) -> None:
        self._fs = file_system
        self._http = HttpRanges.of(file_system)

    @property
    def can_stream(self) -> bool:
        """Whether `stream` passes on bytes as they arrive, not in blocks.

        An unsupported response ends this, and a fork does in the child, see `obstore_loop`.
        """
        return self._http is not None and obstore_loop.is_usable()

    def read(self, path: str, offset: int, length: int, *, location: str) -> bytes:
        """Return `length` bytes from `offset`, or fewer at the end of the file; for errors, see `with_retries`."""
        return with_retries(
            self._fs, "read", location, lambda: bytes(self._fs.cat_file(path, start=offset, end=offset + length))
        )

    def stream(
        self, path: str, offset: int, length: int, take: Take, *, location: str, interrupt: CancellationToken
    ) -> None:
        """Pass exactly `length` bytes from `offset` to `take`, in order, in the calling thread.

        Args:
            path: path for the file system.
            offset: first byte of the range.
            length: length of the range in bytes; may be 0.
            take: function for the bytes. Its exceptions are not converted.
            location: URL or path of the file for messages.
            interrupt: token that cancels the read.

        Raises:
            NotFoundError, ConfigError: see `retries.map_exceptions`.
            UnavailableError: see `retries.map_exceptions`; or the read was cancelled, or the file is too short.
        """
        http = self._http
        if http is not None and length and obstore_loop.is_usable():
            try:
                http.read(path, offset, length, take, location=location, interrupt=interrupt)
            except UnsupportedResponseError:
                self._http = None  # from now on, use fsspec's client
            else:
                return
        read_block = partial(self.read, path, location=location)
        stream_blocks(read_block, offset, length, take, location=location, interrupt=interrupt)


def stream_blocks(
    read: Callable[[int, int], bytes],
    offset: int,
    length: int,
    take: Take,
    *,
    location: str,
    interrupt: CancellationToken,
) -> None:
    """Pass a range to `take` in blocks, each read by `read(offset, length)`; see `RangeReader.stream`."""
    for start in range(offset, offset + length, _BLOCK_BYTES):
        block_bytes = min(_BLOCK_BYTES, offset + length - start)
        if interrupt.is_set:
            raise UnavailableError(f"cannot read {location}: the read was cancelled")
        content = read(start, block_bytes)
        if len(content) != block_bytes:
            raise UnavailableError(f"cannot read {location}: received {len(content)} of {block_bytes} bytes")
        take(memoryview(content))
