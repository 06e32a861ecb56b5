"""A shard some of whose samples are there: read by range and checked, while the whole shard is still to come.

No byte is readable before it was checked: frames by the digest of the sample index that holds them, blobs by the
payload digest of their sample, whole record batches by their own.
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
from datasvc.shards.format.layout import ByteRange
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.partial_batches import Content, FramedBatch, PartialBatch, WholeBatch, reserve_memory
from datasvc.shards.format.reader import Shard
from datasvc.shards.format.sample_index import SampleIndex

# About what a connection carries in a third of the time that a request waits: closer samples are read as one.
GAP_BYTES: Final = 256 << 10


class RangedObjects(Protocol):
    """Where parts of a shard come from, such as `Objects`."""

    def read_range(self, digest: Digest, offset: int, length: int) -> Content:
        """Return exactly `length` bytes of an object from `offset`, not verified."""


@dataclass(frozen=True)
class PartialRead:
    """Samples that become readable together, and what has to be read for it.

    Attributes:
        batch: number of the record batch that they are in.
        start: the first of them, counted over the record batch.
        stop: one behind the last.
        spans: bytes of the shard's file.
    """

    batch: int
    start: int
    stop: int
    spans: tuple[ByteRange, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes to read."""
        return sum(span.length for span in self.spans)


class PartialShard(Shard):
    """The samples of a shard that were read so far, which are read as those of a whole one.

    Ask with `has`; get them with `fetch`, or with `plan`, your own requests and `add`. `blobs`, `is_valid` and
    `sample` refuse what is not there; `column` and `values` hold nothing of worth in its place. Threads may add and
    read at once.

    Args:
        info: the shard's object.
        index: of the shard, with a layout.
        name: for messages.

    Raises:
        CorruptDataError: the index contradicts itself or the shard.
        ConfigError: a later shard format.
    """

    def __init__(self, info: ObjectInfo, index: SampleIndex, name: str) -> None:
        layout = index.layout
        assert layout is not None, f"the index of {name} has no layout: wait for the whole shard"
        self.info = info
        self._lock = RLock()
        self._partial: list[PartialBatch] = []
        memory, payloads = reserve_memory(info.size_bytes), index.digests("payload")
        for number, batch in enumerate(layout.batches):
            if batch.message.offset + batch.message.length > info.size_bytes:
                raise CorruptDataError(
                    f"{name}: its sample index has record batches beyond its {info.size_bytes} bytes"
                )
            own, payloads = payloads[: batch.num_samples], payloads[batch.num_samples :]
            what = f"record batch {number} of shard {name}"
            self._partial.append(
                WholeBatch(batch, layout.schema, what)
                if batch.frame is None
                else FramedBatch(batch, layout.schema, memory, own, what)
            )
        super().__init__(layout.schema, [partial.batch for partial in self._partial], name)
        self._is_there = np.concatenate([np.empty(0, np.bool_), *[partial.readable for partial in self._partial]])

    def has(self, rows: Integers) -> bool:
        """Return whether all of `rows` can be read."""
        return bool(self._is_there[rows].all())

    def plan(self, rows: Integers, *, gap_bytes: int = GAP_BYTES) -> list[PartialRead]:
        """Return what to read so that all of `rows` can be read; [] when they can.

        Args:
            rows: `int64[n]` in range(num_samples).
            gap_bytes: samples of a record batch that lie closer together are read as one, with what is between.

        Returns:
            In the order of the file.
        """
        missing = np.unique(rows[~self._is_there[rows]])
        batches = np.searchsorted(self._starts, missing, side="right") - 1
        return [
            PartialRead(number, run[0], run[1], spans)
            for number in np.unique(batches).tolist()
            for run, spans in self._partial[number].plan(missing[batches == number] - self._starts[number], gap_bytes)
        ]

    def add(self, read: PartialRead, contents: Sequence[Content]) -> None:
        """Make the samples of `read` readable.

        Args:
            read: from `plan`.
            contents: what was read for each of its spans.

        Raises:
            CorruptDataError: the bytes are not those of the shard, and none was taken in. Names the record batch.
        """
        lengths = [len(content) for content in contents]
        assert lengths == [span.length for span in read.spans], (lengths, read)
        with self._lock:
            partial = self._partial[read.batch]
            partial.add((read.start, read.stop), contents)
            if partial.batch is not self._batches[read.batch]:
                self._batches[read.batch] = partial.batch
                self._forget_columns()
            first = int(self._starts[read.batch])
            self._is_there[first + read.start : first + read.stop] = True

    def fetch(self, objects: RangedObjects, rows: Integers, *, pool: Executor | None = None) -> int:
        """Read what is missing of `rows`.

        Args:
            objects: where the shard is.
            rows: `int64[n]` in range(num_samples).
            pool: reads side by side; None: one after the other.

        Returns:
            Bytes that were read.

        Raises:
            NotFoundError: there is no such shard.
            CorruptDataError: it is too short, or as of `add`.
            UnavailableError: the store did not answer.
        """

        def read_spans(read: PartialRead) -> list[Content]:
            return [objects.read_range(self.info.digest, span.offset, span.length) for span in read.spans]

        reads = self.plan(rows)
        found = map(read_spans, reads) if pool is None else pool.map(read_spans, reads)
        for read, contents in zip(reads, found, strict=True):
            self.add(read, contents)
        return sum(read.size_bytes for read in reads)

    def blobs(self, column: str, rows: npt.NDArray[np.int64]) -> list[Bytes]:
        """Return blobs as `Shard.blobs` does. Raises IndexError for rows that are not there."""
        self._check(rows)
        with self._lock:
            return super().blobs(column, rows)

    def values(self, column: str) -> npt.NDArray[Any]:
        """Return a whole column as `Shard.values` does; 0 for what is not there, which `is_valid` refuses."""
        with self._lock:
            return super().values(column)

    def is_valid(self, column: str, rows: npt.NDArray[np.int64]) -> bool:
        """Return what `Shard.is_valid` does. Raises IndexError for rows that are not there."""
        self._check(rows)
        with self._lock:
            return super().is_valid(column, rows)

    def sample(self, row: int) -> dict[str, Any]:
        """Return one sample as `Shard.sample` does. Raises IndexError when it is not there."""
        self._check(np.array([row]))
        with self._lock:
            return super().sample(row)

    def _check(self, rows: Integers) -> None:
        if not self.has(rows):
            missing = rows[~self._is_there[rows]].tolist()
            raise IndexError(
                f"sample {missing[0]} of shard {self.name} is not there yet, with {len(missing) - 1} others; fetch "
                "them first"
            )


def open_partial(objects: Objects, info: ObjectInfo, index: Digest | None) -> PartialShard | None:
    """Return a shard of which nothing is there but its index; None where that says too little: wait for the whole.

    Args:
        objects: where the index is.
        info: the shard's object.
        index: as the shard table says.

    Raises:
        NotFoundError, CorruptDataError, UnavailableError: the index cannot be read.
        ConfigError: a later format.
    """
    if index is None:
        return None
    decoded = SampleIndex.decode(objects.read(index), objects.location(index))
    if decoded.layout is None:
        return None
    return PartialShard(info, decoded, objects.location(info.digest))
