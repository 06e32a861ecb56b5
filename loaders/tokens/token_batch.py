"""The batch type of `TokenLoader`, of NumPy arrays or of tensors that use the same memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from datasvc.extras import explain_missing
from datasvc.keyed_random import Integers
from datasvc.loaders.core.batch import Batch, register_tree
from datasvc.shown import Shown

if TYPE_CHECKING:
    import torch

A = TypeVar("A")


@dataclass(frozen=True, repr=False)
class TokenBatch(Shown, Batch[A]):
    """One rank's part of a global batch. It unpacks as `(tokens, labels)`.

    Arrays are NumPy arrays, or tensors on the CPU. The loader does not reuse their memory while a reference to it
    exists. Attributes that were not requested are None.

    Attributes:
        tokens: `int64[n, block]`.
        length: `int64[n]`, number of real tokens of each block. Padding tokens follow them. 0 for padding samples.
        mask: `bool[n]`, False for padding samples of the last batch.
        epoch: epoch of the batch, counted from 0.
        positions: `int64[n]`, positions of the samples in the epoch.
        labels: `int64[n, block]`, the token that follows each token; -100 if there is none.
        document_ids: `int32[n, block]`, number of each token's document, from 0 in each block; -1 for padding.
        position_ids: `int64[n, block]`, position of each token in the part of its document that is in the block.
        cu_seqlens: `int32[segments + 1]`, starts of the segments in `tokens.reshape(-1)`, followed by the size of
            that array. A segment is a document's part of a block, or a block's padding. Attention kernels for
            variable lengths take this array.
        max_seqlen: number of tokens of the longest segment.
        sources: `int64[n]`, for a mixture: index of each sample's split in `mixture.splits` and `mixture.names`; None
            for a single split.
    """

    tokens: A
    length: A
    mask: A
    epoch: int
    positions: Integers
    labels: A | None = None
    document_ids: A | None = None
    position_ids: A | None = None
    cu_seqlens: A | None = None
    max_seqlen: int | None = None
    sources: A | None = None

    @property
    def _pair(self) -> tuple[A, A | None]:
        return self.tokens, self.labels


def to_torch(batch: TokenBatch[npt.NDArray[Any]]) -> TokenBatch[torch.Tensor]:
    """Return the batch with tensors that use the arrays' memory; `positions` stays an array."""
    with explain_missing("a loader that yields tensors (its numpy() yields arrays)"):
        import torch

    register_tree(TokenBatch)
    tensors: dict[str, Any] = {
        name: torch.from_numpy(value)
        for name, value in vars(batch).items()
        if isinstance(value, np.ndarray) and name != "positions"
    }
    converted: TokenBatch[Any] = dataclasses.replace(batch, **tensors)
    return converted
