"""Chunk codec: byte i of all numbers of a chunk forms plane i, and each plane is compressed by zstd.

The codec is lossless for any bits. Trained weights have similar exponents, and noise in their low bits, so planes
compress better than whole numbers. Even the upper bits of the mantissa change little between two checkpoints, so the
difference to an earlier chunk may compress better still (as in LightRW, ZipNN and Delta-DNN). There are two kinds:
XOR, and the difference of the bits as integers. The sign of an integer difference is stored as its lowest bit. So the
upper planes of small changes are zeros, even if a change is negative.

Functions take and return arrays `uint8[size]` of whole words (little-endian numbers), and release the GIL.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from datasvc.errors import CorruptDataError
from datasvc.models.tensors.tensor_table import ITEM_BYTES, MAX_ENCODED_CHUNK_BYTES
from datasvc.threads import count_processors

__all__ = ["Bytes", "ChainDecoder", "Decoders", "encode", "is_worthwhile", "try_encodings", "word_bytes"]

# In a plane, some bytes are frequent, but sequences rarely repeat. So for a ResNet-50, levels 2 and 3 gave 1 % more
# bytes than level 1. Searching only for few and long repeats gives 0.7 % fewer bytes, and decodes faster.
_ZSTD: Final = zstandard.ZstdCompressionParameters(compression_level=1, min_match=7, hash_log=8, window_log=19)
# `try_encodings` encodes a sample of this size, which consists of this number of runs of bytes.
_SAMPLE_BYTES: Final = 128 << 10
_SAMPLE_RUNS: Final = 4
# `_compress` first compresses a sample of this size, from the middle of a plane.
_PLANE_SAMPLE_BYTES: Final = 32 << 10
# Content, or a plane, is encoded only below this share of its raw size, because raw bytes need no decoding.
_WORTHWHILE: Final = 0.98
_WORTHWHILE_PLANE: Final = 0.95

# Key in `ChainDecoder._memory` of the memory for stored bytes; the key for a plane is the number of the plane.
_STORED: Final = -1

_thread_state = threading.local()


Bytes = npt.NDArray[np.uint8]
_Words = np.ndarray[Any, Any]

WORD_BYTES: Final = (1, 2, 4, 8)

_SIGNED: Final = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BLOCK_WORDS: Final = 128 << 10
"""Words per block: few enough for the caches, many enough that threads rarely compete for the interpreter lock."""
_WIDEST_BY_ARITHMETIC: Final = 4  # bytes of a word; wider words are copied byte by byte


def word_bytes(dtype: str) -> int:
    """Return the word size of a dtype, in bytes. An element is one word; a complex element is two."""
    item_bytes = ITEM_BYTES[dtype]
    return item_bytes // 2 if dtype.startswith("complex") else item_bytes


def encode(content: Bytes, word: int, encoding: str, base: Bytes | None = None) -> bytes:
    """Encode `content` as planes.

    Args:
        content: whole words.
        word: size of a word in bytes: 1, 2, 4 or 8.
        encoding: "planes"; or "xor" or "difference", which need a base.
        base: earlier content of the same size.
    """
    compressor = _thread_compressor()
    stored = [_compress(plane, compressor) for plane in split(content, word, encoding, base)]
    # Header: the word size and the stored length of each plane.
    return b"".join([struct.pack(f"<B{word}I", word, *map(len, stored)), *stored])


class EncodingTrial(NamedTuple):
    """Result of encoding a sample.

    Attributes:
        share: encoded share of the sample's bytes.
        stored: encoded bytes of the content if the sample was the whole content; else None.
    """

    share: float
    stored: bytes | None


def try_encodings(content: Bytes, word: int, base: Bytes | None = None) -> dict[str, EncodingTrial]:
    """Encode a sample of `content`, or all of it if it is small, as planes and, with a base, as differences."""
    is_whole = content.size <= 2 * _SAMPLE_BYTES
    sample, base_sample = content, base
    if not is_whole:
        # Runs of whole words, spread evenly from the beginning of the content to its end.
        run_bytes = _SAMPLE_BYTES // _SAMPLE_RUNS
        last_start = content.size - run_bytes
        starts = [last_start * number // (_SAMPLE_RUNS - 1) // word * word for number in range(_SAMPLE_RUNS)]
        sample = np.concatenate([content[start : start + run_bytes] for start in starts])
        base_sample = None if base is None else np.concatenate([base[start : start + run_bytes] for start in starts])
    trials = {}
    for encoding in ("planes",) if base_sample is None else ("planes", "xor", "difference"):
        stored = encode(sample, word, encoding, base_sample)
        trials[encoding] = EncodingTrial(len(stored) / sample.size, stored if is_whole else None)
    return trials


def is_worthwhile(share: float) -> bool:
    """Return whether an encoding to `share` of the raw bytes saves enough to be worth its decoding."""
    return share < _WORTHWHILE


def _compress(plane: Bytes, compressor: zstandard.ZstdCompressor) -> bytes:
    """Return a plane as a zstd frame, or raw if compression saves too little."""
    # Try a sample from the middle first: most planes that do not compress are found by it, at little cost.
    middle = plane[max(0, plane.size // 2 - _PLANE_SAMPLE_BYTES // 2) :][:_PLANE_SAMPLE_BYTES]
    if plane.size > 2 * middle.size and len(compressor.compress(middle.data)) >= _WORTHWHILE_PLANE * middle.size:
        return plane.tobytes()
    compressed = compressor.compress(plane.data)
    return compressed if len(compressed) < _WORTHWHILE_PLANE * plane.size else plane.tobytes()


def _thread_compressor() -> zstandard.ZstdCompressor:
    """Return a compressor for this thread alone: a compressor is not safe for several threads."""
    compressor: zstandard.ZstdCompressor | None = getattr(_thread_state, "compressor", None)
    if compressor is None:
        compressor = _thread_state.compressor = zstandard.ZstdCompressor(compression_params=_ZSTD)
    return compressor


class ChainDecoder:
    """Decodes chains: a chunk, and differences that lead from it to a later one. Not safe for several threads."""

    def __init__(self) -> None:
        # A frame claims the size of the window, memory that zstd allocates. Limit it for damaged frames; others need
        # no window, see `_decode_plane`.
        self._zstd = zstandard.ZstdDecompressor(max_window_size=MAX_ENCODED_CHUNK_BYTES)
        self._memory: dict[int, Bytes] = {}  # reused between calls

    def decode(self, links: Iterable[tuple[str, bytes | memoryview]], out: Bytes) -> None:
        """Decode links, pairs of encoding and stored bytes, into `out`.

        A link that encodes a whole chunk replaces the content of `out`; a difference is applied to it. Chunks of
        equal bytes are stored once, even if their dtypes differ, so each link has its own word size. Decoding needs
        about four times the memory of `out`, whatever sizes the links claim.

        Raises:
            CorruptDataError: a link does not decode to the size of `out`.
        """
        for encoding, stored in links:
            if encoding == "raw":
                if len(stored) != out.size:
                    raise CorruptDataError(f"{len(stored)} bytes where {out.size} were expected")
                out[:] = np.frombuffer(stored, np.uint8)
            else:
                join(self._planes(memoryview(stored), out.size), encoding, out)

    def memory(self, size: int) -> Bytes:
        """Return memory for the stored bytes of one link; valid until the next call."""
        return self._memory_for(_STORED, size)

    def _planes(self, stored: memoryview, size: int) -> list[Bytes]:
        """Return the planes of encoded bytes that decode to `size` bytes, lowest first; valid until the next call."""
        word = stored[0] if stored.nbytes else 0
        if word not in WORD_BYTES or size % word or len(stored) < 1 + 4 * word:
            raise CorruptDataError(f"{len(stored)} stored bytes are not planes of {size} bytes")
        lengths = struct.unpack_from(f"<{word}I", stored, 1)
        if 1 + 4 * word + sum(lengths) != len(stored):
            raise CorruptDataError(f"{len(stored)} stored bytes do not have the lengths of their {word} planes")
        planes, offset = [], 1 + 4 * word
        for number, length in enumerate(lengths):
            plane = stored[offset : offset + length]
            # A plane of its full size is stored raw.
            if length == size // word:
                planes.append(np.frombuffer(plane, np.uint8))
            else:
                planes.append(self._decode_plane(number, plane, size // word))
            offset += length
        return planes

    def decode_plane(self, number: int, stored: memoryview, size: int) -> Bytes:
        """Return the plane `number` of `size` bytes from its stored bytes; valid until the next call for this number.

        Raises CorruptDataError: the bytes do not decode to this size.
        """
        return np.frombuffer(stored, np.uint8) if len(stored) == size else self._decode_plane(number, stored, size)

    def _decode_plane(self, number: int, stored: memoryview, size: int) -> Bytes:
        """Return a plane of `size` bytes from its zstd frame, in reused memory. Raises CorruptDataError."""
        plane = self._memory_for(number, size)
        try:
            # zstd decodes without a window if the memory has exactly the size of the frame's content.
            if zstandard.frame_content_size(stored) != size:
                raise CorruptDataError(f"a plane does not have {size} bytes")
            reader = self._zstd.stream_reader(stored, read_across_frames=True)
            # Nothing may follow the frame.
            is_whole = reader.readinto(plane.data) == size and not reader.read(1)
        except zstandard.ZstdError as error:
            raise CorruptDataError(f"zstd cannot decode a plane: {error}") from error
        if not is_whole:
            raise CorruptDataError(f"a plane is not one frame of {size} bytes")
        return plane

    def _memory_for(self, number: int, size: int) -> Bytes:
        """Return reused memory for the plane `number`, or for `_STORED`."""
        memory = self._memory.get(number)
        if memory is None or memory.size < size:
            memory = self._memory[number] = np.empty(size, np.uint8)
        return memory[:size]


class Decoders:
    """A pool of decoders, so that no more threads decode at once than there are processors.

    Args:
        max_decoders: largest number of decoders in use; default: the number of processors.
    """

    def __init__(self, max_decoders: int | None = None) -> None:
        self._idle: deque[ChainDecoder] = deque()
        self._permits = threading.BoundedSemaphore(max_decoders or count_processors())

    @contextmanager
    def borrow(self) -> Iterator[ChainDecoder]:
        """Wait for a free decoder and borrow the one used last, because its memory is in the CPU caches."""
        with self._permits:
            try:
                decoder = self._idle.pop()
            except IndexError:
                decoder = ChainDecoder()
            try:
                yield decoder
            finally:
                self._idle.append(decoder)


# Plane 0 has the lowest byte of every word, plane 1 the next one. All steps run on blocks that fit into the
# processor's caches. Words of up to four bytes are split and joined by arithmetic on whole words, because that uses
# vector instructions; copies of single bytes with a stride do not.


def split(content: Bytes, word: int, encoding: str, base: Bytes | None = None) -> Bytes:
    """Return the planes of words, or of their differences to the words of `base`.

    Args:
        content: whole little-endian words.
        word: size of a word in bytes: 1, 2, 4 or 8.
        encoding: "planes"; or "xor" or "difference", which need a base.
        base: earlier content of the same size.

    Returns:
        `uint8[word, number of words]`, lowest bytes first.
    """
    words = content.view(_UNSIGNED[word])
    planes = np.empty((word, words.size), np.uint8)
    for start in range(0, words.size, _BLOCK_WORDS):
        span = slice(start, start + _BLOCK_WORDS)
        block = words[span]
        if encoding != "planes":
            assert base is not None, encoding
            block = _subtract(block, base.view(_UNSIGNED[word])[span], encoding)
        if word > _WIDEST_BY_ARITHMETIC:
            planes[:, span] = block.view(np.uint8).reshape(-1, word).T
            continue
        for number, plane in enumerate(planes):
            # The assignment to uint8 keeps the lowest byte. Plane 0 needs no shift.
            plane[span] = block >> (8 * number) if number else block
    return planes


def join(planes: Sequence[Bytes], encoding: str, out: Bytes) -> None:
    """Set `out` to the words of the planes; with "xor" or "difference", apply the words to `out` as a difference.

    Args:
        planes: one plane for each byte of a word, lowest first, each with one byte per word.
        encoding: as in `split`.
        out: C-contiguous; for "xor" and "difference", its bytes before the call are the earlier content.
    """
    word = len(planes)
    words = out.view(_UNSIGNED[word])
    longest = min(words.size, _BLOCK_WORDS)
    # Scratch memory of `_join_block` by word size: for the low halves of words, widened to this size, and for halves
    # before they are widened.
    memory = {
        size: (np.empty(longest, _UNSIGNED[size]), np.empty(longest, _UNSIGNED[size // 2]))
        for size in (2, 4)
        if size <= word <= _WIDEST_BY_ARITHMETIC
    }
    differences, signs = np.empty((2, longest if encoding != "planes" else 0), words.dtype)
    for start in range(0, words.size, _BLOCK_WORDS):
        target = words[start : start + _BLOCK_WORDS]
        block = [plane[start : start + _BLOCK_WORDS] for plane in planes]
        size = target.size
        if encoding == "planes":
            _join_block(block, target, memory)
            continue
        _join_block(block, differences[:size], memory)
        if encoding == "difference":
            _unfold(differences[:size], signs[:size])
            target += differences[:size]
        else:
            target ^= differences[:size]


def _join_block(planes: Sequence[Bytes], out: _Words, memory: Mapping[int, tuple[_Words, _Words]]) -> _Words:
    """Set each word of `out` to its bytes from the planes; return `out`. `memory` is scratch memory, see `join`."""
    word = len(planes)
    if word == 1:
        out[:] = planes[0]
    elif word > _WIDEST_BY_ARITHMETIC:
        bytes_of_words: Bytes = out.view(np.uint8).reshape(-1, word)
        for number, plane in enumerate(planes):
            bytes_of_words[:, number] = plane
    else:
        half = word // 2
        low, narrow = memory[word]
        low, narrow = low[: out.size], narrow[: out.size]
        out[:] = planes[1] if half == 1 else _join_block(planes[half:], narrow, memory)
        # Widen first, then multiply: a shift takes twice as long, and so does an operation on words of two sizes.
        np.multiply(out, 1 << 8 * half, out=out)
        low[:] = planes[0] if half == 1 else _join_block(planes[:half], narrow, memory)
        np.bitwise_or(out, low, out=out)
    return out


def _subtract(block: _Words, base: _Words, encoding: str) -> _Words:
    """Return the differences of words. For "difference", move each sign to the lowest bit (zigzag encoding)."""
    if encoding == "xor":
        return np.bitwise_xor(block, base)
    word = block.itemsize
    difference = np.subtract(block, base).view(_SIGNED[word])
    sign = difference >> (8 * word - 1)  # 0 or -1
    difference <<= 1
    difference ^= sign
    return difference.view(block.dtype)


def _unfold(differences: _Words, signs: _Words) -> None:
    """Move the signs of differences back from the lowest bit, in place; `signs` is scratch memory."""
    np.bitwise_and(differences, 1, out=signs)
    np.negative(signs, out=signs)
    differences >>= 1
    differences ^= signs
