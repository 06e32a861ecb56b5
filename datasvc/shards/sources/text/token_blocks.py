"""Pack documents into token blocks of one length, for language models; only the last block may have padding.

Documents are concatenated, and the result is cut into blocks. No token is lost or repeated: the tokens of all blocks
in order, without the padding, are the concatenated documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Blocks:
    """Consecutive token blocks of one part of a source.

    Attributes:
        tokens: `uint16` or `uint32[blocks, block_tokens]`.
        lengths: `int32[blocks]`, number of tokens without padding: only the last block of a part may have padding.
        starts: `int32[documents]`, for each document that starts in one of the blocks, its position in that block.
        start_offsets: `int32[blocks + 1]`; the entries of block i in `starts` begin at `start_offsets[i]`, and end
            before `start_offsets[i + 1]`.
    """

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    start_offsets: npt.NDArray[np.int32]


class BlockPacker:
    """Packs documents into blocks.

    Args:
        block_tokens: tokens per block.
        dtype: type of a token.
        padding: token that fills the last block.
    """

    def __init__(self, block_tokens: int, dtype: npt.DTypeLike, padding: int) -> None:
        self._block_tokens, self._dtype, self._padding = block_tokens, np.dtype(dtype), padding
        # Tokens that are not in a block yet, and the positions in them at which documents start.
        self._documents: list[npt.NDArray[Any]] = []
        self._starts: list[int] = []
        self._num_tokens = 0

    @property
    def num_full(self) -> int:
        """Number of full blocks that can be taken."""
        return self._num_tokens // self._block_tokens

    def add(self, tokens: npt.NDArray[Any]) -> None:
        """Add the tokens of one document, `int[tokens]`, not empty. They end with the end-of-text token, if any."""
        assert len(tokens)
        self._starts.append(self._num_tokens)
        self._documents.append(tokens.astype(self._dtype, copy=False))
        self._num_tokens += len(tokens)

    def take(self, num_blocks: int) -> Blocks:
        """Remove and return the first `num_blocks` full blocks, from 1 to `num_full`."""
        assert 1 <= num_blocks <= self.num_full
        num_taken = num_blocks * self._block_tokens
        tokens = self._documents[0] if len(self._documents) == 1 else np.concatenate(self._documents)
        num_starts = int(np.searchsorted(self._starts, num_taken))  # documents that start in the taken blocks
        blocks = self._to_blocks(tokens[:num_taken], np.array(self._starts[:num_starts], np.int64))
        # Keep the tokens after the taken blocks, and the starts of the documents in these tokens.
        self._documents = [tokens[num_taken:]]
        self._starts = [start - num_taken for start in self._starts[num_starts:]]
        self._num_tokens -= num_taken
        return blocks

    def finish(self) -> Blocks | None:
        """Return the tokens after the last full block as one padded block; None if there are none.

        Take all full blocks first.
        """
        assert not self.num_full
        if not self._num_tokens:
            return None
        tokens = np.full(self._block_tokens, self._padding, self._dtype)
        tokens[: self._num_tokens] = np.concatenate(self._documents)
        blocks = self._to_blocks(tokens, np.array(self._starts, np.int64))
        blocks.lengths[-1] = self._num_tokens
        self._documents, self._starts, self._num_tokens = [], [], 0
        return blocks

    def _to_blocks(self, tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> Blocks:
        """Divide `tokens` into full blocks. `starts`: positions at which documents start in `tokens`, ascending."""
        num_blocks = len(tokens) // self._block_tokens
        # Starts are ascending, so the sum of the counts of the blocks before a block is its offset in `starts`.
        counts = np.bincount(starts // self._block_tokens, minlength=num_blocks)
        return Blocks(
            tokens=tokens.reshape(num_blocks, self._block_tokens),
            lengths=np.full(num_blocks, self._block_tokens, np.int32),
            starts=(starts % self._block_tokens).astype(np.int32),
            start_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        )
