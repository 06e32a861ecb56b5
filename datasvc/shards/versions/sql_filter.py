"""SQL conditions of `delete --where`: select the samples of a split that satisfy a boolean expression.

DuckDB evaluates an expression on one shard at a time. The expression has no access to files or other tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.repository import Objects
from datasvc.shards.format.reader import Shard, open_shard
from datasvc.shards.format.schema import LABEL, is_blob
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.keys import SplitKeys
from datasvc.shards.versions.labels import CLASS, class_of_labels, with_class
from datasvc.sql_sandbox import connect, fetch, lock


class Condition:
    """A boolean SQL expression over the columns of a split, such as `label = 3 and width < 100`.

    The expression is first tried without the blob columns, so that a selection by label copies no images. Only an
    expression that needs a blob, such as `octet_length(image) > 1000000`, is evaluated on all columns.

    Args:
        expression: SQL over the column names; a sample for which it is null is not selected.
        schema: the columns of the split.
        classes: its class names, which the column `class` has.

    Raises:
        ConfigError: the expression does not parse, uses a column that does not exist, or is not boolean.
    """

    def __init__(self, expression: str, schema: pa.Schema, classes: Sequence[str] = ()) -> None:
        stored = schema.names
        schema = with_class(schema, classes)
        self._classes = pa.array(classes, pa.string()) if len(schema.names) > len(stored) else None
        self._expression = expression
        # A new line before the bracket, because the expression may end in a comment.
        self._filter = f"({expression}\n)"
        self._columns = schema.names
        if len({name.lower() for name in schema.names}) != len(schema.names):
            raise ConfigError(
                f"column names differ in case only, and SQL ignores case: {schema.names}; select the samples by keys"
            )
        self._connection = connect()
        lock(self._connection)
        without_blobs = pa.schema([field for field in schema if not is_blob(field.type)])
        needs_blobs = not self._runs_on(without_blobs) and self._runs_on(schema)
        # If the expression is valid for neither schema, `project` below raises the error.
        self._schema = schema if needs_blobs else without_blobs
        with self._map_errors():
            types = self._connection.from_arrow(self._schema.empty_table()).project(self._filter).types
        if [str(column_type) for column_type in types] != ["BOOLEAN"]:
            actual = ", ".join(map(str, types))
            raise ConfigError(
                f"the condition {expression!r} has the type {actual}, expected BOOLEAN: use a comparison, such as "
                "label = 3"
            )

    def find(self, objects: Objects, table: ShardTable) -> Iterator[tuple[int, Integers]]:
        """Yield (shard number, ascending rows) of the live (not deleted) samples that satisfy the condition.

        Raises:
            ConfigError: the evaluation fails for a sample, for instance a cast of text that is not a number.
            CorruptDataError, NotFoundError, UnavailableError: a shard cannot be read.
        """
        live = SplitKeys(objects, table)
        for shard in range(table.num_shards):
            rows = live.live_rows(shard)
            opened = table.check_shard(shard, open_shard(objects, table.shard(shard)))
            opened.check_texts()  # DuckDB expects UTF-8
            samples = self._samples(opened)
            # Without deletions in the shard, no copy of its live samples is needed.
            selected = self._evaluate(samples if len(rows) == samples.num_rows else samples.take(pa.array(rows)))
            if len(selected):
                yield shard, rows[selected]

    def _evaluate(self, samples: pa.Table) -> Integers:
        """Return the positions of the samples that satisfy the condition: `int64[n]`, ascending."""
        column = _unused_column_name(samples.schema)
        numbered = samples.append_column(column, pa.array(np.arange(samples.num_rows)))
        relation = self._connection.from_arrow(numbered)
        with self._map_errors():
            selected = fetch(
                self._connection, lambda: relation.filter(self._filter).project(f'"{column}"').fetchnumpy()
            )
        # DuckDB evaluates in parallel and does not guarantee an order of rows.
        return np.sort(np.asarray(selected[column], np.int64))

    def _samples(self, shard: Shard) -> pa.Table:
        """Return all stored samples of a shard, with null in columns that were added to the split after the shard."""

        def column(name: str, data_type: pa.DataType) -> pa.ChunkedArray | pa.Array:
            if name == CLASS and self._classes is not None:
                return class_of_labels(column(LABEL, pa.int32()), self._classes)
            return shard.column(name) if name in shard.schema.names else pa.nulls(shard.num_samples, data_type)

        columns = [column(field.name, field.type) for field in self._schema]
        return pa.table(columns, schema=pa.schema([field.with_nullable(True) for field in self._schema]))

    def _runs_on(self, schema: pa.Schema) -> bool:
        """Return whether the expression is valid for a table with these columns."""
        import duckdb

        try:
            self._connection.from_arrow(schema.empty_table()).filter(self._filter)
        except duckdb.Error:
            return False
        return True

    @contextmanager
    def _map_errors(self) -> Iterator[None]:
        import duckdb

        try:
            yield
        except duckdb.Error as error:
            reason, columns = str(error).partition("\n")[0], ", ".join(self._columns)
            raise ConfigError(
                f"the condition {self._expression!r} cannot be evaluated: {reason}; the columns are {columns}"
            ) from error


def _unused_column_name(schema: pa.Schema) -> str:
    name = "datasvc_row"
    while name in schema.names:
        name += "_"
    return name
