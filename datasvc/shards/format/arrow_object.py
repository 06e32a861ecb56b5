"""Encoding of objects that hold one Arrow table: shard tables, sample indexes and deletions.

Equal tables give equal bytes, so that equal objects have one digest and are stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.shards.format.ipc_reader import read_table


def encode_table(table: pa.Table, metadata: Mapping[bytes, bytes] | None = None) -> bytes:
    """Return a table as an Arrow IPC file.

    `metadata` is stored with the record batch. An empty table has no record batch, so its `metadata` is dropped.
    """
    sink = pa.BufferOutputStream()
    # Arrow writes one record batch per chunk, so equal tables with different chunks would give different bytes.
    combined = table.combine_chunks()
    with pa.ipc.new_file(sink, combined.schema) as file:
        for batch in combined.to_batches():
            # Store the metadata with the batch: Arrow stores the metadata of a schema twice, in header and footer.
            file.write_batch(batch, custom_metadata=metadata)
    return bytes(sink.getvalue().to_pybytes())


def decode_metadata(content: bytes) -> dict[bytes, bytes]:
    """Return the `metadata` that `encode_table` wrote. Call `decode_table` first, because it validates `content`."""
    file = pa.ipc.open_file(pa.py_buffer(content))
    metadata = file.get_batch_with_custom_metadata(0).custom_metadata if file.num_record_batches else None
    return dict(metadata or {})


def decode_table(
    content: bytes, name: str, *, what: str, format_key: bytes, latest: int, columns: pa.Schema
) -> pa.Table:
    """Return the table that `encode_table` wrote, validated.

    Args:
        content: bytes of the object.
        name: location of the object, for messages.
        what: type of the object, for messages, such as "sample index".
        format_key: key of the schema metadata that holds the format number.
        latest: the newest format number that this datasvc reads.
        columns: schema of the table in this format and all earlier ones; its metadata is ignored.

    Raises:
        CorruptDataError: `content` is not an object of this type, or has a null in a column that is not nullable.
        ConfigError: its format is newer than `latest`.
    """
    try:
        table = read_table(content, name)
        format_number = int((table.schema.metadata or {}).get(format_key, b""))
    except (CorruptDataError, ValueError) as error:
        raise CorruptDataError(f"{name} is not a {what}: {error}") from error
    if format_number > latest:
        raise ConfigError(
            f"{name} has {what} format {format_number}; this datasvc reads up to {latest}: upgrade datasvc"
        )
    check_columns(table, columns, f"{name} is not a {what}")
    return table


def check_columns(table: pa.Table, columns: pa.Schema, message: str) -> None:
    """Raise CorruptDataError if a table has other columns, or forbidden nulls. Its text starts with `message`."""
    if not table.schema.equals(columns):
        found = [f"{field.name}: {field.type}" for field in table.schema]
        expected = [f"{field.name}: {field.type}" for field in columns]
        raise CorruptDataError(f"{message}: it has the columns {found}; expected {expected}")
    for field in columns:
        if not field.nullable and table.column(field.name).null_count:
            raise CorruptDataError(f"{message}: column {field.name!r} has nulls")


def column_to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column as `dtype[num_rows]`. For one chunk of numbers without nulls, this is a read-only view."""
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if not is_number or column.null_count:
        return np.asarray(column.to_numpy())
    # `to_numpy` imports pandas where it is installed, which takes longer than most commands. The empty array is there
    # because a column may have no chunks.
    chunks = [np.from_dlpack(chunk) for chunk in column.chunks]
    return chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, column.type.to_pandas_dtype()), *chunks])
