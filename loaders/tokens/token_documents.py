"""Documents in a batch of packed blocks: which token belongs to which, and where attention may not look across.

A batch is taken as one line of tokens, block after block, cut into segments: documents, or what of them lies in one
block, and the padding of each block. What a token's document, its place there, or its label is follows from the cuts.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from datasvc.keyed_random import Integers

IGNORED: Final = -100
"""Label of a token that has no next one to predict; what torch's cross entropy leaves out unasked."""


def find_segments(rows: Integers, starts: npt.NDArray[Any], length: Integers, block: int) -> Integers:
    """Return where segments begin in the line of all blocks, ascending: `int64[segments]`.

    Args:
        rows: `int64[n]`, the blocks in which documents start, in any order.
        starts: `[n]`, where they do; what lies behind a block's real tokens is left out.
        length: `int64[blocks]`, real tokens of each.
        block: tokens of a block.
    """
    firsts = np.arange(len(length)) * block
    inside = starts < length[rows]
    cuts = firsts[rows[inside]] + starts[inside]
    return np.unique(np.concatenate([firsts, cuts, (firsts + length)[length < block]]))


def number_documents(segments: Integers, length: Integers, block: int, out: npt.NDArray[np.int32]) -> None:
    """Write each token's document, counted from 0 in its block, -1 for padding: `int32[blocks, block]`."""
    if not len(segments):
        return
    row, place = np.divmod(segments, block)
    numbers = np.arange(len(segments)) - np.searchsorted(row, np.arange(len(length)))[row]
    numbers[place >= length[row]] = -1
    out.reshape(-1)[:] = np.repeat(numbers.astype(np.int32), segment_sizes(segments, out.size))


def number_positions(segments: Integers, out: Integers) -> None:
    """Write each token's place in its segment, counted from 0: `int64[blocks, block]`."""
    np.subtract(_ramp(out.size), np.repeat(segments, segment_sizes(segments, out.size)), out=out.reshape(-1))


@functools.lru_cache(maxsize=4)
def _ramp(size: int) -> Integers:
    """Return 0, 1, ...: kept, because fresh memory costs several times what is done with it."""
    return np.arange(size)


def segment_sizes(segments: Integers, num_tokens: int) -> Integers:
    """Return the tokens of each segment: `int64[segments]`."""
    return np.diff(segments, append=num_tokens)


def write_labels(tokens: Integers, length: Integers, out: Integers, *, segments: Integers | None) -> None:
    """Write the next token of each, IGNORED where there is none.

    Args:
        tokens: `int64[blocks, block]`.
        length: `int64[blocks]`, real tokens of each.
        out: as `tokens`.
        segments: from `find_segments`: the last token of each has no label; None: of each block's real tokens.
    """
    block = tokens.shape[1]
    out[:, :-1] = tokens[:, 1:]
    out[:, -1] = IGNORED
    short = np.flatnonzero(length < block)
    if len(short):
        out[short] = np.where(np.arange(block) < length[short, None] - 1, out[short], IGNORED)
    if segments is not None:
        out.reshape(-1)[segments[1:] - 1] = IGNORED
