"""Decodes and encodes Protocol Buffers messages without generated code, for Caffe's Datum and TensorFlow's Example.

The LMDB and TFRecord sources decode, the exports to these formats encode.
Format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from datasvc.errors import BadSampleError

# Wire types.
VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5
_FIXED_SIZES: Final = {FIXED64: 8, FIXED32: 4}
_MAX_VARINT_BYTES: Final = 10  # an int64 takes up to ten groups of seven bits


def read_fields(message: bytes | memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yield field number, wire type and value of each field in the order of the message.

    The value of a varint is an unsigned int; the value of any other field is a view of its bytes.

    Raises:
        BadSampleError: the message is truncated, or has a wire type without a constant here, such as a group.
    """
    view = memoryview(message)
    offset = 0
    while offset < len(view):
        tag, offset = _read_varint(view, offset)
        number, wire_type = tag >> 3, tag & 7
        if number == 0:
            raise BadSampleError("not a protobuf message: a field has the number 0")
        if wire_type == VARINT:
            value, offset = _read_varint(view, offset)
            yield number, wire_type, value
            continue
        if wire_type == BYTES:
            length, offset = _read_varint(view, offset)
        elif wire_type in _FIXED_SIZES:
            length = _FIXED_SIZES[wire_type]
        else:
            raise BadSampleError(f"field {number} has the wire type {wire_type}, which is not supported")
        if length > len(view) - offset:
            raise BadSampleError(f"field {number} has a length of {length} bytes; {len(view) - offset} remain")
        yield number, wire_type, view[offset : offset + length]
        offset += length


def read_packed_varints(packed: memoryview) -> npt.NDArray[np.int64]:
    """Return the numbers of a packed list of varints: `int64[n]`.

    Raises:
        BadSampleError: a number is truncated or takes more than 10 bytes.
    """
    raw = np.frombuffer(packed, np.uint8)
    if not len(raw):
        return np.empty(0, np.int64)
    # The highest bit of a byte is set if the number continues in the next byte.
    (ends,) = np.nonzero(raw < 0x80)
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise BadSampleError("the last number of a list is truncated")
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - starts + 1
    if sizes.max() > _MAX_VARINT_BYTES:
        raise BadSampleError(f"a number takes {sizes.max()} bytes; expected at most {_MAX_VARINT_BYTES}")
    # A byte holds seven bits, the lowest first: shift each byte by its index in its number, and add the bytes.
    shifts = 7 * (np.arange(len(raw)) - np.repeat(starts, sizes))
    parts = (raw & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
    return np.add.reduceat(parts, starts).view(np.int64)


def to_signed(varint: int, bits: int = 64) -> int:
    """Return the two's complement number of `bits` bits that `varint` encodes."""
    low = varint & ((1 << bits) - 1)
    return low - (1 << bits) if low >> (bits - 1) else low


def varint(number: int) -> bytes:
    """Encode an integer of up to 64 bits; a negative one as its two's complement."""
    remaining = number & 0xFFFF_FFFF_FFFF_FFFF
    groups = bytearray()
    while remaining > 0x7F:
        groups.append(remaining & 0x7F | 0x80)
        remaining >>= 7
    groups.append(remaining)
    return bytes(groups)


def packed_varints(numbers: npt.NDArray[np.int64]) -> bytes:
    """Return the concatenated varints of `int64[n]`."""
    # Each number gives a row of ten groups of seven bits, the lowest first.
    index = np.arange(_MAX_VARINT_BYTES, dtype=np.uint64)
    groups = (numbers.view(np.uint64)[:, None] >> (index * np.uint64(7))) & np.uint64(0x7F)
    # Only the groups up to the last nonzero one are written; for the number 0, the first group.
    last_nonzero = 9 - np.argmax(groups[:, ::-1] != 0, axis=1)
    last = np.where(groups.any(axis=1), last_nonzero, 0)[:, None]
    continuation_bits = (index < last).astype(np.uint8) << 7
    raw: bytes = (groups.astype(np.uint8) | continuation_bits)[index <= last].tobytes()
    return raw


def varint_field(number: int, value: int) -> bytes:
    """Encode a field that holds an integer."""
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, *pieces: Any) -> bytes:
    """Encode a field that holds bytes, text or a message; the content is the concatenation of `pieces`."""
    size = sum(len(piece) for piece in pieces)
    return b"".join([varint(number << 3 | BYTES), varint(size), *pieces])


def _read_varint(view: memoryview, offset: int) -> tuple[int, int]:
    """Return the varint at `offset` and the offset after it. Raise BadSampleError if it is truncated or too long."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if offset + index >= len(view):
            raise BadSampleError("a number is truncated")
        byte = view[offset + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, offset + index + 1
    raise BadSampleError(f"a number takes more than {_MAX_VARINT_BYTES} bytes; expected at most that many")
