"""Checks Arrow IPC metadata that is not trusted, before Arrow follows the positions and sizes in it.

Arrow trusts some of these numbers: a wrong length ends the process, and a compressed buffer is decompressed to the
size that it claims. Only shards have compressed buffers, and these claim at most `MAX_EXPANSION` times the bytes of
their batch; elsewhere they are refused. All others must be inside the bytes that are stored.
See https://arrow.apache.org/docs/format/Columnar.html, and File.fbs and Message.fbs beside it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import pyarrow as pa

# Numbers of the fields in the flatbuffers tables of File.fbs and Message.fbs.
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_MESSAGE_TYPE, _MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 1, 2, 3
_BATCH_LENGTH, _BATCH_NODES, _BATCH_BUFFERS, _BATCH_COMPRESSION = 0, 1, 2, 3
_MAX_FIELDS: Final = 4  # the numbers above are smaller
_SCHEMA_TYPE, _BATCH_TYPE = 1, 3  # values of the field `_MESSAGE_TYPE`
_BLOCK: Final = struct.Struct("<qi4xq")  # offset, length of the metadata, length of the body
_PAIR: Final = struct.Struct("<qq")  # of a column: length and number of nulls; of a buffer: offset and length
_UINT16: Final = struct.Struct("<H")
_INT32: Final = struct.Struct("<i")
_UINT32: Final = struct.Struct("<I")
_INT64: Final = struct.Struct("<q")
_MAGIC_BYTES: Final = 8  # "ARROW1" and its padding
_PREFIX: Final = struct.Struct("<Ii")  # before each message: `_MARK`, and the length of the flatbuffer
_MARK: Final = 0xFFFFFFFF
_ALIGNMENT: Final = 8
# A value takes at least a bit. With this limit, no array that Arrow makes from a batch is much larger than the batch.
MAX_VALUES_PER_BYTE: Final = 8
MAX_EXPANSION: Final = 64
"""Largest sum of the sizes that the compressed buffers of a batch claim, in sizes of the batch."""
VERBATIM: Final = _INT64.pack(-1)
"""What a buffer of a compressed batch begins with, instead of its size, if it is not compressed itself."""
BodyReader = Callable[[int, int], bytes]
"""Returns bytes of the body of a message, by offset and length."""


class Block(NamedTuple):
    """Position of a record batch in a file, in bytes: its metadata at `offset`, directly followed by its body."""

    offset: int
    metadata_bytes: int
    body_bytes: int


class BatchHeader(NamedTuple):
    """What the header of a record batch says.

    Attributes:
        num_rows: number of rows.
        columns: length and number of nulls of each column, nested ones too.
        buffers: offset and length of each buffer in the body, in bytes.
        decoded_bytes: memory that the compressed buffers take when they are decoded; 0 without any.
    """

    num_rows: int
    columns: Sequence[tuple[int, ...]]
    buffers: Sequence[tuple[int, ...]]
    decoded_bytes: int = 0


def parse_footer(footer: bytes, footer_offset: int) -> list[Block]:
    """Return the record batches that the footer of an Arrow IPC file lists.

    Args:
        footer: the flatbuffer of the footer.
        footer_offset: its position in the file; the record batches must end before it.

    Raises:
        ValueError: the footer lists dictionaries, or batches that are outside of the file or overlap.
    """
    try:
        root = _table(footer, 0)
        if _vector(footer, root[_FOOTER_DICTIONARIES], _BLOCK):
            raise ValueError("it has dictionaries, which datasvc never writes")
        blocks = [Block(*block) for block in _vector(footer, root[_FOOTER_BATCHES], _BLOCK)]
    except (struct.error, IndexError) as error:
        raise ValueError(f"its footer is not a valid flatbuffer: {error}") from error
    position = _MAGIC_BYTES
    for number, block in enumerate(blocks):
        if block.offset < position or block.metadata_bytes < _PREFIX.size or block.body_bytes < 0:
            raise ValueError(f"its footer has an invalid position of record batch {number}: {block}")
        position = block.offset + block.metadata_bytes + block.body_bytes
        if position > footer_offset:
            raise ValueError(f"record batch {number} ends at byte {position}, after the footer's {footer_offset}")
    return blocks


def check_block(metadata: bytes, block: Block, read: BodyReader | None = None) -> BatchHeader:
    """Return the header of a record batch from `metadata`, the bytes at `block.offset`.

    Raise ValueError if it does not describe a record batch in `block`, or has compressed buffers and `read` is None.
    """
    if len(metadata) != block.metadata_bytes:
        raise ValueError("the file ends in a record batch")
    mark, length = _PREFIX.unpack_from(metadata)
    if mark != _MARK or length != block.metadata_bytes - _PREFIX.size:
        raise ValueError(f"its metadata has {length} bytes; expected {block.metadata_bytes - _PREFIX.size}")
    header = _check_header(metadata[_PREFIX.size :], block.body_bytes, read)
    if header is None:
        raise ValueError("it is not a record batch")
    return header


def checked_messages(stream: pa.Buffer, *, compressed: bool = False) -> Iterator[pa.Message]:
    """Yield the messages of an Arrow IPC stream, such as the part of a file after its magic bytes.

    Args:
        stream: the stream.
        compressed: whether buffers may be compressed.

    Raises:
        ValueError: a message is neither a schema nor a record batch, or a buffer is not inside the message's body.
        pa.ArrowException, OSError, EOFError: a message is not valid.
    """
    for message in pa.ipc.MessageReader.open_stream(pa.BufferReader(stream)):
        body = message.body if message.body is not None else pa.py_buffer(b"")
        read = partial(_read_buffer, body) if compressed else None
        _check_header(message.metadata.to_pybytes(), body.size, read)
        yield message


def parse_batch(message: bytes) -> BatchHeader:
    """Return the header of a record batch that Arrow has just written, from the flatbuffer of its message."""
    return _parse_batch(message, _table(message, _table(message, 0)[_MESSAGE_HEADER]))


def fill_batch(message: bytes, header: BatchHeader, body_bytes: int) -> bytes:
    """Return the flatbuffer of a record batch with these numbers, none of which is 0 in `message`.

    `message` is of a batch of the same schema, so it has as many columns and buffers.
    """
    filled = bytearray(message)
    root = _table(message, 0)
    batch = _table(message, root[_MESSAGE_HEADER])
    _INT64.pack_into(filled, root[_MESSAGE_BODY_LENGTH], body_bytes)
    _INT64.pack_into(filled, batch[_BATCH_LENGTH], header.num_rows)
    _fill_vector(filled, batch[_BATCH_NODES], _PAIR, header.columns)
    _fill_vector(filled, batch[_BATCH_BUFFERS], _PAIR, header.buffers)
    return bytes(filled)


def fill_footer(footer: bytes, blocks: Sequence[Block]) -> bytes:
    """Return the flatbuffer of a footer with other positions; it has as many record batches."""
    filled = bytearray(footer)
    _fill_vector(filled, _table(footer, 0)[_FOOTER_BATCHES], _BLOCK, blocks)
    return bytes(filled)


def _read_buffer(body: pa.Buffer, offset: int, length: int) -> bytes:
    return bytes(body.slice(offset, length).to_pybytes())


def _check_header(message: bytes, body_bytes: int, read: BodyReader | None) -> BatchHeader | None:
    """Return the header of a record batch from the flatbuffer of its message; None if it is a schema.

    The body has `body_bytes`; `read` reads it, and None refuses compressed buffers. Raise ValueError.
    """
    try:
        root = _table(message, 0)
        # Positions of the fields in `message`; 0 if a field is absent.
        type_at, header_at, length_at = root[_MESSAGE_TYPE], root[_MESSAGE_HEADER], root[_MESSAGE_BODY_LENGTH]
        if not type_at or not header_at or message[type_at] not in {_SCHEMA_TYPE, _BATCH_TYPE}:
            raise ValueError("it has a message that is neither a schema nor a record batch")
        # A flatbuffer leaves out a number that is 0.
        stored_bytes = _INT64.unpack_from(message, length_at)[0] if length_at else 0
        if stored_bytes != body_bytes:
            raise ValueError(f"a message has {stored_bytes} bytes; expected {body_bytes}")
        if message[type_at] != _BATCH_TYPE:
            return None
        batch = _table(message, header_at)
        is_compressed = bool(batch[_BATCH_COMPRESSION])
        if is_compressed and read is None:
            raise ValueError("its buffers are compressed, which datasvc never writes here")
        header = _parse_batch(message, batch)
    except (struct.error, IndexError) as error:
        raise ValueError(f"a message is not a valid flatbuffer: {error}") from error
    position = 0
    for offset, length in header.buffers:
        # Arrow writes one buffer after the other. Buffers that share bytes could take more memory than the file has.
        if length < 0 or offset < position or offset + length > body_bytes or offset % _ALIGNMENT:
            raise ValueError(
                f"it has a buffer of {length} bytes at {offset}; expected one from {position} to {body_bytes}"
            )
        position = offset + length
    if is_compressed and read is not None:
        header = header._replace(decoded_bytes=_claimed_bytes(header, body_bytes, read))
    # The number of rows has the same limit as the number of values of a column.
    limit = MAX_VALUES_PER_BYTE * (body_bytes + header.decoded_bytes)
    for length, num_nulls in [(header.num_rows, 0), *header.columns]:
        if not 0 <= num_nulls <= length <= limit:
            raise ValueError(f"it has a column of {length} values in {body_bytes} bytes, {num_nulls} of them null")
    return header


def _claimed_bytes(header: BatchHeader, body_bytes: int, read: BodyReader) -> int:
    """Return the sum of the sizes that compressed buffers claim. Raise ValueError if it is too large."""
    # Arrow allocates what a buffer claims, and fills it as far as the compressed bytes go.
    claimed = 0
    for offset, length in header.buffers:
        if not length:
            continue
        prefix = read(offset, _INT64.size) if length >= _INT64.size else b""
        if len(prefix) < _INT64.size:
            raise ValueError(f"it has a compressed buffer of {length} bytes, which is too short for its size")
        if prefix == VERBATIM:
            continue
        (size_bytes,) = _INT64.unpack(prefix)
        claimed += size_bytes
        if size_bytes < 0 or claimed > MAX_EXPANSION * body_bytes:
            raise ValueError(
                f"its compressed buffers claim to have {claimed} bytes or more, and it has {body_bytes}; the limit "
                f"is {MAX_EXPANSION} times as many"
            )
    return claimed


def _parse_batch(message: bytes, batch: tuple[int, ...]) -> BatchHeader:
    num_rows = _INT64.unpack_from(message, batch[_BATCH_LENGTH])[0] if batch[_BATCH_LENGTH] else 0
    columns = _vector(message, batch[_BATCH_NODES], _PAIR)
    return BatchHeader(num_rows, columns, _vector(message, batch[_BATCH_BUFFERS], _PAIR))


def _table(content: bytes, position: int) -> tuple[int, ...]:
    """Return the positions of the fields of a flatbuffers table, by number; 0 for a field that is absent.

    `position` holds the offset of the table. At least `_MAX_FIELDS` positions are returned.
    """
    table = position + _UINT32.unpack_from(content, position)[0]
    vtable = table - _INT32.unpack_from(content, table)[0]
    if vtable < 0:  # Python would count from the end of the bytes
        raise ValueError("a flatbuffers table is outside of its message")
    # The vtable has two bytes for its length, two for the table's, and two per field: its offset in the table.
    num_fields = _UINT16.unpack_from(content, vtable)[0] // 2 - 2
    offsets = struct.unpack_from(f"<{max(num_fields, 0)}H", content, vtable + 4)
    return tuple([table + offset if offset else 0 for offset in offsets]) + (0,) * _MAX_FIELDS


def _vector(content: bytes, position: int, item: struct.Struct) -> list[tuple[int, ...]]:
    """Return the structs of the vector in the field at `position`, as tuples; [] if the field is absent (0)."""
    if not position:
        return []
    start = position + _UINT32.unpack_from(content, position)[0]
    (count,) = _UINT32.unpack_from(content, start)
    start += _UINT32.size
    if start + count * item.size > len(content):
        raise ValueError("a flatbuffers vector is longer than its message")
    return list(item.iter_unpack(content[start : start + count * item.size]))


def _fill_vector(content: bytearray, position: int, item: struct.Struct, items: Sequence[tuple[int, ...]]) -> None:
    """Replace the structs of the vector in the field at `position` by as many others."""
    if not items:
        return
    start = position + _UINT32.unpack_from(content, position)[0]
    assert _UINT32.unpack_from(content, start)[0] == len(items), "the vector has another length"
    for number, values in enumerate(items):
        item.pack_into(content, start + _UINT32.size + number * item.size, *values)
