"""Reads a file of keys and values of one column, with the readers of tabular sources."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.printable import count_text
from datasvc.shards.format.schema import KEY
from datasvc.shards.sources.choose import open_source
from datasvc.shards.sources.common.column_types import cast_column, is_text, sample_type
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample
from datasvc.shards.sources.common.tables import TableSource

_MAX_LISTED = 10


def read_column(source: str | Path | pa.Table, column: str, key: str) -> pa.Table:
    """Return keys and values of a source, as the columns `key` and `column`, with the types of samples.

    Args:
        source: URL of a file, or a table.
        column: its column of this name; or its only column beside the keys.
        key: its column of keys.

    Raises:
        ConfigError: there is no such column; a row cannot be read, a key is null or occurs twice; or the column holds
            blobs.
        NotFoundError, UnavailableError: see `open_source`.
    """
    raw, where = (source, "the table") if isinstance(source, pa.Table) else (_read(str(source), key), str(source))
    values = [name for name in raw.column_names if name != key]
    if key not in raw.column_names:
        raise ConfigError(
            f"{where} has no column {key!r} of keys; it has {raw.column_names}: name it with --key (key=)"
        )
    chosen = column if column in values else values[0] if len(values) == 1 else None
    if chosen is None:
        raise ConfigError(f"{where} has no column {column!r}; it has {raw.column_names}")
    given = raw.column(key)
    if pa.types.is_integer(given.type):  # an ingest makes the same text of them
        given = given.cast(pa.string())
    keys = _joined(given, pa.string(), key)
    if keys.null_count:
        raise ConfigError(f"{where} has {count_text(keys.null_count, 'row')} without a key in column {key!r}")
    repeated = [name for name, count in Counter(keys.to_pylist()).items() if count > 1]
    if repeated:
        more = "" if len(repeated) <= _MAX_LISTED else f" and {len(repeated) - _MAX_LISTED} more"
        listed = ", ".join(map(repr, repeated[:_MAX_LISTED]))
        raise ConfigError(f"{where} has keys more than once: {listed}{more}; keep one row of each")
    data_type = sample_type(raw.column(chosen).type)
    if pa.types.is_large_binary(data_type):
        raise ConfigError(f"column {chosen!r} of {where} holds bytes, which a column cannot: ingest them as samples")
    return pa.table({KEY: keys, column: _joined(raw.column(chosen), data_type, chosen)})


def to_type(values: pa.Array, data_type: pa.DataType, name: str) -> pa.Array:
    """Return values as `data_type`. Raise ConfigError if one does not convert without loss."""
    if is_text(data_type) and not (is_text(values.type) or pa.types.is_null(values.type)):
        raise ConfigError(f"column {name!r} holds text, the new values are {values.type}: give them as text")
    try:
        return cast_column(values, data_type)
    except (pa.ArrowException, ValueError) as error:
        raise ConfigError(f"column {name!r} is {data_type}, and the new values do not convert: {error}") from error


def _read(url: str, key: str) -> pa.Table:
    opened = open_source(url, SourceOptions(key=key))
    if not isinstance(opened, TableSource):
        raise ConfigError(f"{url} has the format {opened.kind}; expected CSV, JSON lines, Parquet or Arrow")
    batches, bad = [], []
    for part in opened.parts:
        for raw in opened.read_raw(part):
            if isinstance(raw, BadSample):
                bad.append(f"{raw.key}: {raw.reason}")
            else:
                batches.append(raw.batch)
    if bad:
        raise ConfigError(
            f"{count_text(len(bad), 'row')} of {url} cannot be read: {'; '.join(bad[:_MAX_LISTED])}; nothing was "
            "written"
        )
    return pa.concat_tables([pa.Table.from_batches([batch]) for batch in batches], promote_options="permissive")


def _joined(column: pa.ChunkedArray, data_type: pa.DataType, name: str) -> pa.Array:
    return pa.concat_arrays([pa.nulls(0, data_type), *(to_type(chunk, data_type, name) for chunk in column.chunks)])
