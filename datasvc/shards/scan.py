"""The live samples of a split as an Arrow data set; a scan reads the columns it asks for and no other byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Self

import pyarrow as pa
import pyarrow.dataset as arrow_dataset
import pyarrow.fs as arrow_fs

from datasvc.errors import CorruptDataError
from datasvc.shards.dataset import Split
from datasvc.shards.object_files import ObjectFiles
from datasvc.shards.schema import KEY

_FORMAT = arrow_dataset.IpcFileFormat()


class LiveSamples(arrow_dataset.FileSystemDataset):  # type: ignore[misc]
    """The samples of a split that are not deleted; columns that a shard lacks are null.

    Arrow's own data sets know neither deletions, nor how to read only some columns where a filter uses some of the
    same: it counts those twice, and where that makes as many as a shard has, it reads them all. So this one replaces
    `scanner`, through which DuckDB reads.
    """

    @classmethod
    def of(cls, split: Split, files: ObjectFiles) -> Self:
        """Return the samples of a split.

        Args:
            split: of any repository.
            files: the objects of that repository; knows the sizes of the split's shards.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: the table or the deletions cannot be read.
        """
        schema = pa.schema([_sql_field(field) for field in split.table.sample_schema])
        file_system = arrow_fs.PyFileSystem(files)
        fragments = [_FORMAT.make_fragment(shard.digest, file_system) for shard in split.table.shards()]
        samples = cls(fragments, schema, _FORMAT, file_system)
        samples._name = f"{split.dataset}/{split.name}"
        samples._files = files
        samples._fragments = fragments
        samples._deletions = split.deletions
        samples._has_deletions = (split.table.deleted_per_shard > 0).tolist()
        return samples

    def scanner(
        self,
        columns: Sequence[str] | None = None,
        filter: arrow_dataset.Expression | None = None,  # noqa: A002 - Arrow's name of it
        **_options: Any,
    ) -> arrow_dataset.Scanner:
        """Return a scanner that is good for one scan, in the order of the table.

        Args:
            columns: names of columns; None for all.
            filter: which samples; None for all.
        """
        wanted = self.schema.names if columns is None else list(columns)
        used = [name for name in self.schema.names if name in wanted or _uses(filter, name, self.schema)]
        schema = pa.schema([self.schema.field(name) for name in used])
        return arrow_dataset.Scanner.from_batches(self._batches(used), schema=schema, columns=wanted, filter=filter)

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        # Shards without deletions go to Arrow together, so that it reads ahead from one to the next.
        for has_deletions, group in groupby(range(len(self._fragments)), self._has_deletions.__getitem__):
            if not has_deletions:
                yield from self._stored(list(group), columns)
                continue
            for number in group:
                yield from self._live(number, columns)

    def _live(self, number: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        is_live = ~self._deletions.flags(number)
        start = 0
        for batch in self._stored([number], columns):
            within = is_live[start : start + batch.num_rows]
            start += batch.num_rows
            yield batch if within.all() else batch.filter(pa.array(within))

    def _stored(self, numbers: list[int], columns: list[str]) -> Iterator[pa.RecordBatch]:
        fragments = [self._fragments[number] for number in numbers]
        stored = arrow_dataset.FileSystemDataset(fragments, self.schema, _FORMAT)
        for batch in stored.to_batches(columns=columns):
            try:
                batch.validate(full=True)  # whoever followed a damaged offset would crash
            except pa.ArrowInvalid as error:
                self._files.failure = CorruptDataError(
                    f"a shard of {self._name} is corrupt ({error}): `datasvc verify --deep` names the samples hit"
                )
                raise self._files.failure from error
            yield batch


class _Probe(arrow_dataset.InMemoryDataset):  # type: ignore[misc]
    """Has no sample, but one for whoever reads through `scanner`."""

    def scanner(self, **_options: Any) -> arrow_dataset.Scanner:
        return arrow_dataset.Scanner.from_batches(pa.table({KEY: [""]}).to_batches(), schema=self.schema)


def probe() -> arrow_dataset.Dataset:
    """Return a data set with one sample for readers that respect `LiveSamples.scanner`, and none for others."""
    return _Probe(pa.table({KEY: pa.array([], pa.string())}))


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
