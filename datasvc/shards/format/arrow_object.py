"""Encoding of objects that hold one Arrow table: shard tables, sample indexes, deletions.

Equal tables give equal bytes, so that equal objects have one digest and are stored once.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError


def encode_table(table: pa.Table, metadata: Mapping[bytes, bytes] | None = None) -> bytes:
    """Return a table as an Arrow IPC file. `metadata` is stored with its record batch; an empty table has none."""
    sink = pa.BufferOutputStream()
    # Arrow writes one record batch per chunk, so equal tables with different chunks would give different bytes.
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

    Args:
        content: bytes of the object.
        name: location of the object, for messages.
        what: type of the object, for messages, such as "sample index".
        format_key: key of the schema metadata that holds the format number.
        latest: the newest format number that this datasvc reads.

    Raises:
        CorruptDataError: `content` is not an object of this type.
        ConfigError: its format is newer than `latest`.
    """
    try:
        table = pa.ipc.open_file(pa.py_buffer(content)).read_all()
        format_number = int(table.schema.metadata[format_key])
    except (pa.ArrowInvalid, KeyError, ValueError, TypeError) as error:
        raise CorruptDataError(f"{name} is not a {what}: {error!r}") from error
    if format_number > latest:
        raise ConfigError(
            f"{name} has {what} format {format_number}; this datasvc reads up to {latest}: upgrade datasvc"
        )
    return table
