"""Copies the documents of packs into token blocks, and reads which of their tokens the loss counts."""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt

from datasvc.errors import BadSampleError
from datasvc.keyed_random import Integers
from datasvc.loaders.core.batches import SampleBatch, ShardPart
from datasvc.loaders.core.split_reader import Pieces
from datasvc.loaders.tokens.token_blocks import StoredBlocks, StoredLists
from datasvc.shards import Shard


def copy_packs(blocks: StoredBlocks, part: ShardPart, pieces: Pieces, out: Integers, length: Integers) -> None:
    """Write the tokens of packs to `out`, `int64[n, block]`, and the tokens of each pack to `length`, `int64[n]`.

    Masked documents, and what is after the tokens of a pack, are zeros. Raises BadSampleError: a document has fewer
    tokens than the packs have of it.
    """
    missing = ~pieces.is_masked & (
        (pieces.starts + pieces.sizes) * blocks.format.dtype.itemsize > blocks.sizes[part.rows]
    )
    if missing.any():
        raise BadSampleError(
            f"{int(missing.sum())} documents of shard {part.shard.name} have fewer tokens than their packs, such as "
            f"row {part.rows[missing][0]}: the packs are of other data, pack the split again"
        )
    firsts = np.flatnonzero(pieces.places == 0)
    lasts = np.append(firsts[1:], len(pieces.places)) - 1
    packs, sizes = part.indices[firsts], pieces.places[lasts] + pieces.sizes[lasts]
    rests = np.zeros_like(pieces.sizes)
    rests[lasts] = out.shape[1] - sizes
    tokens = blocks.join(part.rows, pieces.starts, pieces.sizes, rests, pieces.is_masked).reshape(-1, out.shape[1])
    if len(packs) == len(out):
        np.copyto(out, tokens, casting="unsafe")  # twice as fast as an assignment by ascending indices
    else:
        out[packs] = tokens
    length[packs] = sizes


def ignore_masked(batch: SampleBatch, labels: Integers, ignored: int) -> None:
    """Write `ignored` to the labels of masked documents."""
    for part in batch.parts:
        if part.pieces is not None and part.pieces.is_masked.any():
            chosen = np.flatnonzero(part.pieces.is_masked)
            places, sizes = part.pieces.places[chosen].tolist(), part.pieces.sizes[chosen].tolist()
            for index, place, size in zip(part.indices[chosen].tolist(), places, sizes, strict=True):
                labels[index, place : place + size] = ignored


class LossMasks:
    """Reads a column of lists that has a value for each token: 0 if the loss does not count the token.

    Args:
        column: name of the column.
    """

    def __init__(self, column: str) -> None:
        self._column = column
        self._lists: weakref.WeakKeyDictionary[Shard, StoredLists] = weakref.WeakKeyDictionary()

    def read(self, batch: SampleBatch, length: Integers, block: int) -> npt.NDArray[np.bool_]:
        """Return which tokens of the blocks count: `bool[n, block]`; False after the `length` tokens of a block.

        Raises:
            BadSampleError: a list has fewer values than its sample has tokens, or a shard has no lists.
        """
        counted = np.zeros((len(length), block), np.bool_)
        for part in batch.kept_parts:
            lists = self._open(part.shard)
            pieces = part.pieces
            if pieces is None:
                sizes = length[part.indices]
                starts, places = np.zeros_like(sizes), np.zeros_like(sizes)
            else:
                starts, sizes, places = pieces.starts, np.where(pieces.is_masked, 0, pieces.sizes), pieces.places
            missing = (lists.counts[part.rows] < starts + sizes) & (sizes > 0)
            if missing.any():
                row = int(part.rows[missing][0])
                raise BadSampleError(
                    f"the loss mask {self._column!r} of {part.shard.sample(row)['key']!r} has "
                    f"{lists.counts[row]} values, and the sample has at least {(starts + sizes)[missing][0]} tokens; "
                    "ingest it again with a value for each token"
                )
            firsts = (lists.starts[part.rows] + starts).tolist()
            for index, place, first, size in zip(
                part.indices.tolist(), places.tolist(), firsts, sizes.tolist(), strict=True
            ):
                counted[index, place : place + size] = lists.values[first : first + size]
        return counted

    def _open(self, shard: Shard) -> StoredLists:
        lists = self._lists.get(shard)
        if lists is None:
            if self._column not in shard.schema.names:
                raise BadSampleError(
                    f"shard {shard.name} has no column {self._column!r}, which the loss mask is read from: append "
                    "samples with loss masks, or leave out the loss mask"
                )
            lists = StoredLists(shard.column(self._column), np.bool_, "a loss mask")
            if not shard.is_partial:  # a partial shard gets more samples while it is fetched
                self._lists[shard] = lists
        return lists
