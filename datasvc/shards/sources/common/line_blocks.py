"""Whole lines of a stream, in blocks of bounded memory, each with its place in the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

BLOCK_BYTES: Final = 1 << 20
LINE_BYTES: Final = 64 << 20
_NEWLINE: Final = b"\n"


@dataclass(frozen=True)
class LineBlock:
    """Consecutive lines.

    Attributes:
        content: with their newlines, but for a last line without one; None for a line longer than `LINE_BYTES`.
        offset: of its first byte in the file, decompressed.
        line: number of its first line since the start of the stream, from 1.
    """

    content: bytes | None
    offset: int
    line: int


def read_line_blocks(stream: BinaryIO, *, start: int = 0, stop: int | None = None) -> Iterator[LineBlock]:
    """Yield the lines of a range of a file, about `BLOCK_BYTES` at a time, in order.

    A line belongs to the range that its first byte lies in, so that ranges side by side give each line once.

    Args:
        stream: the file from the byte before `start`, or from its beginning where that is 0.
        start: of the range.
        stop: of the range; None: the end of the file.
    """
    lines = _Lines(stream, max(start - 1, 0))
    if start:
        lines.skip_line()
    line = 1
    while stop is None or lines.offset < stop:
        offset = lines.offset
        content = lines.take()
        if content == b"":
            return
        if content is None:
            yield LineBlock(None, offset, line)
            line += 1
            continue
        if stop is not None and offset + len(content) > stop:
            newline = content.find(_NEWLINE, stop - 1 - offset)
            content = content if newline < 0 else content[: newline + 1]
        yield LineBlock(content, offset, line)
        line += content.count(_NEWLINE)


class _Lines:
    """Takes lines off a stream and counts its bytes."""

    def __init__(self, stream: BinaryIO, offset: int) -> None:
        self.offset = offset
        self._stream = stream
        self._rest = b""  # read, and behind the last newline that was taken

    def take(self) -> bytes | None:
        """Return the next lines, b"" at the end, or None having passed over a line that is too long."""
        pieces, size_bytes = [self._rest], len(self._rest)
        self._rest = b""
        while block := self._stream.read(BLOCK_BYTES):
            cut = block.rfind(_NEWLINE) + 1
            first_line_bytes = size_bytes + (block.find(_NEWLINE) if cut else len(block))
            if first_line_bytes > LINE_BYTES:
                self.offset += size_bytes
                self._rest = block
                pieces.clear()
                self.skip_line()
                return None
            pieces.append(block[:cut] if cut else block)
            size_bytes += len(pieces[-1])
            if cut:
                self._rest = block[cut:]
                break
        self.offset += size_bytes
        return b"".join(pieces)

    def skip_line(self) -> None:
        """Pass over the rest of a line."""
        block = self._rest or self._stream.read(BLOCK_BYTES)
        while block:
            newline = block.find(_NEWLINE)
            if newline >= 0:
                self.offset += newline + 1
                self._rest = block[newline + 1 :]
                return
            self.offset += len(block)
            block = self._stream.read(BLOCK_BYTES)
        self._rest = b""
