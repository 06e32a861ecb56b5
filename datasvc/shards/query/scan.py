"""The live samples of a split as an Arrow data set; a scan reads the columns it asks for and no other byte.

No thread of Arrow's reads here. Its own scanners read ahead in threads that outlive a scan that is ended early, such
as by LIMIT, and that call into Python while the interpreter ends: the process aborts, or never ends. Every read is
made by the thread that asks for the next batch, or by threads of the scan that end with it.
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

_SHARDS_AHEAD: Final = 4
_BYTES_AHEAD: Final = 16 << 20  # of each of these shards


class LiveSamples(arrow_dataset.InMemoryDataset):  # type: ignore[misc]
    """The samples of a split that are not deleted; columns that a shard lacks are null.

    Arrow's own data sets do not support deletions, so this one replaces `scanner`, through which DuckDB reads.
    """

    @classmethod
    def of(cls, split: Split, files: ObjectFiles) -> Self:
        """Return the samples of a split.

        Args:
            split: of any repository.
            files: the objects of that repository, with the sizes of the split's shards.

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
        filter: arrow_dataset.Expression | None = None,  # noqa: A002 - Arrow's name of it
        **_options: Any,
    ) -> _Scanner:
        """Return a scanner that is good for one scan, in the order of the table.

        Args:
            columns: names of columns; None for all.
            filter: which samples; None for all.
        """
        schema = pa.schema([self.schema.field(name) for name in (self.schema.names if columns is None else columns)])
        batches = self._batches(schema.names, filter)
        self._scans.append(batches)
        return _Scanner(pa.RecordBatchReader.from_batches(schema, batches))

    def close(self) -> None:
        """End every scan that was not read to its end: nothing reads any more when this returns."""
        for scan in self._scans:
            scan.close()
        self._scans.clear()

    def _batches(self, wanted: list[str], condition: arrow_dataset.Expression | None) -> Iterator[pa.RecordBatch]:
        used = [name for name in self.schema.names if name in wanted or _uses(condition, name, self.schema)]
        used = used or [KEY]  # a batch without columns would have no samples either
        for batch in self._stored(pa.schema([self.schema.field(name) for name in used])):
            for met in [batch] if condition is None else _filtered(batch, condition):
                yield met.select(wanted)

    def _stored(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the live samples of all shards, some of the next ones read ahead."""
        unread = (
            _ShardScan(self._files, digest, self._flags_of(number), schema, where=self._name)
            for number, digest in enumerate(self._shards)
        )
        ahead: deque[tuple[_ShardScan, Future[list[pa.RecordBatch]]]] = deque()
        pool = ThreadPoolExecutor(_SHARDS_AHEAD, thread_name_prefix="datasvc-scan")
        try:
            while True:
                while len(ahead) < _SHARDS_AHEAD and (shard := next(unread, None)) is not None:
                    ahead.append((shard, pool.submit(shard.read)))
                if not ahead:
                    return
                shard, reading = ahead.popleft()
                batches = reading.result()
                if not shard.is_read:
                    ahead.appendleft((shard, pool.submit(shard.read)))
                yield from batches
        finally:
            pool.shutdown(cancel_futures=True)

    def _flags_of(self, number: int) -> Callable[[], Flags] | None:
        return partial(self._deletions.flags, number) if self._has_deletions[number] else None


class _Scanner:
    """What DuckDB asks of an Arrow scanner."""

    def __init__(self, reader: pa.RecordBatchReader) -> None:
        self._reader = reader

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the samples, batch by batch."""
        return self._reader


class _ShardScan:
    """Reads the live samples of one shard, part by part; by one thread at a time.

    Args:
        files: the objects of the repository.
        digest: of the shard.
        deleted: gives `bool[samples]`, which samples do not count; None: all count.
        schema: the columns to read.
        where: the split, for messages.

    Attributes:
        is_read: nothing is left.
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
        """Return the next batches, of about `_BYTES_AHEAD`. Raises as `ObjectFiles.open`."""
        batches, size_bytes = [], 0
        for batch in self._batches:
            batches.append(batch)
            size_bytes += batch.nbytes
            if size_bytes >= _BYTES_AHEAD:
                return batches
        self.is_read = True
        return batches

    def _live(self) -> Iterator[pa.RecordBatch]:
        start = 0
        # Flags are a byte a sample, eight times the stored bitmap: only the shards that are being read have any.
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
                fields = [place for place, name in enumerate(names) if name in self._schema.names]
                # A shard that lacks every column of the scan still counts its samples, and all have keys.
                fields = fields or [names.index(KEY)]
                options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
                reader = pa.ipc.open_file(file, options=options)
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    batch.validate(full=True)  # whoever followed a damaged offset would crash
                    yield batch
            except pa.ArrowInvalid as error:
                self._files.failure = CorruptDataError(
                    f"a shard of {self._where} is corrupt ({error}): `datasvc verify --deep` names the samples hit"
                )
                raise self._files.failure from error


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field.name not in batch.schema.names:
        return pa.nulls(batch.num_rows, field.type)
    return batch.column(field.name).cast(field.type)


class _ScannerProbe(arrow_dataset.InMemoryDataset):  # type: ignore[misc]
    """Has no sample, but one for whoever reads through `scanner`."""

    def scanner(self, **_options: Any) -> _Scanner:
        return _Scanner(pa.table({KEY: [""]}).to_reader())


def probe() -> arrow_dataset.Dataset:
    """Return a data set with one sample for readers that respect `LiveSamples.scanner`, and none for others."""
    return _ScannerProbe(pa.table({KEY: pa.array([], pa.string())}))


def _filtered(batch: pa.RecordBatch, condition: arrow_dataset.Expression) -> list[pa.RecordBatch]:
    plan = acero.Declaration.from_sequence(
        [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(pa.Table.from_batches([batch]))),
            acero.Declaration("filter", acero.FilterNodeOptions(condition)),
        ]
    )
    met: list[pa.RecordBatch] = plan.to_table(use_threads=False).to_batches()
    return met


def _uses(expression: arrow_dataset.Expression | None, column: str, schema: pa.Schema) -> bool:
    """Return whether an expression refers to a column: whether it cannot be evaluated without."""
    if expression is None:
        return False
    others = pa.schema([field for field in schema if field.name != column])
    try:
        arrow_dataset.dataset(others.empty_table()).scanner(filter=expression)
    except pa.ArrowInvalid:
        return True
    return False


def _sql_field(field: pa.Field) -> pa.Field:
    """Return the field as DuckDB can have it: it lacks half floats and the widest decimals."""
    data_type = field.type
    if pa.types.is_float16(data_type):
        data_type = pa.float32()
    elif pa.types.is_decimal256(data_type):
        data_type = pa.string()
    return pa.field(field.name, data_type)
