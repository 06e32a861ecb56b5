"""Parts of large blobs, each with a digest: a range of a blob is read from a remote shard, and verified, by parts.

The sample index has the digests of parts, and the shard table has the digest of the index. So every byte is verified
before a decoder gets it, although most of the blob is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128_digest

from datasvc.errors import CorruptDataError
from datasvc.shards.format.digests import blob_views
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.sample_index import SampleParts
from datasvc.threads import run_in_threads

# A clip of a video of 4 or 38 MB costs 2 to 14 % more bytes than with 64 KiB, for a quarter of the digests: 31 KB
# for a video of 500 MB.
PART_BYTES: Final = 256 << 10
MIN_PARTED_BYTES: Final = 8 << 20
"""Smallest blob with parts. A smaller one arrives as a whole about as soon as the answers to three requests."""
_GAP_BYTES: Final = 256 << 10  # between two ranges that one request reads, see `partial_reader.GAP_BYTES`
_MIN_AHEAD_BYTES: Final = 1 << 20  # of a read that was not planned: some 20 ms, the latency of another one
_MAX_AHEAD_BYTES: Final = 8 << 20
_MAX_TAIL_BYTES: Final = 16 << 20
_MAX_HELD_BYTES: Final = 64 << 20  # of one blob


class ReadPlan(NamedTuple):
    """What a decoder is expected to read of a blob.

    Attributes:
        spans: byte ranges `start, stop`, which are read at once.
        tail: position from which on a range that is not planned is read to the end of the blob, if that is near.
    """

    spans: Sequence[tuple[int, int]]
    tail: int


def digest_parts(batch: pa.RecordBatch, columns: Sequence[int], first: int) -> Iterator[SampleParts]:
    """Yield the digests of the parts of large blobs of a record batch, of samples without other blobs.

    Args:
        batch: samples of a shard.
        columns: indices of the blob columns.
        first: number of the first sample in the shard.
    """
    for row, blobs in enumerate(zip(*(blob_views(batch.column(column)) for column in columns), strict=True)):
        # A sample with several blobs has one digest of all of them, so a small blob beside a large one could not be
        # verified alone.
        present = [blob for blob in blobs if blob]
        if len(present) == 1 and len(present[0]) >= MIN_PARTED_BYTES:
            starts = range(0, len(present[0]), PART_BYTES)
            digests = [xxh3_128_digest(present[0][start : start + PART_BYTES]) for start in starts]
            yield SampleParts(first + row, PART_BYTES, b"".join(digests))


class PartedBlob:
    """A blob that is read by parts and not kept. For one thread.

    Args:
        blob: view of its size; the bytes of it are not accessed.
        parts: digests of its parts.
        read_range: returns the unverified bytes of the blob from an offset on, of a length.
        name: name of the blob for messages.
        plan: ranges to read now, in parallel.

    Raises:
        CorruptDataError: bytes do not match their digest; a range is read twice before.
        NotFoundError, UnavailableError: `read_range` failed.
    """

    def __init__(
        self,
        blob: Bytes,
        parts: SampleParts,
        read_range: Callable[[int, int], bytes | memoryview],
        name: str,
        plan: ReadPlan,
    ) -> None:
        self._start, self._size_bytes = _address_of(blob), len(blob)
        self._parts, self._read_range, self._name, self._tail = parts, read_range, name, plan.tail
        self._num_parts = parts.num_parts
        self._held: dict[int, memoryview] = {}
        # Of the last read that was not planned: its size, and the part after it.
        self._ahead_bytes, self._next = _MIN_AHEAD_BYTES, self._num_parts
        runs = self._plan_runs(plan.spans)
        for found in run_in_threads(self._fetch, runs, len(runs)):
            self._held |= found

    def read(self, view: Bytes, buffer: Bytes) -> Bytes:
        """Read the bytes of `view`, a slice of `blob`, into `buffer` of the same size, and return `buffer`."""
        size, position = self._parts.part_bytes, _address_of(view) - self._start
        num_read = 0
        while num_read < len(view):
            number, skipped = divmod(position + num_read, size)
            if number not in self._held:
                self._fetch_ahead(number)
            piece = self._held[number][skipped : skipped + len(view) - num_read]
            buffer[num_read : num_read + len(piece)] = np.frombuffer(piece, np.uint8)
            num_read += len(piece)
        return buffer

    def _plan_runs(self, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the parts of byte ranges as half-open ranges, which few requests read."""
        size, runs = self._parts.part_bytes, list[tuple[int, int]]()
        for start, stop in sorted((start // size, -(-stop // size)) for start, stop in spans if stop > start):
            if runs and (start - runs[-1][1]) * size <= _GAP_BYTES:
                runs[-1] = runs[-1][0], max(runs[-1][1], stop)
            else:
                runs.append((start, stop))
        return [(start, min(stop, self._num_parts)) for start, stop in runs]

    def _fetch_ahead(self, number: int) -> None:
        """Read a part that was not planned, with those after it that are not held yet."""
        size = self._parts.part_bytes
        if len(self._held) * size > _MAX_HELD_BYTES:
            self._held.clear()  # a decoder that reads so much does not return to what it has read
        rest_bytes = self._size_bytes - number * size
        is_tail = number * size >= self._tail and rest_bytes <= _MAX_TAIL_BYTES
        # A file whose tables are spread over it, such as fragmented MP4, is read forward up to the clip.
        self._ahead_bytes = min(2 * self._ahead_bytes, _MAX_AHEAD_BYTES) if number >= self._next else _MIN_AHEAD_BYTES
        stop = self._num_parts if is_tail else min(number + max(1, self._ahead_bytes // size), self._num_parts)
        self._next = next((later for later in range(number, stop) if later in self._held), stop)
        self._held |= self._fetch(number, self._next)

    def _fetch(self, start: int, stop: int) -> dict[int, memoryview]:
        """Return the parts of a range, verified."""
        size = self._parts.part_bytes
        length = min(stop * size, self._size_bytes) - start * size
        for _ in range(2):  # the transfer may have changed a bit: read once more
            content = memoryview(self._read_range(start * size, length))
            found = {number: content[(number - start) * size :][:size] for number in range(start, stop)}
            bad = [number for number, part in found.items() if xxh3_128_digest(part) != self._parts.digest(number)]
            if not bad:
                return found
        raise CorruptDataError(
            f"{self._name}: bytes {bad[0] * size} to {min((bad[0] + 1) * size, self._size_bytes)} are corrupt; "
            "restore the shard from another copy"
        )


def _address_of(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
