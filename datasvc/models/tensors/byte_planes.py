"""Splits words into planes of their bytes and joins them again, optionally as differences to other words.

All steps run on blocks that fit into the processor's caches. Arithmetic and casts of whole words use vector
instructions, while copies of single bytes with a stride do not: up to words of four bytes arithmetic is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
_Words = np.ndarray[Any, Any]

WORD_BYTES: Final = (1, 2, 4, 8)

_SIGNED: Final = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BLOCK_WORDS: Final = 128 << 10
"""Words per block: few enough for the caches, many enough that threads rarely compete for the interpreter lock."""
_WIDEST_MULTIPLIED: Final = 4


def split(content: Bytes, word: int, encoding: str, base: Bytes | None = None) -> Bytes:
    """Return the planes of words, or of their differences to the words of `base`.

    Args:
        content: whole little-endian words.
        word: size of a word in bytes: 1, 2, 4 or 8.
        encoding: "planes"; or "xor" or "difference", which need a base.
        base: earlier content of the same size.

    Returns:
        `uint8[word, words]`, lowest bytes first.
    """
    words = content.view(_UNSIGNED[word])
    planes = np.empty((word, words.size), np.uint8)
    for start in range(0, words.size, _BLOCK_WORDS):
        place = slice(start, start + _BLOCK_WORDS)
        block = words[place]
        if encoding != "planes":
            assert base is not None, encoding
            block = _subtract(block, base.view(_UNSIGNED[word])[place], encoding)
        if word > _WIDEST_MULTIPLIED:
            planes[:, place] = block.view(np.uint8).reshape(-1, word).T
            continue
        for number, plane in enumerate(planes):
            plane[place] = block >> (8 * number) if number else block
    return planes


def join(planes: Sequence[Bytes], encoding: str, out: Bytes) -> None:
    """Set `out` to the words of the planes, or apply the planes to it as a difference.

    Args:
        planes: one plane for each byte of a word, lowest first, each with one byte per word.
        encoding: as in `split`.
        out: C-contiguous; for "xor" and "difference" it holds the earlier content.
    """
    word = len(planes)
    words = out.view(_UNSIGNED[word])
    longest = min(words.size, _BLOCK_WORDS)
    memory = _PlaneBuffers(longest, word)
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


class _PlaneBuffers:
    """Memory for words of two and four bytes that are being joined to larger ones.

    Args:
        max_words: number of words per block.
        word: size of the largest words in bytes.

    Attributes:
        narrow: memory for words that will be widened, by word size.
        low: memory for the lower halves of words, by word size.
    """

    def __init__(self, max_words: int, word: int) -> None:
        sizes = [size for size in (2, 4) if size <= word <= _WIDEST_MULTIPLIED]
        self.narrow: dict[int, _Words] = {size: np.empty(max_words, _UNSIGNED[size]) for size in sizes if size < word}
        self.low: dict[int, _Words] = {size: np.empty(max_words, _UNSIGNED[size]) for size in sizes}


def _join_block(planes: Sequence[Bytes], out: _Words, memory: _PlaneBuffers) -> None:
    """Set each word to its bytes from the planes."""
    word = len(planes)
    if word == 1:
        out[:] = planes[0]
    elif word > _WIDEST_MULTIPLIED:
        single: Bytes = out.view(np.uint8).reshape(-1, word)
        for number, plane in enumerate(planes):
            single[:, number] = plane
    else:
        half = word // 2
        low = memory.low[word][: out.size]
        _join_and_widen(planes[half:], out, memory)
        # Widen first, then multiply: a shift takes twice as long, and so does an operation on words of two sizes.
        np.multiply(out, 1 << 8 * half, out=out)
        _join_and_widen(planes[:half], low, memory)
        np.bitwise_or(out, low, out=out)


def _join_and_widen(planes: Sequence[Bytes], out: _Words, memory: _PlaneBuffers) -> None:
    """Set each word to a narrower one that consists of these planes."""
    if len(planes) == 1:
        out[:] = planes[0]
        return
    narrow = memory.narrow[len(planes)][: out.size]
    _join_block(planes, narrow, memory)
    out[:] = narrow


def _subtract(block: _Words, base: _Words, encoding: str) -> _Words:
    """Return the differences of words; the sign of an integer difference is folded into the lowest bit."""
    if encoding == "xor":
        return np.bitwise_xor(block, base)
    word = block.itemsize
    difference = np.subtract(block, base).view(_SIGNED[word])
    sign = difference >> (8 * word - 1)
    difference <<= 1
    difference ^= sign
    return difference.view(block.dtype)


def _unfold(differences: _Words, signs: _Words) -> None:
    """Restore the signs of differences, in place; `signs` is scratch memory."""
    np.bitwise_and(differences, 1, out=signs)
    np.negative(signs, out=signs)
    differences >>= 1
    differences ^= signs
