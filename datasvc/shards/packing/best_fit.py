"""Assigns documents to packs, token blocks of one size: best fit decreasing inside groups of consecutive documents.

In each group, documents are taken from the longest to the shortest, and each goes to the fullest pack that has room
for it (Johnson 1973, "Near-optimal bin packing algorithms"). Groups keep documents that are stored together in
packs that are read together, and bound the work: a group takes O(n log n). A document that is longer than a block is
cut into full blocks and a rest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from datasvc.keyed_random import Integers

GROUP_DOCUMENTS: Final = 2048
# A pack in the sorted list of free room is `room << _PACK_BITS | number`: one integer is faster than a pair.
_PACK_BITS: Final = 32


class Packed(NamedTuple):
    """Packs of documents, as pieces of documents in the order of the packs, and of the documents in each pack.

    Attributes:
        rows: `int64[pieces]`, index of each piece's document.
        starts: `int64[pieces]`, position of the piece in its document; 0 for a document that is not cut.
        sizes: `int64[pieces]`, number of tokens, at least 1.
        counts: `int64[packs]`, number of pieces of each pack, at least 1.
    """

    rows: Integers
    starts: Integers
    sizes: Integers
    counts: Integers


def pack_documents(lengths: Integers, block_tokens: int, *, group: int = GROUP_DOCUMENTS) -> Packed:
    """Return packs that hold every token of all documents once. The result depends on the arguments only.

    Args:
        lengths: `int64[documents]`, number of tokens of each document, in stored order; those with 0 are in no pack.
        block_tokens: largest number of tokens of a pack, at least 1.
        group: number of consecutive documents that are packed together; the last group has up to half more.
    """
    assert block_tokens >= 1
    # The pieces of all documents: each has as many full blocks as it can, and a rest.
    num_pieces = -(-lengths // block_tokens)
    rows = np.repeat(np.arange(len(lengths)), num_pieces)
    first = np.cumsum(num_pieces) - num_pieces
    starts = (np.arange(len(rows)) - first[rows]) * block_tokens
    sizes = np.minimum(lengths[rows] - starts, block_tokens)
    # A last group that is small would leave its last pack almost empty.
    num_groups = max(1, (len(lengths) + group // 2) // group)
    bounds = np.searchsorted(rows, [number * group for number in range(num_groups)]).tolist()
    packs = np.empty(len(rows), np.int64)
    num_packs = 0
    for start, stop in pairwise([*bounds, len(rows)]):
        num_packs += _pack_group(sizes[start:stop], block_tokens, packs[start:stop])
        packs[start:stop] += num_packs - (packs[start:stop].max(initial=-1) + 1)
    order = np.argsort(packs, kind="stable")
    return Packed(rows[order], starts[order], sizes[order], np.bincount(packs, minlength=num_packs))


def _pack_group(sizes: Integers, block_tokens: int, out: Integers) -> int:
    """Write the pack of each piece of a group to `out`, counted from 0, and return the number of packs."""
    free: list[int] = []  # packs with room, by ascending room
    assigned = [0] * len(sizes)
    num_packs = 0
    all_sizes = sizes.tolist()
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = all_sizes[index]
        place = bisect_left(free, size << _PACK_BITS)
        if place == len(free):
            room, pack = block_tokens, num_packs
            num_packs += 1
        else:
            room, pack = divmod(free.pop(place), 1 << _PACK_BITS)
        if room > size:
            insort(free, (room - size) << _PACK_BITS | pack)
        assigned[index] = pack
    out[:] = assigned
    return num_packs
