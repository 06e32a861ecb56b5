"""Finds the documents in a batch of token blocks for `TokenDecoder`, and writes document ids, positions and labels.

The tokens of a batch are treated as one flat array, block after block, and divided into segments. A segment is the
part of a document that is in one block, or the padding of a block.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from datasvc.keyed_random import Integers

IGNORED: Final = -100
"""Label of a token without a next token; the default `ignore_index` of torch's cross entropy."""


def find_segments(rows: Integers, starts: npt.NDArray[Any], length: Integers, block: int) -> Integers:
    """Return the starts of segments in the flat array of tokens, ascending, `int64[segments]`.

    Args:
        rows: `int64[n]`, for each start of a document, the index of its block; in any order.
        starts: `[n]`, position of each start in its block. Positions after the real tokens of the block are ignored.
        length: `int64[blocks]`, number of real tokens of each block.
        block: tokens of a block.
    """
    # Every block begins a segment, and so does its padding.
    block_starts = np.arange(len(length)) * block
    padding_starts = (block_starts + length)[length < block]
    is_real = starts < length[rows]
    document_starts = block_starts[rows[is_real]] + starts[is_real]
    # Remove equal starts: a document may start at the beginning of its block.
    return np.unique(np.concatenate([block_starts, document_starts, padding_starts]))


def number_documents(segments: Integers, length: Integers, block: int, out: npt.NDArray[np.int32]) -> None:
    """Write each token's document number to `out`, `int32[blocks, block]`, from 0 in each block; -1 for padding."""
    if not len(segments):
        return  # a batch without blocks
    row, start = np.divmod(segments, block)  # the block of each segment, and the segment's start in it
    # Index of each segment, minus that of the first segment of its block.
    numbers = np.arange(len(segments)) - np.searchsorted(row, np.arange(len(length)))[row]
    # A segment that starts after the real tokens of its block is padding.
    numbers[start >= length[row]] = -1
    out.reshape(-1)[:] = np.repeat(numbers.astype(np.int32), segment_sizes(segments, out.size))


def number_positions(segments: Integers, out: Integers) -> None:
    """Write the position of each token in its segment to `out`, `int64[blocks, block]`, from 0."""
    np.subtract(_ramp(out.size), np.repeat(segments, segment_sizes(segments, out.size)), out=out.reshape(-1))


@functools.lru_cache(maxsize=4)
def _ramp(size: int) -> Integers:
    """Return `arange(size)`, cached because allocating memory takes several times as long as filling it.

    Callers share the array and must not change it.
    """
    return np.arange(size)


def segment_sizes(segments: Integers, num_tokens: int) -> Integers:
    """Return the number of tokens of each segment, `int64[segments]`."""
    return np.diff(segments, append=num_tokens)


def write_labels(tokens: Integers, length: Integers, out: Integers, *, segments: Integers | None) -> None:
    """Write the label of each token to `out`: the token after it, or IGNORED if it has no label.

    Args:
        tokens: `int64[blocks, block]`.
        length: `int64[blocks]`, number of real tokens of each block.
        out: `int64[blocks, block]`.
        segments: result of `find_segments`, for labels within documents: the last token of each segment has no label.
            None, for labels across documents: only the last real token of each block has no label.
    """
    block = tokens.shape[1]
    out[:, :-1] = tokens[:, 1:]
    out[:, -1] = IGNORED
    short = np.flatnonzero(length < block)
    if len(short):
        # The last real token and the padding after it have no label.
        out[short] = np.where(np.arange(block) < length[short, None] - 1, out[short], IGNORED)
    if segments is not None:
        # The last token of each segment. The last segment of all ends with a block, and has its IGNORED already.
        out.reshape(-1)[segments[1:] - 1] = IGNORED
