"""Encode Protocol Buffers messages; `sources.common.protobuf` decodes them.

After https://protobuf.dev/programming-guides/encoding/. Enough for Caffe's Datum and TensorFlow's Example.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

_VARINT: Final = 0
_BYTES: Final = 2
_GROUPS: Final = np.arange(10, dtype=np.uint64)  # an int64 takes up to ten groups of seven bits


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
    groups = (numbers.view(np.uint64)[:, None] >> (_GROUPS * np.uint64(7))) & np.uint64(0x7F)
    last = np.where(groups.any(axis=1), 9 - np.argmax(groups[:, ::-1] != 0, axis=1), 0)[:, None]
    is_continued = (np.arange(10) < last).astype(np.uint8) << 7
    raw: bytes = (groups.astype(np.uint8) | is_continued)[np.arange(10) <= last].tobytes()
    return raw


def varint_field(number: int, value: int) -> bytes:
    """Encode a field that holds an integer."""
    return varint(number << 3 | _VARINT) + varint(value)


def bytes_field(number: int, *pieces: Any) -> bytes:
    """Encode a field that holds bytes, text or a message; the content is the concatenation of `pieces`."""
    size = sum(len(piece) for piece in pieces)
    return b"".join([varint(number << 3 | _BYTES), varint(size), *pieces])
