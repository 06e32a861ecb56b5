"""Whether an Arrow stream would make its reader decompress: to whatever size it claims, which exhausts memory.

pyarrow does not tell, so the one field that says so is looked up in the flatbuffers of each message; the numbers of
fields are those of Arrow's Message.fbs.
"""

from __future__ import annotations

import struct

import pyarrow as pa

_RECORD_BATCH = 3
_HEADER_TYPE, _HEADER = 1, 2
_COMPRESSION = 3


def has_compressed_batch(stream: pa.Buffer) -> bool:
    """Return whether a record batch of an Arrow IPC stream is compressed.

    Raises:
        ArrowException, OSError, ValueError: it is no stream.
    """
    messages = pa.ipc.MessageReader.open_stream(stream)
    try:
        return any(_names_compression(message.metadata.to_pybytes()) for message in messages)
    except (struct.error, IndexError) as error:
        raise ValueError(f"a message that is no flatbuffer: {error}") from error


def _names_compression(message: bytes) -> bool:
    """Return whether a message is a record batch whose header has a `compression`."""
    root = _uint32(message, 0)
    kind, header = _field(message, root, _HEADER_TYPE), _field(message, root, _HEADER)
    if kind is None or header is None or message[kind] != _RECORD_BATCH:
        return False
    return _field(message, header + _uint32(message, header), _COMPRESSION) is not None


def _field(message: bytes, table: int, index: int) -> int | None:
    """Return where a field of a flatbuffers table lies, None where it is absent."""
    vtable = table - struct.unpack_from("<i", message, table)[0]
    if vtable < 0:
        raise ValueError("a flatbuffers table lies outside its message")
    (vtable_bytes,) = struct.unpack_from("<H", message, vtable)
    if 4 + 2 * index >= vtable_bytes:
        return None
    (offset,) = struct.unpack_from("<H", message, vtable + 4 + 2 * index)
    return table + offset if offset else None


def _uint32(message: bytes, offset: int) -> int:
    return int(struct.unpack_from("<I", message, offset)[0])
