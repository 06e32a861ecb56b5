"""Small objects that are one Arrow table: sample indexes and deletions. How they become bytes, and come back."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError


def encode_table(table: pa.Table, metadata: Mapping[bytes, bytes] | None = None) -> bytes:
    """Return a table as an Arrow IPC file; equal tables give equal bytes.

    Args:
        table: what it holds.
        metadata: kept with its rows, if there are any. That of the schema would be in the file twice.
    """
    sink = pa.BufferOutputStream()
    whole = table.combine_chunks()
    with pa.ipc.new_file(sink, whole.schema) as file:
        for batch in whole.to_batches():
            file.write_batch(batch, custom_metadata=metadata)
    return bytes(sink.getvalue().to_pybytes())


def decode_metadata(content: bytes) -> dict[bytes, bytes]:
    """Return the metadata that `encode_table` kept in what `decode_table` could read."""
    file = pa.ipc.open_file(pa.py_buffer(content))
    found = file.get_batch_with_custom_metadata(0).custom_metadata if file.num_record_batches else None
    return dict(found or {})


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
