"""Pieces of a known length out of a stream that may end early or lie about the length."""

from __future__ import annotations

from typing import BinaryIO, Final

_STEP_BYTES: Final = 4 << 20


def read_up_to(stream: BinaryIO, length: int) -> bytes:
    """Return the next `length` bytes, fewer where the stream ends.

    Memory grows with what the stream has, not with what a damaged length claims.
    """
    first = stream.read(min(length, _STEP_BYTES))
    if len(first) == length or not first:
        return first
    pieces = [first]
    left = length - len(first)
    while left and (piece := stream.read(min(left, _STEP_BYTES))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def skip(stream: BinaryIO, length: int) -> int:
    """Read `length` bytes and forget them; returns how many there were."""
    left = length
    while left and (piece := stream.read(min(left, _STEP_BYTES))):
        left -= len(piece)
    return length - left
