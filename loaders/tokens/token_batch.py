"""What a TokenLoader hands over, as arrays or as tensors that share their memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy.typing as npt

from datasvc.keyed_random import Integers

if TYPE_CHECKING:
    import torch

A = TypeVar("A")


@dataclass(frozen=True)
class TokenBatch(Generic[A]):
    """One rank's part of a global batch, arrays or tensors on the CPU; unpacks to `tokens, labels`.

    The memory is the holder's: it is used again only when no batch, array, tensor or view of it is left.

    Attributes:
        tokens: `int64[n, block]`.
        length: `int64[n]`, real tokens of each block, the rest of it is padding; 0 for samples that only pad.
        mask: `bool[n]`, False for samples that only pad the last batch.
        epoch: of the batch.
        positions: `int64[n]`, of the samples in that epoch.
        labels: `int64[n, block]`, the next token of each, -100 where there is none; None unless asked for, as are:
        document_ids: `int32[n, block]`, each token's document, counted from 0 in its block; -1 for padding.
        position_ids: `int64[n, block]`, its place in its document, or in what of that lies in the block.
        cu_seqlens: `int32[segments + 1]`, where documents begin in `tokens.reshape(-1)`, and its size; the padding of
            a block is a segment of its own. As attention kernels of variable length take it.
        max_seqlen: tokens of the longest segment.
        sources: `int64[n]`, of a mixture: the number of each sample's split in `mixture.splits`, whose name is
            `mixture.names[number]`; None where the loader reads a split alone.
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

    def __iter__(self) -> Iterator[A | None]:
        return iter((self.tokens, self.labels))


def to_torch(batch: TokenBatch[npt.NDArray[Any]]) -> TokenBatch[torch.Tensor]:
    """Return a batch of tensors that share the arrays' memory."""
    import torch

    def tensor(array: npt.NDArray[Any] | None) -> Any:
        return None if array is None else torch.from_numpy(array)

    return TokenBatch(
        tensor(batch.tokens),
        tensor(batch.length),
        tensor(batch.mask),
        batch.epoch,
        batch.positions,
        tensor(batch.labels),
        tensor(batch.document_ids),
        tensor(batch.position_ids),
        tensor(batch.cu_seqlens),
        batch.max_seqlen,
        tensor(batch.sources),
    )
