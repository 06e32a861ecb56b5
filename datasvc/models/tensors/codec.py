"""Byte planes: the bytes of numbers sorted by significance, each plane compressed by zstd. Lossless for any bits.

Trained weights are alike in their exponents and noise in their low bits; between two checkpoints even the upper bits
of the mantissa change little. So the planes of a piece, or of its difference to the piece before, compress where the
bytes as they lie in memory do not (the gain of LightRW, ZipNN and Delta-DNN). Two differences are known: XOR, and
that of the bits as integers, whose sign is folded into the lowest bit so that small changes of either sign have
upper planes of zeros.

Everything here takes and gives arrays `uint8[size]` of whole little-endian words, and lets other threads run.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import zstandard

from datasvc.errors import CorruptDataError
from datasvc.models.tensors.byte_planes import WORD_BYTES, Bytes, join, split
from datasvc.models.tensors.tensor_table import ITEM_BYTES, MAX_ENCODED_PIECE_BYTES
from datasvc.processors import count_processors

__all__ = ["Bytes", "ChainDecoder", "Decoders", "encode", "estimate_shares", "is_worthwhile", "word_bytes"]

# What there is to gain on planes lies in the frequencies of bytes, not in repeats: on those of a ResNet-50 levels 2
# and 3 gave 1 % more bytes than level 1. To look for few and long repeats gives 0.7 % fewer, and is decoded faster.
_ZSTD: Final = zstandard.ZstdCompressionParameters(compression_level=1, min_match=7, hash_log=8, window_log=19)
_SAMPLE_BYTES: Final = 128 << 10
_SAMPLE_RUNS: Final = 4
_PLANE_SAMPLE_BYTES: Final = 32 << 10
# What compresses by less is kept as it is: to read it back costs nothing then.
_WORTHWHILE: Final = 0.98
_WORTHWHILE_PLANE: Final = 0.95

_STORED: Final = -1

_of_thread = threading.local()


def word_bytes(dtype: str) -> int:
    """Return the size of the numbers that elements of a dtype consist of: complex ones are two."""
    item_bytes = ITEM_BYTES[dtype]
    return item_bytes // 2 if dtype.startswith("complex") else item_bytes


def encode(content: Bytes, word: int, encoding: str, base: Bytes | None = None) -> bytes:
    """Return `content` in an encoding of planes.

    Args:
        content: whole words.
        word: their size: 1, 2, 4 or 8.
        encoding: "planes", or "xor" or "difference", which need a base.
        base: what came before, of the same size.
    """
    stored = [_compress(plane) for plane in split(content, word, encoding, base)]
    return b"".join([struct.pack(f"<B{word}I", word, *map(len, stored)), *stored])


def estimate_shares(content: Bytes, word: int, base: Bytes | None = None) -> dict[str, float]:
    """Return by encoding which share of the bytes of `content` it takes, judged by a sample of them."""
    runs = list(_sample(content.size, word))
    sample = np.concatenate([content[run] for run in runs])
    shares = {"planes": len(encode(sample, word, "planes")) / sample.size}
    if base is not None:
        before = np.concatenate([base[run] for run in runs])
        for encoding in ("xor", "difference"):
            shares[encoding] = len(encode(sample, word, encoding, before)) / sample.size
    return shares


def is_worthwhile(share: float) -> bool:
    """Return whether an encoding that takes this share of the bytes saves enough to be decoded again."""
    return share < _WORTHWHILE


def _sample(size: int, word: int) -> Iterator[slice]:
    """Yield runs of whole words, spread over an array of `size` bytes; all of it where that is small."""
    if size <= 2 * _SAMPLE_BYTES:
        yield slice(0, size)
        return
    run = _SAMPLE_BYTES // _SAMPLE_RUNS
    for number in range(_SAMPLE_RUNS):
        start = (size - run) * number // (_SAMPLE_RUNS - 1) // word * word
        yield slice(start, start + run)


def _compress(plane: Bytes) -> bytes:
    """Return a plane as a zstd frame, or as it is where that would not pay."""
    middle = plane[max(0, plane.size // 2 - _PLANE_SAMPLE_BYTES // 2) :][:_PLANE_SAMPLE_BYTES]
    compressor = _thread_compressor()
    if plane.size > 2 * middle.size and not _is_worthwhile_plane(compressor.compress(middle.data), middle):
        return plane.tobytes()
    compressed = compressor.compress(plane.data)
    return compressed if _is_worthwhile_plane(compressed, plane) else plane.tobytes()


def _is_worthwhile_plane(compressed: bytes, plane: Bytes) -> bool:
    return len(compressed) < _WORTHWHILE_PLANE * plane.size


def _thread_compressor() -> zstandard.ZstdCompressor:
    """Return this thread's compressor: they are not safe for several."""
    found: zstandard.ZstdCompressor | None = getattr(_of_thread, "compressor", None)
    if found is None:
        found = _of_thread.compressor = zstandard.ZstdCompressor(compression_params=_ZSTD)
    return found


class ChainDecoder:
    """Decodes chains. It keeps its memory, so that the system need not give it anew. Not for several threads."""

    def __init__(self) -> None:
        # Only what is cut off is read in a way that needs a window, and is damage; it may claim any.
        self._zstd = zstandard.ZstdDecompressor(max_window_size=MAX_ENCODED_PIECE_BYTES)
        self._memory: dict[int, Bytes] = {}

    def decode(self, links: Iterable[tuple[str, bytes | memoryview]], out: Bytes) -> None:
        """Fill `out` with what a chain of encoded links gives, the first of which stands alone.

        Every link says how large its words are: equal bytes of another dtype may have been stored first. Needs memory
        of some four times the size of `out`, whatever the links claim to hold; each is asked for when those before
        are done.

        Raises:
            CorruptDataError: a link cannot be one of this size.
        """
        for place, (encoding, stored) in enumerate(links):
            assert (place == 0) == (encoding in {"raw", "planes"}), encoding
            if encoding == "raw":
                if len(stored) != out.size:
                    raise CorruptDataError(f"{len(stored)} bytes where {out.size} were expected")
                out[:] = np.frombuffer(stored, np.uint8)
            else:
                join(self._planes(memoryview(stored), out.size), encoding, out)

    def memory(self, size: int) -> Bytes:
        """Return memory for the stored bytes of one link, which is there until the next is asked for."""
        return self._memory_for(_STORED, size)

    def _planes(self, stored: memoryview, size: int) -> list[Bytes]:
        """Return the planes that encoded bytes of `size` bytes of words hold, lowest first; valid until the next."""
        word = stored[0] if stored.nbytes else 0
        if word not in WORD_BYTES or size % word or len(stored) < 1 + 4 * word:
            raise CorruptDataError(f"{len(stored)} bytes that are no planes of {size} bytes")
        lengths = struct.unpack_from(f"<{word}I", stored, 1)
        if 1 + 4 * word + sum(lengths) != len(stored):
            raise CorruptDataError(f"{len(stored)} bytes that are no {word} planes")
        planes, offset = [], 1 + 4 * word
        for number, length in enumerate(lengths):
            planes.append(self._plane(number, stored[offset : offset + length], size // word))
            offset += length
        return planes

    def _plane(self, number: int, stored: memoryview, size: int) -> Bytes:
        if len(stored) == size:
            return np.frombuffer(stored, np.uint8)
        plane = self._memory_for(number, size)
        try:
            # Into memory for a whole frame zstd decodes at once; any other frame it would read through a window.
            if zstandard.frame_content_size(stored) != size:
                raise CorruptDataError(f"a plane that is not one of {size} bytes")
            reader = self._zstd.stream_reader(stored, read_across_frames=True)
            is_whole = reader.readinto(plane.data) == size and not reader.read(1)
        except zstandard.ZstdError as error:
            raise CorruptDataError(f"a plane that zstd cannot read: {error}") from error
        if not is_whole:
            raise CorruptDataError(f"a plane that is not one frame of {size} bytes")
        return plane

    def _memory_for(self, number: int, size: int) -> Bytes:
        found = self._memory.get(number)
        if found is None or found.size < size:
            found = self._memory[number] = np.empty(size, np.uint8)
        return found[:size]


class Decoders:
    """Decoders that threads take in turn: no more decode at once than there are processors.

    Args:
        most: at once; default: as many as there are processors.
    """

    def __init__(self, most: int | None = None) -> None:
        self._idle: deque[ChainDecoder] = deque()
        self._free = threading.BoundedSemaphore(most or count_processors())

    @contextmanager
    def borrow(self) -> Iterator[ChainDecoder]:
        """Wait for a decoder, and have it to oneself. The one used last comes first: its memory is in the caches."""
        with self._free:
            try:
                decoder = self._idle.pop()
            except IndexError:
                decoder = ChainDecoder()
            try:
                yield decoder
            finally:
                self._idle.append(decoder)
