"""Split a text file, or a range of it, into blocks of whole lines, each block with its offset and line number.

JSON lines and text files are read this way. Workers read ranges of one file in parallel, so each line must belong to
exactly one range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

BLOCK_BYTES: Final = 1 << 20
LINE_BYTES: Final = 64 << 20  # a longer line is skipped, because a file without newlines would not fit into memory
_NEWLINE: Final = b"\n"


@dataclass(frozen=True)
class LineBlock:
    """Consecutive lines of a file.

    Attributes:
        content: the lines with their newlines (the last of a file may have none); None for one longer line (skipped).
        offset: offset of the first byte in the decompressed file.
        line: number of the first line, counted from 1 at the start of the range.
    """

    content: bytes | None
    offset: int
    line: int


def read_line_blocks(stream: BinaryIO, *, start: int = 0, stop: int | None = None) -> Iterator[LineBlock]:
    """Yield the lines of a range of a file in order, about `BLOCK_BYTES` at a time.

    A line belongs to the range that contains its first byte, so adjacent ranges yield each line exactly once.

    Args:
        stream: the file, positioned at the byte before `start`, or at its beginning if `start` is 0.
        start: first byte of the range.
        stop: first byte after the range; None: the end of the file.
    """
    lines = _Lines(stream, max(start - 1, 0))
    if start:
        # The line that contains the byte before `start` belongs to the previous range.
        lines.skip_line()
    line = 1
    while stop is None or lines.offset < stop:
        offset = lines.offset
        content = lines.take()
        if content == b"":
            return
        if content is None:  # `take` has skipped a line longer than `LINE_BYTES`
            yield LineBlock(None, offset, line)
            line += 1
            continue
        # The line with the byte before `stop` is the last one of this range; the lines after it are cut off.
        if stop is not None and offset + len(content) > stop:
            newline = content.find(_NEWLINE, stop - 1 - offset)  # -1 if the file does not end with a newline
            content = content if newline < 0 else content[: newline + 1]
        yield LineBlock(content, offset, line)
        line += content.count(_NEWLINE)


class _Lines:
    """Reads whole lines from a stream; `offset` is the offset in the file of the next line to return."""

    def __init__(self, stream: BinaryIO, offset: int) -> None:
        self.offset = offset
        self._stream = stream
        self._unconsumed = b""  # bytes that are read from the stream, but neither returned nor skipped

    def take(self) -> bytes | None:
        """Return one or more whole lines, b"" at the end, or None after skipping a line longer than `LINE_BYTES`."""
        cut = self._unconsumed.rfind(_NEWLINE) + 1
        if cut:
            # `skip_line` left whole lines. Return them first, or they would be skipped with a long line after them.
            whole, self._unconsumed = self._unconsumed[:cut], self._unconsumed[cut:]
            self.offset += cut
            return whole
        pieces, size_bytes = [self._unconsumed], len(self._unconsumed)
        self._unconsumed = b""
        while block := self._stream.read(BLOCK_BYTES):
            cut = block.rfind(_NEWLINE) + 1  # end of the last whole line; 0 without a newline
            # Only the first line can span several blocks: the loop ends at the first block with a newline.
            first_line_bytes = size_bytes + (block.find(_NEWLINE) if cut else len(block))
            if first_line_bytes > LINE_BYTES:
                self.offset += size_bytes
                self._unconsumed = block
                pieces.clear()  # frees the memory before the rest of the line is read
                self.skip_line()
                return None
            pieces.append(block[:cut] if cut else block)
            size_bytes += len(pieces[-1])
            if cut:
                self._unconsumed = block[cut:]
                break
        self.offset += size_bytes
        return b"".join(pieces)

    def skip_line(self) -> None:
        """Read and discard the rest of the current line, with its newline."""
        block = self._unconsumed or self._stream.read(BLOCK_BYTES)
        while block:
            newline = block.find(_NEWLINE)
            if newline >= 0:
                self.offset += newline + 1
                self._unconsumed = block[newline + 1 :]
                return
            self.offset += len(block)
            block = self._stream.read(BLOCK_BYTES)
        self._unconsumed = b""
