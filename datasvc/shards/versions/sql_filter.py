"""SQL conditions over samples: which samples of a split meet a boolean expression, by DuckDB on the shards' batches.

The expression sees one shard at a time and nothing outside it: no files, no other tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.extras import how_to_install
from datasvc.keyed_random import Integers
from datasvc.repository import Objects
from datasvc.shards.format.reader import Shard, open_shard
from datasvc.shards.format.schema import is_blob
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.keys import SplitKeys


class Condition:
    """A boolean SQL expression over the columns of a split, such as `label = 3 and width < 100`.

    It is tried without the blob columns first, so that deleting by label copies no image; an expression that needs
    one, such as `octet_length(image) > 1000000`, is given all.

    Args:
        expression: SQL; names are columns, null means no.
        schema: the columns of the split.

    Raises:
        ConfigError: it does not parse, names a column that is not there, or is not boolean; DuckDB is missing.
    """

    def __init__(self, expression: str, schema: pa.Schema) -> None:
        self._expression = expression
        self._filter = f"({expression}\n)"  # a line of its own: the expression may end in a comment
        self._columns = schema.names
        if len({name.lower() for name in schema.names}) != len(schema.names):
            raise ConfigError(
                f"columns differ in case alone, which SQL does not tell apart: {schema.names}; delete by keys instead"
            )
        self._connection = _connect()
        plain = pa.schema([field for field in schema if not is_blob(field.type)])
        self._schema = schema if not self._binds(plain) and self._binds(schema) else plain
        with self._translated():
            types = self._relation(self._schema.empty_table()).project(self._filter).types
        if [str(each) for each in types] != ["BOOLEAN"]:
            found = ", ".join(map(str, types))
            raise ConfigError(f"the condition {expression!r} is {found}, not BOOLEAN: compare it with something")

    def find(self, objects: Objects, table: ShardTable) -> Iterator[tuple[int, Integers]]:
        """Yield the live samples that meet the condition: shard and stored rows, ascending.

        Raises:
            ConfigError: it fails on a sample, such as a cast of text that is no number.
            CorruptDataError, NotFoundError, UnavailableError: a shard cannot be read.
        """
        live = SplitKeys(objects, table)
        for shard in range(table.num_shards):
            rows = live.live_rows(shard)
            samples = self._samples(open_shard(objects, table.shard(shard)))
            met = self._evaluate(samples if len(rows) == samples.num_rows else samples.take(pa.array(rows)))
            if len(met):
                yield shard, rows[met]

    def _evaluate(self, samples: pa.Table) -> Integers:
        place = _free_name(samples.schema)
        numbered = samples.append_column(place, pa.array(np.arange(samples.num_rows)))
        with self._translated():
            found = self._relation(numbered).filter(self._filter).project(f'"{place}"').fetchnumpy()
        return np.sort(np.asarray(found[place], np.int64))

    def _samples(self, shard: Shard) -> pa.Table:
        columns = [
            shard.column(field.name) if field.name in shard.schema.names else pa.nulls(shard.num_samples, field.type)
            for field in self._schema
        ]
        return pa.table(columns, schema=pa.schema([field.with_nullable(True) for field in self._schema]))

    def _binds(self, schema: pa.Schema) -> bool:
        import duckdb

        try:
            self._relation(schema.empty_table()).filter(self._filter)
        except duckdb.Error:
            return False
        return True

    def _relation(self, samples: pa.Table) -> Any:
        return self._connection.from_arrow(samples)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        import duckdb

        try:
            yield
        except duckdb.Error as error:
            said, columns = str(error).partition("\n")[0], ", ".join(self._columns)
            raise ConfigError(
                f"the condition {self._expression!r} does not work: {said}; the columns are {columns}"
            ) from error


def _connect() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError(f"SQL needs DuckDB, which is not installed: {how_to_install('sql')}") from error
    # Without external access there are neither files nor the tables of the program that calls us.
    return duckdb.connect(config={"enable_external_access": "false", "lock_configuration": "true"})


def _free_name(schema: pa.Schema) -> str:
    name = "datasvc_row"
    while name in schema.names:
        name += "_"
    return name
