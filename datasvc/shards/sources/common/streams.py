"""Binary streams of a source's files: decompress them, and read or skip pieces of a declared length.

A file may be truncated or declare a false length. The memory of these readers therefore grows with the bytes that a
stream really gives, not with a declared length.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, cast

import pyarrow as pa
import zstandard

# Compressions by the extension of a file.
COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}
# Reading a stream from `decompress` raises these errors if it is truncated or damaged.
DECOMPRESSION_ERRORS: Final = (EOFError, zlib.error, zstandard.ZstdError)
BUFFER_BYTES: Final = 1 << 17
_STEP_BYTES: Final = 4 << 20  # largest read, whatever length is declared
_COMPRESSED_BYTES: Final = 1 << 18  # largest read of compressed content
_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS  # zlib detects by the header which of the two it is


BLOCK_BYTES: Final = 1 << 20
LINE_BYTES: Final = 64 << 20  # a longer line is skipped, because a file without newlines would not fit into memory
_NEWLINE: Final = b"\n"


def read_up_to(stream: BinaryIO, length: int) -> bytes:
    """Return the next `length` bytes, fewer where the stream ends."""
    first = stream.read(min(length, _STEP_BYTES))
    # Most pieces are small: return the first one without a copy.
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


def decompress(stream: BinaryIO, compression: str) -> BinaryIO:
    """Return a stream of the decompressed content of `stream`; closing it closes `stream`.

    Reads raise one of `DECOMPRESSION_ERRORS` where the content is truncated or damaged. `compression` is one of the
    values of `COMPRESSIONS`; "gzip" also reads zlib, as TensorFlow writes it.
    """
    raw = _InflatedStream(stream) if compression == "gzip" else _ZstdStream(stream)
    return cast("BinaryIO", io.BufferedReader(raw, BUFFER_BYTES))


class WrappingStream(io.RawIOBase):
    """Base of streams that read from another, wrapped stream; closing one closes the wrapped stream too."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def readable(self) -> bool:
        """Return true: all streams of this kind are for reading."""
        return True

    def close(self) -> None:
        """Close both streams."""
        if not self.closed:
            self._wrapped.close()
        super().close()


class _InflatedStream(WrappingStream):
    """A gzip stream of any number of members, or a zlib stream; the checksums are verified."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__(wrapped)
        self._inflater: Any = None  # None: the next member has not started
        self._num_members = 0
        self._compressed = b""

    def readinto(self, target: Any) -> int:
        buffer = memoryview(target).cast("B")
        # A step may give no content, such as at a header. But a result of 0 would mean the end of the stream.
        while True:
            self._compressed = self._compressed or self._wrapped.read(_COMPRESSED_BYTES)
            if not self._compressed:
                if self._inflater is None:
                    return 0
                raise EOFError("the compressed stream is truncated")
            if self._inflater is None:
                # A file may be padded with zeros at its end; a file of zeros alone is damaged.
                if self._num_members:
                    self._compressed = self._compressed.lstrip(b"\0")
                    if not self._compressed:
                        continue
                self._inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
                self._num_members += 1
            # Decompress at most the size of the buffer, so that a small file cannot fill the memory.
            content = self._inflater.decompress(self._compressed, len(buffer))
            self._compressed = self._inflater.unconsumed_tail
            if self._inflater.eof:  # at the end of a member; another one may follow it
                self._compressed = self._inflater.unused_data
                self._inflater = None
            if content:
                buffer[: len(content)] = content
                return len(content)


class _ZstdStream(WrappingStream):
    """A zstd stream of any number of frames; a truncated one raises EOFError, as gzip does."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__(wrapped)
        # Arrow decompresses, because the reader of `zstandard` takes a truncated stream for a complete one.
        self._unpacked = pa.CompressedInputStream(pa.PythonFile(wrapped, mode="r"), "zstd")

    def readinto(self, target: Any) -> int:
        try:
            return int(self._unpacked.readinto(target))
        except OSError as error:
            # Arrow raises OSError for all damage. Only the message distinguishes a truncated stream.
            if "Truncated" in str(error):
                raise EOFError("the compressed content is truncated") from error
            raise zstandard.ZstdError(str(error)) from error


# JSON lines and text files are read this way. Workers read ranges of one file in parallel, so each line must belong
# to exactly one range.


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
    """Yield the lines that start in a range of a file in order, about `BLOCK_BYTES` at a time.

    Adjacent ranges yield each line exactly once. `stream` is positioned at the byte before `start`, or at its
    beginning if `start` is 0.
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
