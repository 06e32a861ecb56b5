"""Fill one incoming file with a verified object: each source continues where the previous one failed.

`Fetcher.fetch` calls `transfer`, and chooses the sources, which are peers and the origin, and their order.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from blake3 import blake3

from datasvc.cache.sources.origin_source import PART_BYTES, Kind, ObjectSource, ReceivedParts
from datasvc.errors import CorruptDataError, DatasvcError, SourceChangedError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, ObjectInfo

_READ_BACK_BYTES = 1 << 20
# Maximum number of bytes that are read back and hashed after each received buffer. Reading them delays the next read
# from the source.
_MAX_READ_BACK_BYTES = 8 << 20


@dataclass(frozen=True)
class FetchReport:
    """Result of a transfer.

    Attributes:
        bytes_by_kind: bytes received by kind of source, wrong bytes included.
        num_corrupt: number of times that wrong bytes were received.
        kind: kind of the source that sent most bytes; None: an earlier fetch had received all of them.
        content: digest of the bytes. It differs from the name of the object only if this is a remote file.
    """

    bytes_by_kind: Mapping[Kind, int]
    num_corrupt: int
    kind: Kind | None
    content: Digest


def transfer(
    info: ObjectInfo,
    descriptor: int,
    parts: ReceivedParts,
    sources: Sequence[ObjectSource],
    progress: Progress = NO_PROGRESS,
    *,
    is_named_by_content: bool = True,
) -> FetchReport:
    """Fill a file with an object, and verify it.

    When a source fails, the next one continues the transfer. When the complete bytes are wrong, the error is recorded
    for each source that sent some of them, and the transfer restarts with the next source. The origin gets a second
    try, because a bit error in transfer is not likely to repeat. Bytes that an earlier process received are kept.
    If such bytes are part of a wrong file, no error is recorded, because the sender of the wrong bytes is unknown.

    Args:
        info: the object.
        descriptor: the incoming file, open for reading and writing, locked by the caller.
        parts: parts of the object that are in the file.
        sources: at least one source, in the order in which to use them.
        progress: counts the bytes of each buffer that arrives, by kind of source.
        is_named_by_content: whether the object's name is the digest of its bytes; if not, they cannot be verified.

    Returns:
        A report of the transfer. The file contains the object, and is not synced to disk.

    Raises:
        CorruptDataError, NotFoundError, ConfigError, UnavailableError: no source could send the object; the message
            has the reason of each. The class is that of the origin's failure if the origin was used. The received
            bytes stay in the file and in `parts`.
        OSError: the file cannot be written.
    """
    file = PartialFile(info.size_bytes, descriptor, parts, progress)
    return _Transfer(info, file, sources, is_named_by_content=is_named_by_content).run()


class _Transfer:
    """The sources of one transfer: those to try, and the failures of the others."""

    def __init__(
        self, info: ObjectInfo, file: PartialFile, sources: Sequence[ObjectSource], *, is_named_by_content: bool
    ) -> None:
        assert sources
        self._info = info
        self._untried = deque(sources)
        self._file = file
        self._is_named_by_content = is_named_by_content
        self._failures: list[tuple[ObjectSource, DatasvcError]] = []
        self._num_corrupt = 0
        self._tried_again: set[ObjectSource] = set()

    def run(self) -> FetchReport:
        while not self._has_object():
            if not self._untried:
                raise self._failure()
            source = self._untried.popleft()
            try:
                self._file.fill_from(source, self._info)
            except CorruptDataError as error:
                self._num_corrupt += 1
                self._record_corrupt(source, error)
            except SourceChangedError as error:
                # The bytes that an attached file gave are wrong: a peer that continued from them would be blamed.
                self._failures.append((source, error))
                self._file.reset()
            except DatasvcError as error:
                # The next source continues from the bytes that have arrived.
                self._failures.append((source, error))
        largest = self._file.bytes_by_source.most_common(1)
        kind = largest[0][0].kind if largest else None
        return FetchReport(self._file.bytes_by_kind, self._num_corrupt, kind, self._file.digest())

    def _has_object(self) -> bool:
        """Return whether the file contains the object. If all bytes are there but wrong, discard them."""
        if not self._file.is_complete:
            return False
        digest = self._file.digest()
        bytes_by_source = self._file.bytes_by_source
        if digest == self._info.digest or not self._is_named_by_content:
            for source in bytes_by_source:
                source.record_integrity(intact=True)
            return True
        self._num_corrupt += 1
        # An empty file is complete after every `reset`, so the loop of `run` would never end.
        if not self._info.size_bytes:
            raise CorruptDataError(
                f"object {self._info.digest[:12]}... cannot be empty: zero bytes have the digest {digest[:12]}...; "
                "the shard table or index that names this object is wrong"
            )
        if self._file.has_earlier_bytes:
            # The wrong bytes may be those of the earlier process, so the sources that this process has read get a
            # second try, in their old order. Sources that have failed get none, because the transfer must end.
            failed = {source for source, _ in self._failures}
            self._untried.extendleft(source for source in reversed(bytes_by_source) if source not in failed)
        else:
            for source in bytes_by_source:
                source.record_integrity(intact=False)
                self._record_corrupt(
                    source, CorruptDataError(f"{source.name} sent bytes with the digest {digest[:12]}...")
                )
        self._file.reset()
        return False

    def _record_corrupt(self, source: ObjectSource, error: CorruptDataError) -> None:
        self._failures.append((source, error))
        # A bit error in transfer is not likely to repeat, so the origin is tried again. It is tried only once more,
        # because bytes that are wrong in the store stay wrong.
        if source.kind == "origin" and source not in self._tried_again:
            self._tried_again.add(source)
            self._untried.append(source)

    def _failure(self) -> DatasvcError:
        # Use the exception class of the origin's failure: only the origin shows if the object is missing or damaged.
        origin_errors = [error for source, error in self._failures if source.kind == "origin"]
        last = origin_errors[-1] if origin_errors else self._failures[-1][1]
        reasons = "; ".join(dict.fromkeys(str(error) for _, error in self._failures))
        return type(last)(
            f"cannot fetch object {self._info.digest[:12]}... of {self._info.size_bytes} bytes: {reasons}"
        )


# Bytes are hashed in order: from the receive buffer if all bytes before them are hashed already, otherwise from the
# file. So bytes of an earlier process are verified from the file. Most bytes of this process are verified from the
# receive buffer, so a fault while they are written is not detected.


class PartialFile:
    """An incoming file that sources fill.

    A source may write from several threads during `fill_from`; no other method may be called during that time.

    Args:
        size_bytes: size of the object.
        descriptor: the file, open for reading and writing.
        parts: parts of the object that are completely in the file, some perhaps from an earlier process.
        progress: counts the bytes of each received buffer after it was written, by kind of source.

    Attributes:
        has_earlier_bytes: whether the file contains parts that an earlier fetch received.
        bytes_by_source: bytes in the file that this process received, by source.
        bytes_by_kind: bytes that arrived in this process by kind of source, wrong ones included.
    """

    def __init__(self, size_bytes: int, descriptor: int, parts: ReceivedParts, progress: Progress) -> None:
        self._size_bytes = size_bytes
        self._descriptor = descriptor
        self._parts = parts
        self._progress = progress
        self._lock = threading.Lock()
        self._hashing = threading.Lock()  # guards the next two attributes
        self._hash = blake3()
        self._hashed_bytes = 0
        self._filled = [  # number of received bytes of each part; the bytes of one part arrive in order
            self._part_bytes(number) if number in parts.arrived else 0 for number in range(parts.num_parts)
        ]
        self.bytes_by_source: Counter[ObjectSource] = Counter()
        self.has_earlier_bytes = bool(parts.arrived)
        self.bytes_by_kind: Counter[Kind] = Counter()

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are there, right or wrong."""
        return sum(self._filled) == self._size_bytes

    def fill_from(self, source: ObjectSource, info: ObjectInfo) -> None:
        """Read all missing ranges from a source.

        Raises:
            NotFoundError, CorruptDataError, ConfigError, UnavailableError: see `ObjectSource.stream`.
            OSError: the file cannot be written.
        """
        for start, stop in self._missing():
            source.stream(info, start, stop - start, partial(self._write, source))
        assert self.is_complete, source.name

    def reset(self) -> None:
        """Discard all bytes of the file. Raises OSError."""
        self._parts.clear()
        self._filled = [0] * len(self._filled)
        self.bytes_by_source = Counter()
        self.has_earlier_bytes = False
        self._hash, self._hashed_bytes = blake3(), 0

    def digest(self) -> Digest:
        """Return the digest of the complete file. Raises OSError."""
        assert self.is_complete
        self._hash_file_to(self._size_bytes)
        return Digest(self._hash.hexdigest())

    def _missing(self) -> list[tuple[int, int]]:
        """Return start and stop of each missing range, ascending; adjacent ranges are merged."""
        ranges: list[tuple[int, int]] = []
        for number, filled in enumerate(self._filled):
            start, stop = number * PART_BYTES + filled, number * PART_BYTES + self._part_bytes(number)
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            elif start < stop:
                ranges.append((start, stop))
        return ranges

    def _write(self, source: ObjectSource, offset: int, view: memoryview) -> None:
        # Bytes are written before they are recorded, so that the list of received parts never names a missing part.
        self._write_all(offset, view)
        with self._lock:
            self._record(offset, len(view))
            self.bytes_by_source[source] += len(view)
            self.bytes_by_kind[source.kind] += len(view)
            self._progress.advance(len(view), source=source.kind)
        self._hash_arrived(offset, view)

    def _write_all(self, offset: int, view: memoryview) -> None:
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def _record(self, offset: int, length: int) -> None:
        """Count received bytes in `_filled`, and add the parts that are now complete to the list."""
        while length:
            number, inside = divmod(offset, PART_BYTES)
            assert inside == self._filled[number], "the bytes of a part must arrive in order, and once"
            part_length = min(length, self._part_bytes(number) - inside)
            assert part_length > 0, "bytes after the end of the object"
            self._filled[number] += part_length
            if self._filled[number] == self._part_bytes(number):
                self._parts.add(number)
            offset, length = offset + part_length, length - part_length

    def _hash_arrived(self, offset: int, view: memoryview) -> None:
        """Hash a received buffer if its turn has come, then bytes after it that have arrived earlier."""
        # Never waits for a thread that is hashing: that thread, or a later call, hashes these bytes from the file.
        if not self._hashing.acquire(blocking=False):
            return
        try:
            contiguous_bytes = self._contiguous_bytes()
            if offset == self._hashed_bytes:
                self._hash.update(view)
                self._hashed_bytes += len(view)
            self._hash_file_to(min(contiguous_bytes, self._hashed_bytes + _MAX_READ_BACK_BYTES))
        finally:
            self._hashing.release()

    def _hash_file_to(self, stop: int) -> None:
        """Hash the bytes before `stop` that are not hashed yet, from the file."""
        buffer = memoryview(bytearray(min(_READ_BACK_BYTES, max(0, stop - self._hashed_bytes))))
        while self._hashed_bytes < stop:
            num_bytes = os.preadv(self._descriptor, [buffer[: stop - self._hashed_bytes]], self._hashed_bytes)
            if not num_bytes:
                raise OSError(errno.EIO, "an incoming file was truncated by another program")
            self._hash.update(buffer[:num_bytes])
            self._hashed_bytes += num_bytes

    def _contiguous_bytes(self) -> int:
        """Return the number of bytes at the start of the file without a gap."""
        with self._lock:
            # All parts before this one are complete, because they are hashed.
            number = self._hashed_bytes // PART_BYTES
            while number < len(self._filled) and self._filled[number] == self._part_bytes(number):
                number += 1
            if number == len(self._filled):
                return self._size_bytes
            return number * PART_BYTES + self._filled[number]

    def _part_bytes(self, number: int) -> int:
        return min(PART_BYTES, self._size_bytes - number * PART_BYTES)
