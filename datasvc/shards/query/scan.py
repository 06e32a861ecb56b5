"""Scans of a split's live samples as an Arrow data set; a scan reads only the bytes of the columns in use.

Arrow's own scanner threads are not used. They read ahead and survive a scan that ends early, for instance by LIMIT;
if they then call Python while the interpreter exits, the process aborts or hangs. Here, all reads run in the thread
that requests the next batch, or in threads that end with the scan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.dataset as arrow_dataset
from pyarrow import acero

from datasvc.errors import CorruptDataError
from datasvc.repository import Digest
from datasvc.shards.format.object_files import ObjectFiles
from datasvc.shards.format.schema import KEY
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.deletions import Flags

_MAX_SHARDS_AHEAD: Final = 4
_MAX_BYTES_AHEAD: Final = 16 << 20  # per shard


class LiveSamples(arrow_dataset.InMemoryDataset):  # type: ignore[misc]
    """The live samples of a split; columns that a shard does not have are null.

    Arrow's own data sets do not support deletions, so this class replaces `scanner`, through which DuckDB reads.
    """

    @classmethod
    def of(cls, split: Split, files: ObjectFiles) -> Self:
        """Return the samples of a split.

        Args:
            split: the split.
            files: objects of the split's repository, with the sizes of the split's shards.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: the table or the deletions cannot be read.
        """
        schema = pa.schema([_sql_field(field) for field in split.table.sample_schema])
        samples = cls(schema.empty_table())
        samples._name = f"{split.dataset}/{split.name}"
        samples._files = files
        samples._shards = [info.digest for info in split.table.shards()]
        samples._has_deletions = (split.table.deleted_per_shard > 0).tolist()
        samples._deletions = split.deletions
        samples._scans = []
        return samples

    def scanner(
        self,
        columns: Sequence[str] | None = None,
        filter: arrow_dataset.Expression | None = None,  # noqa: A002 - the name in Arrow's interface
        **_options: Any,
    ) -> _Scanner:
        """Return a scanner for one scan, in table order.

        Args:
            columns: names of columns; None for all.
            filter: condition that samples must satisfy; None for all samples.
        """
        schema = pa.schema([self.schema.field(name) for name in (self.schema.names if columns is None else columns)])
        batches = self._batches(schema.names, filter)
        self._scans.append(batches)
        return _Scanner(pa.RecordBatchReader.from_batches(schema, batches))

    def close(self) -> None:
        """End all scans that are not finished. No thread reads any more when this returns."""
        for scan in self._scans:
            scan.close()
        self._scans.clear()

    def _batches(self, columns: list[str], condition: arrow_dataset.Expression | None) -> Iterator[pa.RecordBatch]:
        used = [name for name in self.schema.names if name in columns or _uses(condition, name, self.schema)]
        used = used or [KEY]  # a batch without columns would have no samples either
        for batch in self._stored(pa.schema([self.schema.field(name) for name in used])):
            for selected in [batch] if condition is None else _filtered(batch, condition):
                yield selected.select(columns)

    def _stored(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the live samples of all shards in order, while the next shards are read in the background."""
        unread = (
            _ShardScan(self._files, digest, self._flags_of(number), schema, where=self._name)
            for number, digest in enumerate(self._shards)
        )
        pending: deque[tuple[_ShardScan, Future[list[pa.RecordBatch]]]] = deque()
        pool = ThreadPoolExecutor(_MAX_SHARDS_AHEAD, thread_name_prefix="datasvc-scan")
        try:
            while True:
                while len(pending) < _MAX_SHARDS_AHEAD and (shard := next(unread, None)) is not None:
                    pending.append((shard, pool.submit(shard.read)))
                if not pending:
                    return
                shard, reading = pending.popleft()
                batches = reading.result()
                if not shard.is_read:
                    pending.appendleft((shard, pool.submit(shard.read)))
                yield from batches
        finally:
            pool.shutdown(cancel_futures=True)

    def _flags_of(self, number: int) -> Callable[[], Flags] | None:
        return partial(self._deletions.flags, number) if self._has_deletions[number] else None


class _Scanner:
    """The part of Arrow's scanner interface that DuckDB calls."""

    def __init__(self, reader: pa.RecordBatchReader) -> None:
        self._reader = reader

    def to_reader(self) -> pa.RecordBatchReader:
        """Return a reader of the samples' record batches."""
        return self._reader


class _ShardScan:
    """Reads the live samples of one shard in parts; for use by one thread at a time.

    Args:
        files: objects of the repository.
        digest: digest of the shard.
        deleted: returns `bool[samples]`, True for deleted samples; None for a shard without deletions.
        schema: the columns to read.
        where: version and split, for messages.

    Attributes:
        is_read: whether all samples were returned.
    """

    def __init__(
        self,
        files: ObjectFiles,
        digest: Digest,
        deleted: Callable[[], Flags] | None,
        schema: pa.Schema,
        *,
        where: str,
    ) -> None:
        self.is_read = False
        self._files = files
        self._digest = digest
        self._deleted = deleted
        self._schema = schema
        self._where = where
        self._batches = self._live()

    def read(self) -> list[pa.RecordBatch]:
        """Return the next batches, about `_MAX_BYTES_AHEAD`. Raise as `ObjectFiles.open`."""
        batches, size_bytes = [], 0
        for batch in self._batches:
            batches.append(batch)
            size_bytes += batch.nbytes
            if size_bytes >= _MAX_BYTES_AHEAD:
                return batches
        self.is_read = True
        return batches

    def _live(self) -> Iterator[pa.RecordBatch]:
        start = 0
        # Flags take a byte per sample, eight times the bitmap: they exist only for shards that are being read.
        is_live = None if self._deleted is None else ~self._deleted()
        for stored in self._stored():
            batch = pa.record_batch([_column(stored, field) for field in self._schema], self._schema)
            if is_live is not None:
                batch = batch.filter(pa.array(is_live[start : start + batch.num_rows]))
            start += stored.num_rows
            yield batch

    def _stored(self) -> Iterator[pa.RecordBatch]:
        with self._files.open(self._digest) as file:
            try:
                names = pa.ipc.open_file(file).schema.names
                fields = [position for position, name in enumerate(names) if name in self._schema.names]
                # The keys are read if the shard has no column of the scan: its samples must still be counted.
                fields = fields or [names.index(KEY)]
                options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
                reader = pa.ipc.open_file(file, options=options)
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    batch.validate(full=True)  # a corrupt offset that is used without a check crashes the process
                    yield batch
            except pa.ArrowInvalid as error:
                self._files.failure = CorruptDataError(
                    f"a shard of {self._where} is corrupt ({error}): run `datasvc verify --deep` to find the "
                    "affected samples"
                )
                raise self._files.failure from error


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field.name not in batch.schema.names:
        return pa.nulls(batch.num_rows, field.type)
    return batch.column(field.name).cast(field.type)


class _ScannerProbe(arrow_dataset.InMemoryDataset):  # type: ignore[misc]
    """A data set with one sample if it is read through `scanner`, and none otherwise."""

    def scanner(self, **_options: Any) -> _Scanner:
        return _Scanner(pa.table({KEY: [""]}).to_reader())


def probe() -> arrow_dataset.Dataset:
    """Return a data set with one sample for readers that use its `scanner`, and none for others."""
    return _ScannerProbe(pa.table({KEY: pa.array([], pa.string())}))


def _filtered(batch: pa.RecordBatch, condition: arrow_dataset.Expression) -> list[pa.RecordBatch]:
    plan = acero.Declaration.from_sequence(
        [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(pa.Table.from_batches([batch]))),
            acero.Declaration("filter", acero.FilterNodeOptions(condition)),
        ]
    )
    selected: list[pa.RecordBatch] = plan.to_table(use_threads=False).to_batches()
    return selected


def _uses(expression: arrow_dataset.Expression | None, column: str, schema: pa.Schema) -> bool:
    """Return whether an expression refers to a column, which means that it cannot be evaluated without the column."""
    if expression is None:
        return False
    others = pa.schema([field for field in schema if field.name != column])
    try:
        arrow_dataset.dataset(others.empty_table()).scanner(filter=expression)
    except pa.ArrowInvalid:
        return True
    return False


def _sql_field(field: pa.Field) -> pa.Field:
    """Return the field with a type that DuckDB supports: it has no half floats and no 256-bit decimals."""
    data_type = field.type
    if pa.types.is_float16(data_type):
        data_type = pa.float32()
    elif pa.types.is_decimal256(data_type):
        data_type = pa.string()
    return pa.field(field.name, data_type)
