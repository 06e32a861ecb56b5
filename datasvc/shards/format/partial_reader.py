"""Reader of a shard before it is fetched completely: single samples are read by byte range and verified.

With it, a loader serves samples while the cache still fetches their shard. No byte is readable before it is verified.
The *frame* of a record batch, its bytes without those of its blobs, is part of the sample index, so
the digest of the index verifies it. The payload digest of a sample verifies its blobs. A record batch without a frame
in the index is read as a whole, and has a digest of its own.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from threading import RLock
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_128_digest

from datasvc.arrow_messages import MAX_EXPANSION, checked_messages
from datasvc.errors import CorruptDataError
from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.shards.format.digests import digest_blob, digest_sample
from datasvc.shards.format.ipc_reader import PARSE_ERRORS, read_batch
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.parts import PartedBlob, ReadPlan
from datasvc.shards.format.reader import Shard, blob_part
from datasvc.shards.format.sample_index import BatchLayout, ByteRange, Digests, SampleIndex, SampleParts, check_ranges
from datasvc.shards.format.schema import check_shard_schema, has_compression, is_blob

# Samples with at most this gap between them are read by one request: the transfer of the gap takes a third of the
# latency of another request.
GAP_BYTES: Final = 256 << 10


Content = bytes | memoryview
Run = tuple[int, int]
"""Samples of a record batch as a half-open range `start, stop`."""

_OFFSET_BITS: Final = 32  # size of the offset that each text, blob or list has
_ADVICE: Final = "read it again; if it fails again, restore the shard from another copy"


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

    is_partial = True

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
        self._parts = {parts.sample: (parts, self._parted_range(parts)) for parts in layout.parts}
        self._is_in_parts = np.zeros(len(self._is_readable), np.bool_)
        self._objects: RangedObjects | None = None

    def has(self, rows: Integers) -> bool:
        """Return whether all of `rows` are readable."""
        return bool(self._is_readable[rows].all())

    def plan(self, rows: Integers, *, gap_bytes: int = GAP_BYTES) -> list[PartialRead]:
        """Return the reads that make all of `rows` readable, in the order of the file; [] if they are already.

        Samples of a record batch with a gap of at most `gap_bytes` between them are read together, with the gap.
        """
        missing = np.unique(rows[~self._is_readable[rows] & ~self._is_in_parts[rows]])
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
                assert isinstance(self._batches, list), "the batches of a partial shard are listed"
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

    @property
    def parted_bytes(self) -> int:
        """Number of bytes of blobs with parts."""
        return sum(span.length for _, span in self._parts.values())

    def read_in_parts(self, objects: RangedObjects) -> None:
        """Read blobs with parts by `reader` alone, from `objects`, from now on: `fetch` leaves them out.

        `blobs` returns views of their sizes, whose bytes are zeros.
        """
        self._objects = objects
        self._is_in_parts[[*self._parts]] = True

    def reader(self, column: str, row: int, plan: ReadPlan) -> Callable[[Bytes, Bytes], Bytes]:
        """Return a function like `Shard.read` for views of one blob; of `read_in_parts`, it reads and verifies parts.

        Raises, as does the function: see `PartedBlob`.
        """
        if not self._is_in_parts[row] or self._is_readable[row] or self._objects is None:
            return self.read
        (parts, span), (view,) = self._parts[row], self.blobs(column, np.array([row]))
        objects, digest = self._objects, self.info.digest

        def read_range(offset: int, length: int) -> Content:
            return objects.read_range(digest, span.offset + offset, length)

        return PartedBlob(view, parts, read_range, f"sample {row} of shard {self.name}", plan).read

    def _parted_range(self, parts: SampleParts) -> ByteRange:
        """Return the range of a blob with parts in the shard's file. Raise CorruptDataError if they contradict it."""
        number = int(np.searchsorted(self._starts, parts.sample, side="right")) - 1
        if 0 <= parts.sample < self.num_samples and isinstance(batch := self._partial[number], FramedBatch):
            spans = batch.sample_spans(parts.sample - int(self._starts[number]))
            if len(spans) == 1 and parts.num_parts == parts.count(spans[0].length):
                return spans[0]
        raise CorruptDataError(
            f"{self.name}: its sample index has digests of other parts than sample {parts.sample} has; "
            "restore the index from another copy"
        )

    def blobs(self, column: str, rows: npt.NDArray[np.int64]) -> list[Bytes]:
        """Return blobs as `Shard.blobs` does. Raise IndexError for rows that are not readable yet."""
        self._check(rows[~self._is_in_parts[rows]])
        with self._lock:
            return super().blobs(column, rows)

    def values(self, column: str) -> npt.NDArray[Any]:
        """Return a column as `Shard.values` does; values of samples that are not readable yet are arbitrary."""
        with self._lock:
            return super().values(column)

    def is_valid(self, column: str, rows: npt.NDArray[np.int64]) -> bool:
        """Return the same as `Shard.is_valid`. Raise IndexError for rows that are not readable yet."""
        self._check(rows[~self._is_in_parts[rows]])
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


# If the layout of a batch has a frame (the message without the bytes of its blobs, see `sample_index`), the batch is
# a `FramedBatch`, else a `WholeBatch`. Both plan the byte ranges to read for some samples, and accept only bytes that
# match their digest. `partial_reader` combines the batches of a shard.


class FramedBatch:
    """A record batch with a frame: the frame has everything but the blobs, which are read sample by sample.

    Args:
        layout: layout of the batch, with a frame.
        schema: schema of the shard.
        memory: memory of the size of the shard's file; the batch uses its own range of it.
        payloads: payload digest of each sample of the batch.
        name: name of the batch for messages.

    Attributes:
        batch: the samples; those that are not readable yet have arbitrary or null blobs.
        readable: `bool[num_samples]`, samples that are readable before any `add`.

    Raises:
        CorruptDataError: the frame is not a record batch of `schema`, or does not match the layout.
    """

    def __init__(
        self, layout: BatchLayout, schema: pa.Schema, memory: mmap.mmap, payloads: Digests, name: str
    ) -> None:
        self._layout = layout
        self._payloads = payloads
        self._name = name
        try:
            self.batch = _read_message(_place_frame(layout, memory), schema, layout.num_samples)
        except ValueError as error:
            raise CorruptDataError(f"{name}: its sample index has an invalid frame: {error}") from error
        self._memory = memoryview(memory)[layout.message.offset :][: layout.message.length]
        self._columns = [field.name for field in schema if is_blob(field.type)]
        self._check_spans()
        parts = [blob_part(self.batch.column(name)) for name in self._columns]
        # Bounds of each blob within the bytes of its column: `int64[blob columns, samples]`.
        self._starts = np.array([starts for _, starts, _ in parts])
        self._stops = np.array([stops for _, _, stops in parts])
        self._valid = np.array(
            [self.batch.column(name).is_valid().to_numpy(zero_copy_only=False) for name in self._columns]
        )
        # A sample whose blobs have no bytes needs nothing but the frame.
        self.readable = np.asarray((self._stops == self._starts).all(axis=0))

    def _check_spans(self) -> None:
        """Raise CorruptDataError if the layout's blobs are not those of the batch, at the same positions."""
        # `add` writes blobs at the layout's positions, but readers take them from the positions in the batch.
        start = _address_of(self._memory)
        buffers = [self.batch.column(name).buffers()[2] for name in self._columns]
        spans = [
            ByteRange(buffer.address - start, buffer.size) if buffer is not None and buffer.size else ByteRange(0, 0)
            for buffer in buffers
        ]
        # A column without bytes counts as (0, 0). A batch without blob columns has no frame: it would save nothing.
        if not spans or spans != [span if span.length else ByteRange(0, 0) for span in self._layout.blobs]:
            raise CorruptDataError(
                f"{self._name}: its sample index lists blobs at other positions than its frame; restore the index "
                "from another copy"
            )

    def plan(self, rows: Integers, gap_bytes: int) -> list[tuple[Run, tuple[ByteRange, ...]]]:
        """Return the runs that cover `rows` (`plan_runs`), each with the byte range to read for each blob column."""
        # Sums over the blob columns: the difference of two is the number of bytes between samples in all columns.
        runs = plan_runs(self._starts.sum(axis=0), self._stops.sum(axis=0), rows, gap_bytes)
        return [(run, self._spans(*run)) for run in runs]

    def add(self, run: Run, contents: Sequence[Content]) -> None:
        """Store the bytes of a run's blobs. Raise CorruptDataError, without any change, if a digest differs."""
        views = [memoryview(content) for content in contents]
        # Bounds within `contents`, whose first bytes are those of the run's first sample.
        starts = self._starts - self._starts[:, run[0], None]
        stops = self._stops - self._starts[:, run[0], None]
        for row in range(*run):
            blobs = {
                name: digest_blob(views[number][starts[number, row] : stops[number, row]])
                for number, name in enumerate(self._columns)
                if self._valid[number, row]
            }
            # The payload digest depends on the blobs alone, so the other columns are left out. A sample without blobs
            # has no bytes in `contents` to verify.
            if blobs and digest_sample(blobs, {})[1] != self._payloads[row].tobytes():
                raise CorruptDataError(f"{self._name}: the bytes read for its sample {row} are corrupt; {_ADVICE}")
        # Store bytes only after all samples of the run are verified, because readers use this memory without a copy.
        for number, view in enumerate(views):
            start = self._layout.blobs[number].offset + int(self._starts[number, run[0]])
            self._memory[start : start + len(view)] = view

    def sample_spans(self, row: int) -> list[ByteRange]:
        """Return the ranges in the shard's file of the blobs of a sample that have bytes."""
        return [span for span in self._spans(row, row + 1) if span.length]

    def _spans(self, start: int, stop: int) -> tuple[ByteRange, ...]:
        """Return the range in the shard's file of the blobs of samples `start` to `stop`, for each blob column."""
        message_offset = self._layout.message.offset
        return tuple(
            ByteRange(message_offset + span.offset + int(starts[start]), int(stops[stop - 1] - starts[start]))
            for span, starts, stops in zip(self._layout.blobs, self._starts, self._stops, strict=True)
        )


class WholeBatch:
    """A record batch with a digest: no sample is readable before the whole batch is read.

    Args:
        layout: layout of the batch, with a digest.
        schema: schema of the shard.
        name: name of the batch for messages.

    Attributes: see `FramedBatch`.
    """

    def __init__(self, layout: BatchLayout, schema: pa.Schema, name: str) -> None:
        self._layout = layout
        self._name = name
        count = layout.num_samples
        # Check this before the placeholder is made, because its null values take memory for each of the samples.
        max_bytes = layout.message.length * (1 + MAX_EXPANSION * has_compression(schema))
        if count * sum(_min_bits(field.type) for field in schema) > 8 * max_bytes:
            raise CorruptDataError(
                f"{name}: its sample index lists {count_text(count, 'sample')} in {layout.message.length} "
                "bytes; restore the index "
                "from another copy"
            )
        self.batch = pa.RecordBatch.from_arrays([pa.nulls(count, field.type) for field in schema], schema=schema)
        self.readable = np.zeros(count, np.bool_)

    def plan(self, rows: Integers, _gap_bytes: int) -> list[tuple[Run, tuple[ByteRange, ...]]]:
        """Return the whole batch as one run."""
        return [((0, self._layout.num_samples), (self._layout.message,))] if len(rows) else []

    def add(self, _run: Run, contents: Sequence[Content]) -> None:
        """Replace `batch` by the one that was read. Raise CorruptDataError if the bytes do not match the digest."""
        (content,) = contents
        if xxh3_128_digest(content) != self._layout.digest:
            raise CorruptDataError(f"{self._name}: the bytes read are corrupt; {_ADVICE}")
        try:
            self.batch = _read_message(pa.py_buffer(content), self.batch.schema, self._layout.num_samples)
        except ValueError as error:
            raise CorruptDataError(f"{self._name} is not a valid record batch: {error}") from error


PartialBatch = FramedBatch | WholeBatch


def _min_bits(data_type: pa.DataType) -> int:
    """Return the minimum number of bits that a value of this type takes in a record batch."""
    if pa.types.is_fixed_size_list(data_type):
        return int(data_type.list_size) * _min_bits(data_type.value_type)
    if pa.types.is_struct(data_type):
        return sum(_min_bits(field.type) for field in data_type)
    if pa.types.is_primitive(data_type) or pa.types.is_fixed_size_binary(data_type):
        return int(data_type.bit_width)
    return _OFFSET_BITS


def plan_runs(starts: Integers, stops: Integers, rows: Integers, gap_bytes: int) -> list[Run]:
    """Return the fewest runs of samples that cover `rows` and contain no gap of more than `gap_bytes`.

    `starts` and `stops` are the bounds of each sample's bytes, `int64[num_samples]`. `rows` ascend and are distinct.
    """
    if not len(rows):
        return []
    gaps = starts[rows[1:]] - stops[rows[:-1]]
    runs = np.split(rows, np.flatnonzero(gaps > gap_bytes) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


def reserve_memory(size_bytes: int) -> mmap.mmap:
    """Return memory of the size of a shard's file. Only the pages that are written to take space.

    Raises:
        CorruptDataError: no process has so much memory, so the size in the shard table is wrong.
    """
    try:
        memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CorruptDataError(
            f"a shard has {size_bytes} bytes in its table; they cannot be mapped: {error}"
        ) from error
    # Without this advice, the kernel may allocate a huge page of 2 MiB for a sample of 100 KiB.
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def _place_frame(layout: BatchLayout, memory: mmap.mmap) -> pa.Buffer:
    """Copy the frame to its position in `memory`; return the message, with the ranges of blobs still zero."""
    assert layout.frame is not None
    start, frame = layout.message.offset, memoryview(layout.frame)
    stop = start + layout.message.length
    if stop > len(memory) or len(frame) + sum(span.length for span in layout.blobs) != layout.message.length:
        raise ValueError("its record batch does not fit into the shard")
    check_ranges([span for span in layout.blobs if span.length], layout.message.length)
    position = 0
    # The frame has no bytes of blobs: its first part goes before the blobs of the first column, the next part between
    # those of the first and the second column, and so on.
    for span in sorted(layout.blobs, key=lambda span: span.offset):
        if span.length:
            memory[start + position : start + span.offset] = frame[: span.offset - position]
            frame = frame[span.offset - position :]
            position = span.offset + span.length
    memory[start + position : stop] = frame
    return pa.py_buffer(memoryview(memory)[start:stop])


def _address_of(memory: memoryview) -> int:
    return int(pa.py_buffer(memory).address)


def _read_message(message: pa.Buffer, schema: pa.Schema, num_samples: int) -> pa.RecordBatch:
    """Return the record batch of a message as a view. Raise ValueError if it is not one."""
    try:
        (parsed,) = checked_messages(message, compressed=has_compression(schema))
        batch = read_batch(parsed, schema)
    except PARSE_ERRORS as error:
        raise ValueError(f"Arrow cannot read it: {error}") from error
    if batch.num_rows != num_samples:
        raise ValueError(f"it has {count_text(batch.num_rows, 'sample')}; expected {num_samples}")
    return batch
