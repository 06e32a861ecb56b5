"""Samples to one shard: an Arrow IPC file of record batches of a few megabytes, written in one pass.

Equal samples in equal order give equal bytes. Blobs are copied once, into one buffer that is used again for every
record batch: fresh memory costs more than the copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.layout import ShardLayout
from datasvc.shards.recorded_file import RecordedFile, Sink
from datasvc.shards.schema import HEIGHT, IMAGE, LABEL, WIDTH, is_blob

# Small enough that a ranged read of one batch is quick, large enough that its overhead is nothing.
BATCH_BYTES = 4 << 20
# Record batches of tiny samples end here.
_BATCH_SAMPLES = 1 << 16


@dataclass(frozen=True)
class ShardStatistics:
    """What the shard table says of a shard beside its digest.

    Attributes:
        num_samples: samples in the shard.
        max_width: widest image in pixels, 0 without images.
        max_height: highest image in pixels, 0 without images.
        max_sample_bytes: blob bytes of the largest sample.
        label_counts: samples of each label.
        image_kinds: images of each encoding, "JPEG".
    """

    num_samples: int
    max_width: int = 0
    max_height: int = 0
    max_sample_bytes: int = 0
    label_counts: Mapping[int, int] = field(default_factory=dict)
    image_kinds: Mapping[str, int] = field(default_factory=dict)


def is_gathered(data_type: pa.DataType) -> bool:
    """Return whether values of this type are gathered one by one into a buffer: blobs and text."""
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(data_type) for check in checks)


class _BlobColumn:
    """Blobs or texts of the batch being filled, end to end in a buffer that only ever grows."""

    def __init__(self) -> None:
        self._buffer = np.empty(BATCH_BYTES + (BATCH_BYTES >> 2), np.uint8)
        self._view = self._buffer.data
        self._offsets = [0]
        self._nulls: list[int] = []
        self._room: memoryview | None = None

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each blob: `int64[samples]`."""
        offsets = np.array(self._offsets, np.int64)
        return offsets[1:] - offsets[:-1]

    def room(self, size_bytes: int) -> memoryview:
        """Return where the next blob will lie: what is written there needs no copy when it is appended."""
        start = self._offsets[-1]
        if start + size_bytes > len(self._buffer):
            grown = np.empty(max(start + size_bytes, 2 * len(self._buffer)), np.uint8)
            grown[:start] = self._buffer[:start]
            self._buffer, self._view = grown, grown.data
        self._room = self._view[start : start + size_bytes]
        return self._room

    def append(self, blob: bytes | memoryview | npt.NDArray[np.uint8] | None) -> int:
        """Add a blob; returns its size in bytes."""
        if blob is None:
            self._nulls.append(len(self._offsets) - 1)
            self._offsets.append(self._offsets[-1])
            return 0
        if blob is not self._room:
            view = np.frombuffer(blob, np.uint8)
            self.room(len(view))[:] = view.data
        size_bytes = len(blob)
        self._offsets.append(self._offsets[-1] + size_bytes)
        self._room = None
        return size_bytes

    def take(self, data_type: pa.DataType) -> pa.Array:
        """Return the blobs as an array that is valid until the next `append`, and start over."""
        count = len(self._offsets) - 1
        is_large = pa.types.is_large_binary(data_type) or pa.types.is_large_string(data_type)
        offsets = pa.py_buffer(np.array(self._offsets, np.int64 if is_large else np.int32))
        content = pa.py_buffer(self._buffer[: self._offsets[-1]])
        array = pa.Array.from_buffers(data_type, count, [_validity(count, self._nulls), offsets, content])
        self._offsets, self._nulls, self._room = [0], [], None
        return array


class ShardWriter:
    """Writes one shard to `sink`; use it as a context manager, or call `close`.

    Args:
        sink: receives the file's bytes in order.
        schema: from `schema.shard_schema`.
    """

    def __init__(self, sink: Sink, schema: pa.Schema) -> None:
        self._schema = schema
        self._file = RecordedFile(sink, schema)
        self._blobs = {field.name: _BlobColumn() for field in schema if is_blob(field.type)}
        self._texts: dict[str, _BlobColumn] = {}
        self._values: dict[str, list[Any]] = {name: [] for name in schema.names if name not in self._blobs}
        self._names = frozenset(schema.names)
        self._batch_samples = self._batch_bytes = 0
        self._statistics = ShardStatistics(0)
        self._label_counts: Counter[int] = Counter()

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add a sample.

        Args:
            sample: one value for every column; blobs as bytes or memoryview, copied before this returns, unless
                it is what `blob_room` returned last for that column.

        Raises:
            ConfigError: columns are missing or unknown.
        """
        if sample.keys() != self._names:
            raise ConfigError(f"sample has the columns {sorted(sample)}; expected {sorted(self._schema.names)}")
        for name, column in self._blobs.items():
            self._batch_bytes += column.append(sample[name])
        for name, values in self._values.items():
            values.append(sample[name])
        self._batch_samples += 1
        if self._batch_bytes >= BATCH_BYTES or self._batch_samples >= _BATCH_SAMPLES:
            self._flush()

    def append_columns(
        self,
        blobs: Mapping[str, Iterable[memoryview | npt.NDArray[np.uint8] | None]],
        values: pa.RecordBatch,
        *,
        as_one: bool = False,
    ) -> None:
        """Add many samples, column by column.

        Args:
            blobs: by column of blobs or text (`is_gathered`), the bytes of each sample, None for null; copied before
                this returns.
            values: all other columns of the same samples.
            as_one: write them as one record batch, however large it is: to keep those of another shard.

        Raises:
            ConfigError: columns are missing or unknown.
        """
        found = {*blobs, *values.schema.names}
        if found != set(self._schema.names):
            raise ConfigError(f"samples have the columns {sorted(found)}; expected {sorted(self._schema.names)}")
        self._flush()
        for name in blobs:
            self._texts.setdefault(name, _BlobColumn()) if name not in self._blobs else None
        gathered = [((self._blobs | self._texts)[name], iter(views)) for name, views in blobs.items()]
        # About what a sample's other columns take: lists may be larger than any blob.
        other_bytes = values.nbytes // max(1, values.num_rows)
        start = size_bytes = 0
        for row in range(values.num_rows):
            size_bytes += other_bytes
            for column, views in gathered:
                size_bytes += column.append(next(views))
            is_full = size_bytes >= BATCH_BYTES or row + 1 - start >= _BATCH_SAMPLES
            if (is_full and not as_one) or row + 1 == values.num_rows:
                part = values.slice(start, row + 1 - start)
                self._write([part.column(name) if name not in blobs else None for name in self._schema.names])
                start, size_bytes = row + 1, 0

    def blob_room(self, column: str, size_bytes: int) -> memoryview:
        """Return memory of the writer's own to read the next blob of `column` into; `append` it or ask again."""
        return self._blobs[column].room(size_bytes)

    def close(self) -> ShardStatistics:
        """Write what is left and the file's footer; returns the shard's statistics."""
        self._flush()
        self._file.close()
        return self.statistics

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    @property
    def statistics(self) -> ShardStatistics:
        """Statistics of the samples written so far, which are all of them after `close`."""
        return replace(self._statistics, label_counts=dict(sorted(self._label_counts.items())))

    @property
    def layout(self) -> ShardLayout:
        """Where the record batches written so far lie, which are all of them after `close`."""
        return self._file.layout

    def _flush(self) -> None:
        if not self._batch_samples:
            return
        self._write([self._take(field) for field in self._schema])
        self._batch_samples = self._batch_bytes = 0

    def _write(self, columns: Sequence[pa.Array | None]) -> None:
        """Write a record batch; columns that are None are the blobs collected so far."""
        sample_bytes = sum(column.sizes for column in self._blobs.values())
        gathered = self._blobs | self._texts
        arrays = [
            gathered[field.name].take(field.type) if column is None else column
            for field, column in zip(self._schema, columns, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._file.write_batch(batch)
        so_far = self._statistics
        self._label_counts.update(_labels(batch))
        self._statistics = ShardStatistics(
            so_far.num_samples + batch.num_rows,
            max(so_far.max_width, _largest(batch, WIDTH)),
            max(so_far.max_height, _largest(batch, HEIGHT)),
            max(so_far.max_sample_bytes, int(np.max(sample_bytes))),
        )

    def _take(self, field: pa.Field) -> pa.Array | None:
        if field.name in self._blobs:
            return None
        values, self._values[field.name] = self._values[field.name], []
        try:
            return pa.array(values, field.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise ConfigError(f"column {field.name!r} does not hold {field.type} throughout: {error}") from error


def _largest(batch: pa.RecordBatch, column: str) -> int:
    # Without an image, columns of these names are the user's own.
    is_measured = IMAGE in batch.schema.names and column in batch.schema.names
    return int(batch.column(column).to_numpy().max()) if is_measured else 0


def _labels(batch: pa.RecordBatch) -> list[int]:
    if LABEL not in batch.schema.names or not pa.types.is_integer(batch.schema.field(LABEL).type):
        return []
    labels: list[int] = batch.column(LABEL).drop_null().to_numpy().tolist()
    return labels


def _validity(count: int, nulls: list[int]) -> pa.Buffer | None:
    if not nulls:
        return None
    valid = np.ones(count, np.bool_)
    valid[nulls] = False
    return pa.py_buffer(np.packbits(valid, bitorder="little"))
