"""Read pieces of a declared length from a stream that may be truncated or declare a false length."""

from __future__ import annotations

from typing import BinaryIO, Final

_STEP_BYTES: Final = 4 << 20


def read_up_to(stream: BinaryIO, length: int) -> bytes:
    """Return the next `length` bytes, fewer where the stream ends.

    Memory grows with the bytes read, so a damaged length cannot allocate more than the stream holds.
    """
    first = stream.read(min(length, _STEP_BYTES))
    if len(first) == length or not first:
        return first
    pieces = [first]
    remaining_bytes = length - len(first)
    while remaining_bytes and (piece := stream.read(min(remaining_bytes, _STEP_BYTES))):
        pieces.append(piece)
        remaining_bytes -= len(piece)
    return b"".join(pieces)


def skip(stream: BinaryIO, length: int) -> int:
    """Read and discard up to `length` bytes; return how many there were."""
    remaining_bytes = length
    while remaining_bytes and (piece := stream.read(min(remaining_bytes, _STEP_BYTES))):
        remaining_bytes -= len(piece)
    return length - remaining_bytes
