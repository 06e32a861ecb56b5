"""Splits words, or their differences to other words, into planes of bytes for `codec`, and joins them again.

Plane 0 has the lowest byte of every word, plane 1 the next one. All steps run on blocks that fit into the processor's
caches. Words of up to four bytes are split and joined by arithmetic on whole words, because that uses vector
instructions; copies of single bytes with a stride do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_WIDEST_BY_ARITHMETIC: Final = 4  # bytes of a word; wider words are copied byte by byte


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
