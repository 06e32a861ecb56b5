"""Reader of a shard before it is fetched completely: single samples are read by byte range and verified.

With it, a loader serves samples while the cache still fetches their shard. No byte is readable before it is verified.
The *frame* of a record batch, its bytes without those of its blobs, is part of the sample index, so
the digest of the index verifies it. The payload digest of a sample verifies its blobs. A record batch without a frame
in the index is read as a whole, and has a digest of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from threading import RLock
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from datasvc.errors import CorruptDataError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.partial_batches import Content, FramedBatch, PartialBatch, WholeBatch, reserve_memory
from datasvc.shards.format.reader import Shard
from datasvc.shards.format.sample_index import ByteRange, SampleIndex, check_ranges
from datasvc.shards.format.schema import check_shard_schema

# Samples with at most this gap between them are read by one request: the transfer of the gap takes a third of the
# latency of another request.
GAP_BYTES: Final = 256 << 10


class RangedObjects(Protocol):
    """Source of byte ranges of a shard, such as `Objects`."""

    def read_range(self, digest: Digest, offset: int, length: int) -> Content:
        """Return exactly `length` bytes of an object from `offset`, without verification."""


@dataclass(frozen=True)
class PartialRead:
    """Samples that become readable together, and the byte ranges to read for them.

    Attributes:
        batch: number of the record batch that contains them.
        start: first sample, counted within the record batch.
        stop: first sample after them.
        spans: byte ranges of the shard's file.
    """

    batch: int
    start: int
    stop: int
    spans: tuple[ByteRange, ...]

    @property
    def size_bytes(self) -> int:
        """Number of bytes to read."""
        return sum(span.length for span in self.spans)


class PartialShard(Shard):
    """A shard that is not fetched completely. Its readable samples are read as from a complete shard.

    `has` returns whether samples are readable, and `fetch` makes them readable. Instead of `fetch`, a caller may read
    the ranges of `plan` itself and pass their bytes to `add`. For other samples, `column` and `values` return
    arbitrary content; `blobs`, `is_valid` and `sample` raise IndexError. Threads may add and read at the same time.

    Args:
        info: digest and size of the shard.
        index: its sample index, with a layout.
        name: name of the shard for messages.

    Raises:
        CorruptDataError: the sample index contradicts itself or the shard.
        ConfigError: the shard has a newer format than this datasvc reads.
    """

    def __init__(self, info: ObjectInfo, index: SampleIndex, name: str) -> None:
        layout = index.layout
        assert layout is not None, f"the sample index of {name} has no layout"
        self.info = info
        self._lock = RLock()
        self._partial: list[PartialBatch] = []
        check_shard_schema(layout.schema, name)
        memory, payloads = reserve_memory(info.size_bytes), index.digests("payload")
        try:
            check_ranges([batch.message for batch in layout.batches], info.size_bytes)
        except ValueError as error:
            raise CorruptDataError(
                f"{name}: its sample index lists record batches beyond its {info.size_bytes} bytes, or that overlap "
                f"({error}); restore both from another copy"
            ) from error
        for number, batch in enumerate(layout.batches):
            # The index lists samples in the order of the file, so the first ones that remain belong to this batch.
            batch_payloads, payloads = payloads[: batch.num_samples], payloads[batch.num_samples :]
            batch_name = f"record batch {number} of shard {name}"
            self._partial.append(
                WholeBatch(batch, layout.schema, batch_name)
                if batch.frame is None
                else FramedBatch(batch, layout.schema, memory, batch_payloads, batch_name)
            )
        super().__init__(layout.schema, [partial.batch for partial in self._partial], name)
        # The empty array is for a shard without record batches: `concatenate` needs at least one array.
        self._is_readable = np.concatenate([np.empty(0, np.bool_), *[partial.readable for partial in self._partial]])

    def has(self, rows: Integers) -> bool:
        """Return whether all of `rows` are readable."""
        return bool(self._is_readable[rows].all())

    def plan(self, rows: Integers, *, gap_bytes: int = GAP_BYTES) -> list[PartialRead]:
        """Return the reads that make all of `rows` readable, in the order of the file; [] if they are already.

        Samples of a record batch with a gap of at most `gap_bytes` between them are read together, with the gap.
        """
        missing = np.unique(rows[~self._is_readable[rows]])
        batches = np.searchsorted(self._starts, missing, side="right") - 1
        return [
            PartialRead(number, run[0], run[1], spans)
            for number in np.unique(batches).tolist()
            # A record batch counts its samples from its own first sample.
            for run, spans in self._partial[number].plan(missing[batches == number] - self._starts[number], gap_bytes)
        ]

    def add(self, read: PartialRead, contents: Sequence[Content]) -> None:
        """Make the samples of `read` readable; `read` is from `plan`, and `contents` has the bytes of its spans.

        Raises:
            CorruptDataError: the bytes do not match their digest; no sample of `read` became readable. The message
                names the record batch.
        """
        lengths = [len(content) for content in contents]
        assert lengths == [span.length for span in read.spans], (lengths, read)
        with self._lock:
            partial = self._partial[read.batch]
            partial.add((read.start, read.stop), contents)
            # A `WholeBatch` has just replaced its placeholder by the record batch: drop arrays of the placeholder.
            if partial.batch is not self._batches[read.batch]:
                self._batches[read.batch] = partial.batch
                self._drop_cached_columns()
            first = int(self._starts[read.batch])
            # Set the flags last, because `has` reads them without the lock.
            self._is_readable[first + read.start : first + read.stop] = True

    def fetch(self, objects: RangedObjects, rows: Integers, *, pool: Executor | None = None) -> int:
        """Read those of `rows` that are not readable yet, in threads of `pool`; return the number of bytes read.

        Raises:
            NotFoundError: the shard does not exist.
            CorruptDataError: the shard is too short; or see `add`.
            UnavailableError: the store did not respond.
        """

        def read_spans(read: PartialRead) -> list[Content]:
            return [objects.read_range(self.info.digest, span.offset, span.length) for span in read.spans]

        reads = self.plan(rows)
        results = map(read_spans, reads) if pool is None else pool.map(read_spans, reads)
        for read, contents in zip(reads, results, strict=True):
            self.add(read, contents)
        return sum(read.size_bytes for read in reads)

    def blobs(self, column: str, rows: npt.NDArray[np.int64]) -> list[Bytes]:
        """Return blobs as `Shard.blobs` does. Raise IndexError for rows that are not readable yet."""
        self._check(rows)
        with self._lock:
            return super().blobs(column, rows)

    def values(self, column: str) -> npt.NDArray[Any]:
        """Return a column as `Shard.values` does; values of samples that are not readable yet are arbitrary."""
        with self._lock:
            return super().values(column)

    def is_valid(self, column: str, rows: npt.NDArray[np.int64]) -> bool:
        """Return the same as `Shard.is_valid`. Raise IndexError for rows that are not readable yet."""
        self._check(rows)
        with self._lock:
            return super().is_valid(column, rows)

    def sample(self, row: int) -> dict[str, Any]:
        """Return one sample as `Shard.sample` does. Raise IndexError if it is not readable yet."""
        self._check(np.array([row]))
        with self._lock:
            return super().sample(row)

    def _check(self, rows: Integers) -> None:
        """Raise IndexError unless all of `rows` are readable."""
        if not self.has(rows):
            missing = rows[~self._is_readable[rows]].tolist()
            raise IndexError(
                f"sample {missing[0]} of shard {self.name} is not readable yet, nor are {len(missing) - 1} others: "
                "fetch them first"
            )


def open_partial(objects: Objects, info: ObjectInfo, index: Digest | None) -> PartialShard | None:
    """Return a shard for reading single samples; None without a sample index, or if the index has no layout.

    Raises:
        NotFoundError, CorruptDataError, UnavailableError: the sample index cannot be read.
        ConfigError: the index or the shard has a newer format than this datasvc reads.
    """
    if index is None:
        return None
    decoded = SampleIndex.decode(objects.read(index), objects.location(index))
    if decoded.layout is None:
        return None
    return PartialShard(info, decoded, objects.location(info.digest))
