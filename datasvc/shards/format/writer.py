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
from datasvc.shards.format.blob_column import BlobColumn
from datasvc.shards.format.ipc_writer import ByteSink, RecordedFile
from datasvc.shards.format.layout import ShardLayout
from datasvc.shards.format.schema import HEIGHT, IMAGE, LABEL, WIDTH, is_blob

# Small enough that a ranged read of one batch is quick, large enough that its overhead is nothing.
BATCH_BYTES = 4 << 20
# Record batches of tiny samples end here.
_BATCH_SAMPLES = 1 << 16
# Keys and other short texts beside the blobs: their buffers grow where they have to.
_TEXT_BYTES = 256 << 10


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


class ShardWriter:
    """Writes one shard to `sink`; use it as a context manager, or call `close`.

    Args:
        sink: receives the file's bytes in order.
        schema: from `schema.shard_schema`.
    """

    def __init__(self, sink: ByteSink, schema: pa.Schema) -> None:
        self._schema = schema
        self._file = RecordedFile(sink, schema)
        self._blobs = {field.name: _blob_column() for field in schema if is_blob(field.type)}
        self._blob_columns = tuple(self._blobs.values())
        self._texts: dict[str, BlobColumn] = {}
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
        is_full = self.append_blobs(*[sample[name] for name in self._blobs])
        for name, values in self._values.items():
            values.append(sample[name])
        if is_full:
            self._flush()

    def append_blobs(self, *blobs: bytes | memoryview | None) -> bool:
        """Add the blobs of a sample, whose other values follow with `end_batch`; never mixed with `append`.

        Args:
            blobs: one for each blob column, in the schema's order; copied as by `append`.

        Returns:
            Whether the record batch is full: now call `end_batch`.
        """
        for column, blob in zip(self._blob_columns, blobs, strict=True):
            self._batch_bytes += column.append(blob)
        self._batch_samples += 1
        return self._batch_bytes >= BATCH_BYTES or self._batch_samples >= _BATCH_SAMPLES

    def end_batch(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Write the record batch of the samples whose blobs were appended since the last one.

        Args:
            values: by column that holds no blobs, the value of each of these samples.

        Raises:
            ConfigError: a column does not hold what the schema says.
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
            self._texts.setdefault(name, BlobColumn(_TEXT_BYTES)) if name not in self._blobs else None
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
        # The next shard is being made while this one is synced: two sets of buffers are not needed.
        self._blobs, self._blob_columns, self._texts = {}, (), {}
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
        values, self._values = self._values, {name: [] for name in self._values}
        self.end_batch(values)

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


def _blob_column() -> BlobColumn:
    return BlobColumn(BATCH_BYTES + (BATCH_BYTES >> 2))


def _array(values: Sequence[Any], field: pa.Field) -> pa.Array:
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
