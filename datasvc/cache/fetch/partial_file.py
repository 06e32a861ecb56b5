"""The incoming file of an object while it fills: what of it is there, from whom, and the hash of its beginning.

Each byte is written once between two starts, and hashed as soon as all before it are there: mostly in the buffer that
it arrived in, else from the page cache. So a digest that is right speaks for the very bytes in the file, without a
second pass over cold data.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from functools import partial

from blake3 import blake3

from datasvc.cache.sources.origin_source import Kind, ObjectSource
from datasvc.cache.sources.received_parts import PART_BYTES, ReceivedParts
from datasvc.repository import Digest, ObjectInfo

Report = Callable[[Kind, int], None]
_READ_BACK_BYTES = 1 << 20
# Of a piece that arrives: whoever hashes does not receive, and its sender waits meanwhile.
_READ_BACK_AT_ONCE_BYTES = 8 << 20


class GrowingFile:
    """See above. Sources write from several threads; everything else is for one thread, while no source writes.

    Args:
        size_bytes: of the object.
        descriptor: the file, open for reading and writing.
        parts: which of its parts are there.
        report: called with each piece that arrives, from any thread but by one at a time.

    Attributes:
        is_continued: whether there is something in it that another process wrote.
        bytes_by_kind: what arrived in this process, wrong bytes too.
    """

    def __init__(self, size_bytes: int, descriptor: int, parts: ReceivedParts, report: Report | None) -> None:
        self._size_bytes = size_bytes
        self._descriptor = descriptor
        self._parts = parts
        self._report = report
        self._lock = threading.Lock()
        self._hashing = threading.Lock()  # held by whoever owns the next two
        self._hash = blake3()
        self._hashed = 0
        self._filled = [
            self._part_bytes(number) if number in parts.arrived else 0 for number in range(parts.num_parts)
        ]
        self._given: dict[ObjectSource, int] = {}
        self.is_continued = bool(parts.arrived)
        self.bytes_by_kind: dict[Kind, int] = {}

    @property
    def givers(self) -> dict[ObjectSource, int]:
        """Bytes that are in the file, by who gave them in this process."""
        return self._given

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are there, right or wrong."""
        return sum(self._filled) == self._size_bytes

    def take_from(self, source: ObjectSource, info: ObjectInfo) -> None:
        """Ask a source for all that is missing.

        Raises:
            NotFoundError, CorruptDataError, ConfigError, UnavailableError: as `ObjectSource.stream`.
            OSError: the file cannot be written.
        """
        for start, stop in self._missing():
            source.stream(info, start, stop - start, partial(self._write, source))
        assert self.is_complete, source.name

    def start_over(self) -> None:
        """Trust nothing of what is there. Raises OSError."""
        self._parts.clear()
        self._filled = [0] * len(self._filled)
        self._given = {}
        self.is_continued = False
        self._hash, self._hashed = blake3(), 0

    def digest(self) -> Digest:
        """Return the digest of the complete file. Raises OSError."""
        assert self.is_complete
        self._hash_file_to(self._size_bytes)
        return Digest(self._hash.hexdigest())

    def _missing(self) -> list[tuple[int, int]]:
        """Return the ranges that are not there, ascending, as few as there are."""
        ranges: list[tuple[int, int]] = []
        for number, filled in enumerate(self._filled):
            start, stop = number * PART_BYTES + filled, number * PART_BYTES + self._part_bytes(number)
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            elif start < stop:
                ranges.append((start, stop))
        return ranges

    def _write(self, source: ObjectSource, offset: int, view: memoryview) -> None:
        self._write_all(offset, view)
        with self._lock:
            self._note(offset, len(view))
            self._given[source] = self._given.get(source, 0) + len(view)
            self.bytes_by_kind[source.kind] = self.bytes_by_kind.get(source.kind, 0) + len(view)
            if self._report is not None:
                self._report(source.kind, len(view))
        self._hash_on(offset, view)

    def _write_all(self, offset: int, view: memoryview) -> None:
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def _note(self, offset: int, length: int) -> None:
        while length:
            number, inside = divmod(offset, PART_BYTES)
            assert inside == self._filled[number], "bytes of a part come in order, and once"
            here = min(length, self._part_bytes(number) - inside)
            assert here > 0, "bytes behind the end"
            self._filled[number] += here
            if self._filled[number] == self._part_bytes(number):
                self._parts.add(number)
            offset, length = offset + here, length - here

    def _hash_on(self, offset: int, view: memoryview) -> None:
        """Hash some of what has become contiguous. Who finds another thread at it leaves it to that one."""
        if not self._hashing.acquire(blocking=False):
            return
        try:
            frontier = self._frontier()
            if offset == self._hashed:
                self._hash.update(view)
                self._hashed += len(view)
            self._hash_file_to(min(frontier, self._hashed + _READ_BACK_AT_ONCE_BYTES))
        finally:
            self._hashing.release()

    def _hash_file_to(self, stop: int) -> None:
        buffer = memoryview(bytearray(min(_READ_BACK_BYTES, max(0, stop - self._hashed))))
        while self._hashed < stop:
            num_bytes = os.preadv(self._descriptor, [buffer[: stop - self._hashed]], self._hashed)
            if not num_bytes:
                raise OSError(errno.EIO, "an incoming file was cut short by another program")
            self._hash.update(buffer[:num_bytes])
            self._hashed += num_bytes

    def _frontier(self) -> int:
        """Return how many bytes are there without a gap."""
        with self._lock:
            number = self._hashed // PART_BYTES
            while number < len(self._filled) and self._filled[number] == self._part_bytes(number):
                number += 1
            return min(
                number * PART_BYTES + (self._filled[number] if number < len(self._filled) else 0), self._size_bytes
            )

    def _part_bytes(self, number: int) -> int:
        return min(PART_BYTES, self._size_bytes - number * PART_BYTES)
