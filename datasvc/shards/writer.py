"""Samples to one shard: an Arrow IPC file of record batches of a few megabytes, written in one pass.

Equal samples in equal order give equal bytes. Blobs are copied once, into one buffer that is used again for every
record batch: fresh memory costs more than the copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.schema import HEIGHT, WIDTH, is_blob

# Small enough that a ranged read of one batch is quick, large enough that its overhead is nothing.
BATCH_BYTES = 4 << 20
# Record batches of tiny samples end here.
_BATCH_SAMPLES = 1 << 16


class Sink(Protocol):
    """Where a shard's bytes go, such as an `ObjectWriter`."""

    def write(self, content: bytes | memoryview, /) -> int:
        """Append `content`."""


@dataclass(frozen=True)
class ShardStatistics:
    """What the shard table says of a shard beside its digest.

    Attributes:
        num_samples: samples in the shard.
        max_width: widest image in pixels, 0 without images.
        max_height: highest image in pixels, 0 without images.
        max_sample_bytes: blob bytes of the largest sample.
    """

    num_samples: int
    max_width: int = 0
    max_height: int = 0
    max_sample_bytes: int = 0


class _BlobColumn:
    """Blobs of the batch being filled, end to end in a buffer that only ever grows."""

    def __init__(self) -> None:
        self._buffer = np.empty(BATCH_BYTES + (BATCH_BYTES >> 2), np.uint8)
        self._offsets = [0]

    @property
    def size_bytes(self) -> int:
        return self._offsets[-1]

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each blob: `int64[samples]`."""
        offsets = np.array(self._offsets, np.int64)
        return offsets[1:] - offsets[:-1]

    def append(self, blob: bytes | memoryview) -> None:
        view = np.frombuffer(blob, np.uint8)
        stop = self._offsets[-1] + len(view)
        if stop > len(self._buffer):
            grown = np.empty(max(stop, 2 * len(self._buffer)), np.uint8)
            grown[: self._offsets[-1]] = self._buffer[: self._offsets[-1]]
            self._buffer = grown
        self._buffer[self._offsets[-1] : stop] = view
        self._offsets.append(stop)

    def take(self, data_type: pa.DataType) -> pa.Array:
        """Return the blobs as an array that is valid until the next `append`, and start over."""
        offsets = pa.py_buffer(np.array(self._offsets, np.int64))
        content = pa.py_buffer(self._buffer[: self._offsets[-1]])
        array = pa.Array.from_buffers(data_type, len(self._offsets) - 1, [None, offsets, content])
        self._offsets = [0]
        return array


class ShardWriter:
    """Writes one shard to `sink`; use it as a context manager, or call `close`.

    Args:
        sink: receives the file's bytes in order.
        schema: from `schema.shard_schema`.
    """

    def __init__(self, sink: Sink, schema: pa.Schema) -> None:
        self._schema = schema
        self._file = pa.ipc.new_file(pa.PythonFile(_SinkFile(sink), mode="w"), schema)
        self._blobs = {field.name: _BlobColumn() for field in schema if is_blob(field.type)}
        self._values: dict[str, list[Any]] = {name: [] for name in schema.names if name not in self._blobs}
        self._batch_samples = 0
        self._statistics = ShardStatistics(0)

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add a sample.

        Args:
            sample: one value for every column; blobs as bytes or memoryview, copied before this returns.

        Raises:
            ConfigError: columns are missing or unknown.
        """
        if sample.keys() != set(self._schema.names):
            raise ConfigError(f"sample has the columns {sorted(sample)}; expected {sorted(self._schema.names)}")
        for name, column in self._blobs.items():
            column.append(sample[name])
        for name, values in self._values.items():
            values.append(sample[name])
        self._batch_samples += 1
        if self._is_batch_full():
            self._flush()

    def close(self) -> ShardStatistics:
        """Write what is left and the file's footer; returns the shard's statistics."""
        self._flush()
        self._file.close()
        return self._statistics

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
        return self._statistics

    def _is_batch_full(self) -> bool:
        blob_bytes = sum(column.size_bytes for column in self._blobs.values())
        return blob_bytes >= BATCH_BYTES or self._batch_samples >= _BATCH_SAMPLES

    def _flush(self) -> None:
        if not self._batch_samples:
            return
        sample_bytes = sum(column.sizes for column in self._blobs.values())
        batch = pa.RecordBatch.from_arrays([self._take(field) for field in self._schema], schema=self._schema)
        self._file.write_batch(batch)
        so_far = self._statistics
        self._statistics = ShardStatistics(
            so_far.num_samples + batch.num_rows,
            max(so_far.max_width, _largest(batch, WIDTH)),
            max(so_far.max_height, _largest(batch, HEIGHT)),
            max(so_far.max_sample_bytes, int(np.max(sample_bytes))),
        )
        self._batch_samples = 0

    def _take(self, field: pa.Field) -> pa.Array:
        if field.name in self._blobs:
            return self._blobs[field.name].take(field.type)
        values, self._values[field.name] = self._values[field.name], []
        try:
            return pa.array(values, field.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise ConfigError(f"column {field.name!r} does not hold {field.type} throughout: {error}") from error


def _largest(batch: pa.RecordBatch, column: str) -> int:
    return int(batch.column(column).to_numpy().max()) if column in batch.schema.names else 0


class _SinkFile:
    """What pyarrow asks of a Python file, over a sink."""

    closed = False

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, content: Any) -> int:
        return self._sink.write(memoryview(content))

    def flush(self) -> None:
        """Arrow asks; the sink's owner syncs."""

    def close(self) -> None:
        self.closed = True
