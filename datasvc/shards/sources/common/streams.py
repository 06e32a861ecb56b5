"""Binary streams of a source's files: decompress them, and read or skip pieces of a declared length.

A file may be truncated or declare a false length. The memory of these readers therefore grows with the bytes that a
stream really gives, not with a declared length.
"""

from __future__ import annotations

import io
import zlib
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

    Reads raise one of `DECOMPRESSION_ERRORS` where the content is truncated or damaged.

    Args:
        stream: compressed stream, at its start.
        compression: one of the values of `COMPRESSIONS`; "gzip" also reads zlib, as TensorFlow writes it.
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
