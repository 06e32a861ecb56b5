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
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from datasvc.errors import CorruptDataError
from datasvc.models.records import ITEM_BYTES

Bytes = npt.NDArray[np.uint8]

# On planes of a ResNet-50 levels 2 and 3 gave 1 % more bytes than level 1, and took up to twice the time: what there
# is to gain lies in the frequencies of bytes, not in repeats.
_ZSTD_LEVEL: Final = 1
_BLOCK_WORDS: Final = 32 << 10
"""Words that pass through all steps at once, so that they stay in the processor's cache."""
_SAMPLE_BYTES: Final = 128 << 10
_SAMPLE_RUNS: Final = 4
_PLANE_SAMPLE_BYTES: Final = 32 << 10
# What compresses by less is kept as it is: to read it back costs nothing then.
_WORTHWHILE: Final = 0.98
# A difference lengthens the chain that a reader follows.
_WORTHWHILE_DIFFERENCE: Final = 0.95
_SIGNED: Final = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

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
    stored = [_compress(plane) for plane in _split(content, word, encoding, base)]
    return b"".join([struct.pack(f"<B{word}I", word, *map(len, stored)), *stored])


def decode(links: Sequence[tuple[str, bytes | memoryview]], out: Bytes) -> None:
    """Fill `out` with what a chain of encoded links gives, the first of which stands alone.

    Every link says how large its words are: equal bytes of another dtype may have been stored first. Needs memory of
    twice the size of `out`, whatever the links claim to hold.

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
            _apply(_planes(stored, out.size), encoding, out)


def choose_encoding(content: Bytes, word: int, base: Bytes | None = None) -> str:
    """Return the encoding that makes a sample of `content` smallest: "raw", "planes", "xor" or "difference"."""
    runs = list(_sample(content.size, word))
    sample = np.concatenate([content[run] for run in runs])
    sizes = {"planes": len(encode(sample, word, "planes"))}
    if base is not None:
        before = np.concatenate([base[run] for run in runs])
        for encoding in ("xor", "difference"):
            sizes[encoding] = int(len(encode(sample, word, encoding, before)) / _WORTHWHILE_DIFFERENCE)
    smallest = min(sizes, key=lambda encoding: sizes[encoding])
    return smallest if sizes[smallest] < _WORTHWHILE * sample.size else "raw"


def is_worthwhile(stored_bytes: int, size_bytes: int) -> bool:
    """Return whether an encoding saves enough to be decoded again."""
    return stored_bytes < _WORTHWHILE * size_bytes


def _sample(size: int, word: int) -> Iterator[slice]:
    """Yield runs of whole words, spread over an array of `size` bytes; all of it where that is small."""
    if size <= 2 * _SAMPLE_BYTES:
        yield slice(0, size)
        return
    run = _SAMPLE_BYTES // _SAMPLE_RUNS
    for number in range(_SAMPLE_RUNS):
        start = (size - run) * number // (_SAMPLE_RUNS - 1) // word * word
        yield slice(start, start + run)


def _split(content: Bytes, word: int, encoding: str, base: Bytes | None) -> Bytes:
    """Return the planes `uint8[word, words]`, lowest bytes first."""
    words = content.size // word
    planes = np.empty((word, words), np.uint8)
    for start in range(0, words, _BLOCK_WORDS):
        place = slice(start, min(start + _BLOCK_WORDS, words))
        block = content[place.start * word : place.stop * word]
        if encoding != "planes":
            assert base is not None, encoding
            block = _difference(block, base[place.start * word : place.stop * word], word, encoding)
        planes[:, place] = block.reshape(-1, word).T
    return planes


def _difference(block: Bytes, base: Bytes, word: int, encoding: str) -> Bytes:
    if encoding == "xor":
        return np.bitwise_xor(block, base)
    difference = np.subtract(block.view(_SIGNED[word]), base.view(_SIGNED[word]))
    sign = difference >> (8 * word - 1)
    difference <<= 1
    difference ^= sign
    folded: Bytes = difference.view(np.uint8)
    return folded


def _apply(planes: Sequence[Bytes], encoding: str, out: Bytes) -> None:
    """Join planes to words; set `out` to them, or change it by them."""
    word, words = len(planes), planes[0].size
    joined = np.empty((min(words, _BLOCK_WORDS), word), np.uint8)
    for start in range(0, words, _BLOCK_WORDS):
        stop = min(start + _BLOCK_WORDS, words)
        target = out[start * word : stop * word]
        block = target.reshape(-1, word) if encoding == "planes" else joined[: stop - start]
        for number, plane in enumerate(planes):
            block[:, number] = plane[start:stop]
        if encoding == "xor":
            target ^= block.reshape(-1)
        elif encoding == "difference":
            _add(block.reshape(-1).view(_UNSIGNED[word]), target.view(_UNSIGNED[word]))


def _add(difference: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    """Unfold the sign of each difference, and add it."""
    sign = difference & 1
    np.negative(sign, out=sign)
    difference >>= 1
    difference ^= sign
    target += difference


def _compress(plane: Bytes) -> bytes:
    """Return a plane as a zstd frame, or as it is where that would not pay."""
    middle = plane[max(0, plane.size // 2 - _PLANE_SAMPLE_BYTES // 2) :][:_PLANE_SAMPLE_BYTES]
    compressor = _thread_compressor()
    if plane.size > 2 * middle.size and not is_worthwhile(len(compressor.compress(middle.data)), middle.size):
        return plane.tobytes()
    compressed = compressor.compress(plane.data)
    return compressed if is_worthwhile(len(compressed), plane.size) else plane.tobytes()


def _planes(stored: bytes | memoryview, size: int) -> list[Bytes]:
    """Return the planes that encoded bytes of `size` bytes of words hold, lowest first. Raises CorruptDataError."""
    view = memoryview(stored)
    word = view[0] if view.nbytes else 0
    if word not in _SIGNED or size % word or len(view) < 1 + 4 * word:
        raise CorruptDataError(f"{len(view)} bytes that are no planes of {size} bytes")
    lengths = struct.unpack_from(f"<{word}I", view, 1)
    if 1 + 4 * word + sum(lengths) != len(view):
        raise CorruptDataError(f"{len(view)} bytes that are no {word} planes")
    planes, offset = [], 1 + 4 * word
    for length in lengths:
        planes.append(_decompress(view[offset : offset + length], size // word))
        offset += length
    return planes


def _decompress(stored: memoryview, size: int) -> Bytes:
    if len(stored) == size:
        return np.frombuffer(stored, np.uint8)
    try:
        # A frame says how much it holds, and zstandard allocates that much: believe no more than what is expected.
        if zstandard.frame_content_size(stored) != size:
            raise CorruptDataError(f"a plane that is not one of {size} bytes")
        found = _thread_decompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"a plane that zstd cannot read: {error}") from error
    if len(found) != size:
        raise CorruptDataError(f"a plane of {len(found)} bytes where {size} were expected")
    return np.frombuffer(found, np.uint8)


def _thread_compressor() -> zstandard.ZstdCompressor:
    """Return this thread's compressor: they are not safe for several."""
    found: zstandard.ZstdCompressor | None = getattr(_of_thread, "compressor", None)
    if found is None:
        found = _of_thread.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    return found


def _thread_decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_of_thread, "decompressor", None)
    if found is None:
        found = _of_thread.decompressor = zstandard.ZstdDecompressor()
    return found
