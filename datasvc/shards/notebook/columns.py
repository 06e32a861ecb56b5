"""Columns of the live samples of a split as an Arrow table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from datasvc.errors import NotFoundError
from datasvc.keyed_random import Integers
from datasvc.shards.format.reader import Shard, text_errors
from datasvc.shards.format.schema import is_blob


def choose_columns(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the schema of the chosen columns, in that order; by default all but blobs.

    Raises:
        NotFoundError: there is no such column.
    """
    if columns is None:
        return pa.schema([field for field in schema if not is_blob(field.type)])
    if unknown := [name for name in columns if name not in schema.names]:
        raise NotFoundError(f"there is no column {unknown[0]!r}; the columns are: {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in columns])


def read_columns(shards: Iterable[tuple[Shard, Integers]], schema: pa.Schema) -> pa.Table:
    """Return columns of samples as copies.

    Args:
        shards: shards, each with `int64[n]`, the rows of its samples.
        schema: the columns; one that a shard does not have is null there.

    Raises:
        CorruptDataError: a text is not UTF-8.
    """
    tables = [_read(shard, rows, schema) for shard, rows in shards]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _read(shard: Shard, rows: Integers, schema: pa.Schema) -> pa.Table:
    with text_errors(shard.name):
        shard.check_texts()
        columns = [
            shard.column(field.name).take(pa.array(rows)).cast(field.type)
            if field.name in shard.schema.names
            else pa.nulls(len(rows), field.type)
            for field in schema
        ]
    # Nulls of a column that some shards lack: its field says that it has none.
    return pa.table(columns, schema=pa.schema([field.with_nullable(True) for field in schema]))
