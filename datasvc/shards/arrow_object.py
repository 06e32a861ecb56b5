"""Small objects that are one Arrow table: sample indexes and deletions. How they become bytes, and come back."""

from __future__ import annotations

import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError


def encode_table(table: pa.Table) -> bytes:
    """Return a table as an Arrow IPC file; equal tables give equal bytes."""
    sink = pa.BufferOutputStream()
    whole = table.combine_chunks()
    with pa.ipc.new_file(sink, whole.schema) as file:
        file.write_table(whole)
    return bytes(sink.getvalue().to_pybytes())


def decode_table(content: bytes, name: str, *, what: str, format_key: bytes, latest: int) -> pa.Table:
    """Return the table that `encode_table` gave.

    Args:
        content: all of the object.
        name: of the object, for messages.
        what: it should be, "sample index".
        format_key: schema metadata that holds the number of its format.
        latest: format that is known.

    Raises:
        CorruptDataError: it is none.
        ConfigError: a later format.
    """
    try:
        table = pa.ipc.open_file(pa.py_buffer(content)).read_all()
        found = int(table.schema.metadata[format_key])
    except (pa.ArrowInvalid, KeyError, ValueError, TypeError) as error:
        raise CorruptDataError(f"{name} is no {what}: {error!r}") from error
    if found > latest:
        raise ConfigError(f"{name} has {what} format {found}; this datasvc reads up to {latest}")
    return table
