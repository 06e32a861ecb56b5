"""Encoding of objects that hold one Arrow table: shard tables, sample indexes, deletions.

Equal tables give equal bytes, so that equal objects have one digest and are stored once.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError


def encode_table(table: pa.Table, metadata: Mapping[bytes, bytes] | None = None) -> bytes:
    """Return a table as an Arrow IPC file, with `metadata` for its record batch if the table has rows."""
    sink = pa.BufferOutputStream()
    # Arrow writes one record batch per chunk, so equal tables with other chunks would give other bytes.
    combined = table.combine_chunks()
    with pa.ipc.new_file(sink, combined.schema) as file:
        for batch in combined.to_batches():
            # The batch gets the metadata, because Arrow stores a schema's metadata twice, in header and footer.
            file.write_batch(batch, custom_metadata=metadata)
    return bytes(sink.getvalue().to_pybytes())


def decode_metadata(content: bytes) -> dict[bytes, bytes]:
    """Return the `metadata` that `encode_table` wrote. `decode_table` must have accepted `content`."""
    file = pa.ipc.open_file(pa.py_buffer(content))
    metadata = file.get_batch_with_custom_metadata(0).custom_metadata if file.num_record_batches else None
    return dict(metadata or {})


def decode_table(content: bytes, name: str, *, what: str, format_key: bytes, latest: int) -> pa.Table:
    """Return the table that `encode_table` wrote.

    `format_key` is the key of the schema metadata with the format number, `latest` the newest one that can be read.
    For messages, `name` is the location of the object, and `what` its type, such as "sample index".

    Raises:
        CorruptDataError: the object does not have the type `what`.
        ConfigError: it has a newer format.
    """
    try:
        table = pa.ipc.open_file(pa.py_buffer(content)).read_all()
        format_number = int(table.schema.metadata[format_key])
    except (pa.ArrowInvalid, KeyError, ValueError, TypeError) as error:
        raise CorruptDataError(f"{name} is not a {what}: {error!r}") from error
    if format_number > latest:
        raise ConfigError(f"{name} has {what} format {format_number}; this datasvc reads up to {latest}")
    return table
