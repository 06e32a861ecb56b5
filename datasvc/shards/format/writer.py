"""Writer of one shard: an Arrow IPC file with record batches of a few megabytes, written in one pass.

Equal samples in equal order give equal bytes; with compressed columns, in the same release of Arrow, which has zstd.
Each blob is copied once, into the buffer of its column. To record the positions of batches and blobs, no file is read
again and nothing is copied: Arrow writes a file in chunks of memory, and a chunk with blobs is recognised by its
address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_128

from datasvc.errors import ConfigError
from datasvc.shards.format.compressed_batches import BatchCompressor, Chunk, choose_columns
from datasvc.shards.format.parts import MIN_PARTED_BYTES, digest_parts
from datasvc.shards.format.sample_index import BatchLayout, ByteRange, SampleParts, ShardLayout
from datasvc.shards.format.schema import (
    HEIGHT,
    IMAGE,
    LABEL,
    WIDTH,
    BlobColumn,
    has_compression,
    is_blob,
    is_gathered,
    with_compression,
)

# Small enough that one batch is read quickly by byte range; large enough that the overhead per batch is negligible.
BATCH_BYTES = 4 << 20
# Upper bound on the samples of a record batch; tiny samples reach it first.
BATCH_SAMPLES = 1 << 16
# Initial buffer size for the blobs of a record batch: with the last blob, they may exceed `BATCH_BYTES`.
_BLOB_BYTES = BATCH_BYTES + (BATCH_BYTES >> 2)
_TEXT_BYTES = 256 << 10  # initial buffer size for keys and other texts


# Length of "ARROW1" and its padding, which precede the schema.
_MAGIC_BYTES: Final = 8
# The frame of a record batch is its message without the bytes of its blobs. A frame is stored only if the message
# is at least this many times as large, so that the sample index stays small.
_MIN_MESSAGE_PER_FRAME: Final = 32
# Smaller chunks are written together, because a record batch has a dozen chunks, most of them of a few bytes.
_SMALL_BYTES: Final = 4096


@dataclass(frozen=True)
class ShardStatistics:
    """The statistics of a shard in the shard table.

    Attributes:
        num_samples: number of samples in the shard.
        max_width: width of the widest image in pixels, 0 without images.
        max_height: height of the tallest image in pixels, 0 without images.
        max_sample_bytes: blob bytes of the largest sample.
        label_counts: number of samples by label.
        image_kinds: number of images by format, such as "JPEG". Empty in the statistics of `ShardWriter`, which does
            not read images; `ShardOutput` adds the counts.
        saved_bytes: number of bytes by which compressed columns make the shard smaller; None: it has none. The table
            does not store it.
    """

    num_samples: int
    max_width: int = 0
    max_height: int = 0
    max_sample_bytes: int = 0
    label_counts: Mapping[int, int] = field(default_factory=dict)
    image_kinds: Mapping[str, int] = field(default_factory=dict)
    saved_bytes: int | None = None


class ShardWriter:
    """Writes one shard. Use it as a context manager, or call `close`.

    Args:
        sink: receives the file's bytes in order.
        schema: result of `schema.shard_schema`. With `schema.has_compression`, columns of text and numbers are
            compressed if that makes the shard's first record batch smaller, see `choose_columns`.
    """

    def __init__(self, sink: ByteSink, schema: pa.Schema) -> None:
        self._sink, self._schema = sink, schema
        self._open_file: IpcWriter | None = None  # opened with the first record batch, which decides the format
        self._blobs = {field.name: BlobColumn(_BLOB_BYTES) for field in schema if is_blob(field.type)}
        self._blob_columns = tuple(self._blobs.values())
        self._texts = {
            field.name: BlobColumn(_TEXT_BYTES)
            for field in schema
            if is_gathered(field.type) and field.name not in self._blobs
        }
        self._values: dict[str, list[Any]] = {name: [] for name in schema.names if name not in self._blobs}
        self._names = frozenset(schema.names)
        self._batch_samples = self._batch_bytes = 0
        self._statistics = ShardStatistics(0)
        self._label_counts: Counter[int] = Counter()

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add a sample: one value for every column; blobs as bytes or memoryview.

        Blobs are copied before this returns, unless they are the last result of `blob_buffer` for that column.

        Raises:
            ConfigError: columns are missing or unknown.
        """
        if sample.keys() != self._names:
            raise ConfigError(f"the sample has the columns {sorted(sample)}; expected {sorted(self._schema.names)}")
        is_full = self.append_blobs(*[sample[name] for name in self._blobs])
        for name, values in self._values.items():
            values.append(sample[name])
        if is_full:
            self._flush()

    def append_blobs(self, *blobs: bytes | memoryview | None) -> bool:
        """Add the blobs of a sample, in the schema's order; `end_batch` adds the others. Do not mix with `append`.

        Return whether the record batch is full, so that `end_batch` must be called now.
        """
        for column, blob in zip(self._blob_columns, blobs, strict=True):
            self._batch_bytes += column.append(blob)
        self._batch_samples += 1
        return self._batch_bytes >= BATCH_BYTES or self._batch_samples >= BATCH_SAMPLES

    def end_batch(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Write a record batch of the samples whose blobs were appended since the last one, and their `values`.

        Raises:
            ConfigError: the values of a column do not have the type in the schema.
        """
        if not self._batch_samples:
            return
        self._write(
            [None if field.name in self._blobs else _array(values[field.name], field) for field in self._schema]
        )
        self._batch_samples = self._batch_bytes = 0

    def append_columns(
        self,
        blobs: Mapping[str, Iterable[memoryview | npt.NDArray[np.uint8] | None]],
        values: pa.RecordBatch,
        *,
        as_one: bool = False,
    ) -> None:
        """Add many samples, column by column.

        Args:
            blobs: for each column of blobs or text (`is_gathered`), the bytes of each sample, copied; None for null.
            values: all other columns of the same samples.
            as_one: write all samples as one record batch of any size, so that a rewritten shard keeps its batches.

        Raises:
            ConfigError: columns are missing or unknown.
        """
        names = {*blobs, *values.schema.names}
        if names != set(self._schema.names):
            raise ConfigError(f"the samples have the columns {sorted(names)}; expected {sorted(self._schema.names)}")
        self._flush()
        gathered = [((self._blobs | self._texts)[name], iter(views)) for name, views in blobs.items()]
        # Average size of the other columns per sample. It counts too, because a list may be larger than the blobs.
        other_bytes = values.nbytes // max(1, values.num_rows)
        start = size_bytes = 0
        for row in range(values.num_rows):
            size_bytes += other_bytes
            for column, views in gathered:
                size_bytes += column.append(next(views))
            is_full = size_bytes >= BATCH_BYTES or row + 1 - start >= BATCH_SAMPLES
            if (is_full and not as_one) or row + 1 == values.num_rows:
                part = values.slice(start, row + 1 - start)
                self._write([part.column(name) if name not in blobs else None for name in self._schema.names])
                start, size_bytes = row + 1, 0

    def blob_buffer(self, column: str, size_bytes: int) -> memoryview:
        """Return memory for the next blob of `column`: fill it, and pass it to `append` before the next call."""
        return self._blobs[column].reserve(size_bytes)

    def close(self) -> ShardStatistics:
        """Write the remaining samples and the file's footer; return the statistics, without image kinds."""
        self._flush()
        self._file_for(None).close()
        # Free the buffers now: the next shard is written while this one is synced to disk, and memory should hold the
        # buffers of one shard only.
        self._blobs, self._blob_columns, self._texts = {}, (), {}
        return self.statistics

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error, the shard is incomplete. The owner of the sink discards the object, so no footer is needed.
        if kind is None:
            self.close()

    @property
    def statistics(self) -> ShardStatistics:
        """Statistics of the samples written so far, without image kinds; final after `close`."""
        return replace(
            self._statistics,
            label_counts=dict(sorted(self._label_counts.items())),
            saved_bytes=None if self._open_file is None else self._open_file.saved_bytes,
        )

    @property
    def layout(self) -> ShardLayout:
        """Layout of the record batches written so far; complete after `close`."""
        return self._file_for(None).layout

    def _file_for(self, batch: pa.RecordBatch | None) -> IpcWriter:
        """Return the file, opened with the columns that are compressed in `batch`; None: there is no batch."""
        if self._open_file is None:
            columns: tuple[str, ...] = ()
            if has_compression(self._schema):
                columns = choose_columns(batch) if batch is not None else ()
                self._schema = with_compression(self._schema, compressed=bool(columns))
            self._open_file = IpcWriter(self._sink, self._schema, columns)
        return self._open_file

    def _flush(self) -> None:
        """Write the samples of `append` that are not in a record batch yet."""
        values, self._values = self._values, {name: [] for name in self._values}
        self.end_batch(values)

    def _write(self, columns: Sequence[pa.Array | None]) -> None:
        """Write a record batch; None stands for a column whose blobs or texts are in its buffer."""
        # Blob bytes of each sample: `int64[samples]`; the number 0 without blob columns.
        sample_bytes = sum(column.sizes for column in self._blobs.values())
        gathered = self._blobs | self._texts
        arrays = [
            gathered[field.name].take(field.type) if column is None else column
            for field, column in zip(self._schema, columns, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._file_for(batch).write_batch(batch)
        previous = self._statistics
        self._label_counts.update(_labels(batch))
        self._statistics = ShardStatistics(
            previous.num_samples + batch.num_rows,
            max(previous.max_width, _largest(batch, WIDTH)),
            max(previous.max_height, _largest(batch, HEIGHT)),
            max(previous.max_sample_bytes, int(np.max(sample_bytes))),
        )


def _array(values: Sequence[Any], field: pa.Field) -> pa.Array:
    try:
        return pa.array(values, field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ConfigError(f"column {field.name!r} has values that are not {field.type}: {error}") from error


def _largest(batch: pa.RecordBatch, column: str) -> int:
    # Without a column `image`, columns named `width` and `height` come from the source, and are not image sizes.
    is_measured = IMAGE in batch.schema.names and column in batch.schema.names
    return int(batch.column(column).to_numpy().max()) if is_measured else 0


def _labels(batch: pa.RecordBatch) -> list[int]:
    if LABEL not in batch.schema.names or not pa.types.is_integer(batch.schema.field(LABEL).type):
        return []
    labels: list[int] = batch.column(LABEL).drop_null().to_numpy().tolist()
    return labels


class ByteSink(Protocol):
    """Destination of a shard's bytes, such as an `ObjectWriter`."""

    def write(self, content: bytes | memoryview, /) -> int:
        """Append `content`."""


class IpcWriter:
    """Writes an Arrow IPC file and records its layout.

    Args:
        sink: receives the file's bytes in order.
        schema: schema of every record batch; without dictionary-encoded columns.
        compressed: columns that are compressed.

    Attributes:
        saved_bytes: number of bytes by which compression has made the file smaller; None: no column is compressed.
    """

    def __init__(self, sink: ByteSink, schema: pa.Schema, compressed: Collection[str] = ()) -> None:
        self._schema = schema
        self._chunks = _ChunkRecorder(sink)
        self._compressor = BatchCompressor(schema, compressed) if compressed else None
        # What Arrow writes: the file itself, or batches that are then compressed.
        self._plain = self._chunks if self._compressor is None else _ChunkRecorder(None)
        self._file = pa.ipc.new_file(pa.PythonFile(self._plain, mode="w"), schema)
        self.saved_bytes: int | None = 0 if compressed else None
        self._blobs = [number for number, field in enumerate(schema) if is_blob(field.type)]
        self._batches: list[BatchLayout] = []
        self._parts: list[SampleParts] = []

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Append a record batch. Raise what the sink raises."""
        start_bytes = self._chunks.size_bytes
        self._file.write_batch(batch)
        chunks = self._plain.take_chunks()
        header: list[Chunk] = []
        if not self._batches:
            # Arrow writes the file's header together with the first record batch; the header's chunks are left out.
            header_bytes = _MAGIC_BYTES + self._schema.serialize().size
            while sum(map(len, header)) < header_bytes:
                header.append(chunks.pop(0))
            start_bytes += sum(map(len, header))
            assert start_bytes == header_bytes, (start_bytes, header_bytes)
        if self._compressor is not None and self.saved_bytes is not None:
            plain_bytes = sum(map(len, chunks))
            chunks = self._compressor.message(chunks, start_bytes)
            for chunk in (*header, *chunks):
                self._chunks.write(chunk)
            self._chunks.take_chunks()
            self.saved_bytes += plain_bytes - sum(map(len, chunks))
        blobs = [batch.column(number).buffers()[2] for number in self._blobs]
        layout = describe_batch(chunks, start_bytes, blobs, batch.num_rows)
        if layout.frame is not None and layout.message.length >= MIN_PARTED_BYTES:
            self._parts += digest_parts(batch, self._blobs, sum(each.num_samples for each in self._batches))
        self._batches.append(layout)

    def close(self) -> None:
        """Write the file's footer."""
        self._file.close()
        if self._compressor is not None:
            self._chunks.write(self._compressor.footer())
        self._chunks.flush()

    @property
    def layout(self) -> ShardLayout:
        """Layout of the record batches written so far."""
        return ShardLayout(self._schema, tuple(self._batches), tuple(self._parts))


def describe_batch(
    chunks: Sequence[Chunk], offset: int, blobs: Sequence[pa.Buffer | None], num_samples: int
) -> BatchLayout:
    """Return the layout of a record batch.

    Args:
        chunks: the chunks that Arrow wrote for the batch; their memory must be unchanged.
        offset: byte position of the batch's message in the file.
        blobs: the buffer of each blob column, in the schema's order; None if it is empty.
        num_samples: number of samples of the batch.
    """
    # Arrow writes a column's buffer without a copy, so a chunk with the same address and size is that buffer.
    # A region is a pair (address, size), or None for an empty buffer.
    blob_regions = [(blob.address, blob.size) if blob is not None and blob.size else None for blob in blobs]
    blob_ranges: dict[tuple[int, int], ByteRange] = {}
    frame: list[Chunk] = []
    length = 0
    for chunk in chunks:
        region = (chunk.address, chunk.size) if isinstance(chunk, pa.Buffer) else None
        # If two columns share a region, the second chunk of the region makes the frame too large to be kept.
        if region is not None and region in blob_regions and region not in blob_ranges:
            blob_ranges[region] = ByteRange(length, len(chunk))
        else:
            frame.append(chunk)
        length += len(chunk)
    message = ByteRange(offset, length)
    # A frame is useful only if it is small and the position of every blob buffer is known.
    knows_all_blobs = set(blob_ranges) == set(blob_regions) - {None}
    if knows_all_blobs and sum(map(len, frame)) * _MIN_MESSAGE_PER_FRAME <= length:
        spans = tuple(ByteRange(0, 0) if region is None else blob_ranges[region] for region in blob_regions)
        return BatchLayout(message, num_samples, frame=b"".join(map(memoryview, frame)), blobs=spans)
    digest = xxh3_128()
    for chunk in chunks:
        digest.update(memoryview(chunk))
    return BatchLayout(message, num_samples, digest=digest.digest())


class _ChunkRecorder:
    """The file object that Arrow writes to. It forwards chunks to the sink, and also keeps them for `take_chunks`.

    `closed`, `write`, `flush` and `close` are the parts of a file's interface that Arrow uses.
    """

    closed = False

    def __init__(self, sink: ByteSink | None) -> None:
        self._sink = sink  # None: the chunks are only kept
        self._kept: list[Chunk] = []
        self._small = bytearray()
        self.size_bytes = 0

    def write(self, content: Chunk) -> int:
        view = memoryview(content)
        self._kept.append(content)
        self.size_bytes += view.nbytes
        if view.nbytes < _SMALL_BYTES:
            self._small += view
        else:
            self.flush()
            if self._sink is not None:
                self._sink.write(view)
        return view.nbytes

    def take_chunks(self) -> list[Chunk]:
        """Return the chunks that were written since the last call."""
        chunks, self._kept = self._kept, []
        return chunks

    def flush(self) -> None:
        """Write the collected small chunks to the sink. The owner of the sink syncs the file."""
        small, self._small = self._small, bytearray()
        if small and self._sink is not None:
            self._sink.write(memoryview(small))

    def close(self) -> None:
        self.closed = True
