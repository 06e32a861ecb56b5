"""Scans of a split's live (not deleted) samples as an Arrow data set for DuckDB.

`query` registers one data set per split. Only the bytes of the columns that a query uses are read.

Arrow's own scanner threads are not used. They read ahead and survive a scan that ends early, for instance by LIMIT.
If they then call Python while the interpreter exits, the process aborts or hangs. Here, all reads run in the thread
that requests the next batch, or in threads that end with the scan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as arrow_dataset
from pyarrow import acero

from datasvc.errors import CorruptDataError
from datasvc.printable import count_text
from datasvc.repository import Digest
from datasvc.shards.format.ipc_reader import IpcReader, ObjectFiles
from datasvc.shards.format.overlays import ShardOverlay
from datasvc.shards.format.schema import KEY, LABEL, is_blob
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.deletions import Flags
from datasvc.shards.versions.labels import CLASS, class_of_labels, with_class

_MAX_SHARDS_AHEAD: Final = 4
_MAX_BYTES_AHEAD: Final = 16 << 20  # of each of these shards

ShardScan = Iterator[list[pa.RecordBatch]]
"""The live samples of one shard, as lists of record batches; for use by one thread at a time."""


class LiveSamples(arrow_dataset.InMemoryDataset):  # type: ignore[misc]
    """The live samples of a split; columns that a shard does not have are null.

    Arrow's own data sets do not support deletions, so this class replaces `scanner`, through which DuckDB reads.
    """

    @classmethod
    def of(
        cls,
        split: Split,
        files: ObjectFiles,
        *,
        shards: Sequence[int] | None = None,
        number_column: str | None = None,
        sizes: bool = False,
    ) -> Self:
        """Return the live samples of a split, whose shards `files` opens.

        Args:
            split: the split.
            files: files of its shards.
            shards: numbers of the shards to read, in this order; None for all.
            number_column: name of a further column: the number of each sample, as in `split[number]`.
            sizes: have the sizes of blobs, int64, in place of the blobs. From local shards, no blob is read for it.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: the table or the deletions cannot be read.
        """
        stored = pa.schema([_sql_field(field, sizes=sizes) for field in split.table.sample_schema])
        schema = with_class(stored, split.classes)
        derived = schema.names[len(stored.names) :]
        if number_column is not None:
            schema = schema.append(pa.field(number_column, pa.int64()))
        # The base class gives DuckDB the schema only; `scanner` gives the samples.
        samples = cls(schema.empty_table())
        samples._chosen = range(split.table.num_shards) if shards is None else shards
        samples._number_column = number_column
        samples._derived = frozenset([*derived, number_column])
        samples._classes = split.classes
        samples._class_names = list[pa.Array]()  # made when it is used: there may be a million
        # Number of the first live sample of each shard.
        samples._starts = [0, *split.table.samples_per_shard.cumsum().tolist()]
        samples._name = f"{split.dataset}/{split.name}"
        samples._files = files
        samples._stored_schema = split.table.sample_schema
        samples._shards = [info.digest for info in split.table.shards()]
        samples._num_stored = split.table.stored_per_shard.tolist()  # by shard number, deleted samples included
        samples._has_deletions = (split.table.deleted_per_shard > 0).tolist()
        samples._deletions = split.deletions
        samples._overlay = partial(split.table.overlay, split.repository.objects)
        samples._scans = []
        return samples

    def scanner(
        self,
        columns: Sequence[str] | None = None,
        filter: arrow_dataset.Expression | None = None,  # noqa: A002 - the name in Arrow's interface
        **_options: Any,
    ) -> _Scanner:
        """Return a scanner for one scan, in table order, of the samples that satisfy `filter`; None for all."""
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
        """Yield `columns` of the live samples that satisfy `condition`, in table order."""
        needed = [name for name in self.schema.names if name in columns or _uses(condition, name, self.schema)]
        needed = needed or [KEY]  # a record batch without columns would have 0 samples
        for batch in self._read_shards(pa.schema([self.schema.field(name) for name in needed])):
            selected = [batch] if condition is None else _filtered(batch, condition)
            for part in selected:
                yield part.select(columns)

    def _read_shards(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the live samples of the shards in order, while the next shards are read in the background."""
        scans = (self._read_shard(number, schema) for number in self._chosen)
        pending: deque[tuple[ShardScan, Future[list[pa.RecordBatch] | None]]] = deque()
        pool = ThreadPoolExecutor(_MAX_SHARDS_AHEAD, thread_name_prefix="datasvc-scan")
        try:
            while True:
                # In the background, `next` reads a list of batches of a shard; it returns None at the shard's end.
                for scan in islice(scans, _MAX_SHARDS_AHEAD - len(pending)):
                    pending.append((scan, pool.submit(next, scan, None)))
                if not pending:
                    return
                scan, next_batches = pending.popleft()
                batches = next_batches.result()
                if batches is not None:
                    # Its next batches stay first in the queue, because samples are returned in table order.
                    pending.appendleft((scan, pool.submit(next, scan, None)))
                    yield from batches
        finally:
            pool.shutdown(cancel_futures=True)

    def _read_shard(self, number: int, schema: pa.Schema) -> ShardScan:
        deleted = partial(self._deletions.flags, number) if self._has_deletions[number] else None
        digest, num_samples = self._shards[number], self._num_stored[number]
        names = {name for name in schema.names if name not in self._derived}
        if derived := self._derived & set(schema.names):
            # A column is needed to count the samples, and the label for the class.
            names |= {LABEL} if CLASS in derived else set() if names else {KEY}
        stored = pa.schema([field for field in self.schema if field.name in names])
        parts = _read_live(
            self._files,
            digest,
            deleted,
            stored,
            partial(self._overlay, number),
            num_samples=num_samples,
            where=self._name,
            split=self._stored_schema,
        )
        return self._derive(parts, self._starts[number], schema) if derived else parts

    def _derive(self, parts: ShardScan, first: int, schema: pa.Schema) -> ShardScan:
        """Yield the live samples of one shard with the columns of `schema`; sample numbers count from `first`."""
        if CLASS in schema.names and CLASS in self._derived and not self._class_names:
            self._class_names.append(pa.array(self._classes, pa.string()))

        def column(batch: pa.RecordBatch, name: str) -> pa.Array:
            if name not in self._derived:
                return batch.column(name)
            if name == self._number_column:
                return pa.array(np.arange(first, first + batch.num_rows))
            return class_of_labels(batch.column(LABEL), self._class_names[0])

        for part in parts:
            derived = []
            for batch in part:
                derived.append(pa.record_batch([column(batch, name) for name in schema.names], schema))
                first += batch.num_rows
            yield derived


class _Scanner:
    """The part of Arrow's scanner interface that DuckDB calls."""

    def __init__(self, reader: pa.RecordBatchReader) -> None:
        self._reader = reader

    def to_reader(self) -> pa.RecordBatchReader:
        """Return a reader of the samples' record batches."""
        return self._reader


def _read_live(
    files: ObjectFiles,
    digest: Digest,
    deleted: Callable[[], Flags] | None,
    schema: pa.Schema,
    read_overlay: Callable[[], ShardOverlay | None],
    *,
    num_samples: int,
    where: str,
    split: pa.Schema,
) -> ShardScan:
    """Yield the live samples of a shard, with the columns of `schema`, in parts of about `_MAX_BYTES_AHEAD` bytes."""
    part: list[pa.RecordBatch] = []
    size_bytes = start = 0
    # Made only now: the flags take a byte per sample, eight times the memory of the stored bitmap.
    is_live = None if deleted is None else ~deleted()
    overlay = read_overlay()
    names = schema.names if overlay is None else overlay.needed_names(schema.names)
    for stored in _read_stored(files, digest, names, num_samples, where):
        num_rows, shown = stored.num_rows, stored
        if overlay is not None:
            fields = [each for each in overlay.fields(stored.schema, split) if each.name in schema.names]
            # Without any of the columns, there are the keys, to count the samples.
            shown = overlay.apply(stored, np.arange(start, start + num_rows), fields) if fields else stored
        batch = pa.record_batch([_column(shown, field) for field in schema], schema)
        if is_live is not None:
            batch = batch.filter(pa.array(is_live[start : start + batch.num_rows]))
        start += num_rows
        part.append(batch)
        size_bytes += batch.nbytes
        if size_bytes >= _MAX_BYTES_AHEAD:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def _read_stored(
    files: ObjectFiles, digest: Digest, names: Sequence[str], num_samples: int, where: str
) -> Iterator[pa.RecordBatch]:
    """Yield a shard's record batches with its columns of these names. Raise what `ObjectFiles.open` raises."""
    with files.open(digest) as file:
        try:
            # If the shard has none of the columns, read the keys, in order to count the samples.
            reader = IpcReader(file, f"a shard of {where}", names, otherwise=KEY, compressed=True)
            num_read = 0
            for batch in reader.batches():
                num_read += batch.num_rows
                _check_count(num_read, num_samples, is_end=False)
                yield batch
            _check_count(num_read, num_samples, is_end=True)
        except CorruptDataError as error:
            files.failure = CorruptDataError(
                f"a shard of {where} is corrupt ({error}): run `datasvc verify --deep` to find the affected samples"
            )
            raise files.failure from error


def _check_count(num_read: int, num_samples: int, *, is_end: bool) -> None:
    if num_read > num_samples or (is_end and num_read != num_samples):
        raise CorruptDataError(
            f"it holds {count_text(num_read, 'sample')} or more, the shard table lists {num_samples}"
        )


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    """Return a column with the type of `field`, sizes of blobs if it is int64; nulls if the shard lacks it."""
    if field.name not in batch.schema.names:
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(field.name)
    if is_blob(column.type) and pa.types.is_int64(field.type):
        column = pc.binary_length(column)
    return column.cast(field.type)


class ScannerProbe(arrow_dataset.InMemoryDataset):  # type: ignore[misc]
    """A data set that has one sample if it is read through `scanner`, and none if it is read in another way."""

    def scanner(self, **_options: Any) -> _Scanner:
        """Return a scanner of one sample."""
        return _Scanner(pa.table({KEY: [""]}).to_reader())


def _filtered(batch: pa.RecordBatch, condition: arrow_dataset.Expression) -> list[pa.RecordBatch]:
    """Return the samples of a batch that satisfy `condition`."""
    # `RecordBatch.filter` is not used, because it runs in Arrow's threads.
    plan = acero.Declaration.from_sequence(
        [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(pa.Table.from_batches([batch]))),
            acero.Declaration("filter", acero.FilterNodeOptions(condition)),
        ]
    )
    selected: list[pa.RecordBatch] = plan.to_table(use_threads=False).to_batches()
    return selected


def _uses(expression: arrow_dataset.Expression | None, column: str, schema: pa.Schema) -> bool:
    """Return whether an expression refers to a column."""
    if expression is None:
        return False
    # Arrow does not list the columns of an expression. But it rejects the expression if the schema lacks one of them.
    others = pa.schema([field for field in schema if field.name != column])
    try:
        arrow_dataset.dataset(others.empty_table()).scanner(filter=expression)
    except pa.ArrowInvalid:
        return True
    return False


def _sql_field(field: pa.Field, *, sizes: bool) -> pa.Field:
    """Return the field with a type that DuckDB supports: it has no half floats and no 256-bit decimals."""
    data_type = pa.int64() if sizes and is_blob(field.type) else field.type
    if pa.types.is_float16(data_type):
        data_type = pa.float32()
    elif pa.types.is_decimal256(data_type):
        data_type = pa.string()
    return pa.field(field.name, data_type)
