"""Causal attention inside each document of token blocks, in time in proportion to the squares of documents' lengths.

On a GPU, one kernel computes a batch, if it can: `varlen_attn`. Elsewhere documents of similar lengths are a group, a
batch of causal attention. The shorter ones are filled up at their ends, where no token of theirs attends to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional as F

# A document is filled up by a third of its length at most. Larger groups have less calls and more filling.
_SHORTEST_OF_GROUP: Final = 0.75
_ALIGNED_CHANNELS: Final = 8


@dataclass  # Not frozen: some versions of torch.compile compile again for other values in a frozen one.
class DocumentPlan:
    """How the attention of a batch is computed. The tensors are on the device of the batch.

    Attributes:
        groups: number of documents of each group, and rows of each of them; from the longest.
        tokens: `int64[rows]`, the token of each row of the groups. Tokens are counted block after block.
        rows: `int64[tokens]`, the row of each token.
        is_filling: `bool[rows]`, True for a row that repeats the last token of its document.
        cu_seqlens: `int32[documents + 1]`, first token of each document, and the number of all tokens; None
            if other tokens are between those of a document.
    """

    groups: list[tuple[int, int]]
    tokens: torch.Tensor
    rows: torch.Tensor
    is_filling: torch.Tensor
    cu_seqlens: torch.Tensor | None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # The shapes of a graph cannot depend on values.
def plan_documents(document_ids: torch.Tensor) -> DocumentPlan | None:
    """Plan the attention of a batch; None if each block is one document.

    Args:
        document_ids: `int[batch, block]`: equal numbers in a block are a document. Padding, -1, is one more.
    """
    device, (batch, block) = document_ids.device, document_ids.shape
    ids, order = document_ids.cpu(), None
    # In blocks of a loader, numbers of documents ascend, and padding is at the end.
    if bool(((ids[:, 1:] >= 0) & ((ids[:, 1:] < ids[:, :-1]) | (ids[:, :-1] < 0))).any()):
        ids, order = ids.sort(dim=1, stable=True)
        order = (order + torch.arange(0, batch * block, block, device="cpu")[:, None]).flatten()
    changes = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
    starts = changes.flatten().nonzero().flatten()
    if len(starts) == batch:
        return None
    bounds = F.pad(starts, (0, 1), value=batch * block)
    sizes, by_size = bounds.diff().sort(descending=True, stable=True)
    groups, tokens, is_filling = [], [], []
    first = 0
    while first < len(sizes):
        num_rows = int(sizes[first])
        stop = int((sizes >= num_rows * _SHORTEST_OF_GROUP).sum())
        last = sizes[first:stop, None] - 1
        places = torch.arange(num_rows, device="cpu")
        tokens.append((starts[by_size[first:stop], None] + torch.minimum(places, last)).flatten())
        is_filling.append((places > last).flatten())
        groups.append((stop - first, num_rows))
        first = stop
    token_of, fills = torch.cat(tokens), torch.cat(is_filling)
    if order is not None:
        token_of = order[token_of]
    rows = torch.empty(batch * block, dtype=torch.int64, device="cpu")
    rows[token_of[~fills]] = (~fills).nonzero().flatten()
    cu_seqlens = bounds.int().to(device) if order is None else None
    return DocumentPlan(groups, token_of.to(device), rows.to(device), fills.to(device), cu_seqlens)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_documents(heads: torch.Tensor, plan: DocumentPlan, dropout: float) -> torch.Tensor:
    """Return the causal attention inside each document, `[batch, block, heads, head_width]`.

    Args:
        heads: queries, keys and values, `[batch, block, 3, heads, head_width]`.
        plan: result of `plan_documents` for the batch.
        dropout: probability of dropout of the attention.
    """
    batch, block, _, num_heads, head_width = heads.shape
    flat = heads.reshape(batch * block, 3, num_heads, head_width)
    if plan.cu_seqlens is not None and _has_kernel(flat, dropout):
        from torch.nn.attention.varlen import varlen_attn

        query, key, value = flat.unbind(1)
        bounds, longest = plan.cu_seqlens, plan.groups[0][1]
        found = varlen_attn(query, key, value, bounds, bounds, longest, longest, window_size=(-1, 0))
        assert isinstance(found, torch.Tensor)
        return found.view(batch, block, num_heads, head_width)
    parts = []
    rows = _take_rows(flat.flatten(1), plan.tokens, plan.rows, None)
    groups = torch.split(rows, [count * size for count, size in plan.groups])
    for (count, size), group in zip(plan.groups, groups, strict=True):
        query, key, value = group.view(count, size, 3, num_heads, head_width).permute(2, 0, 3, 1, 4).unbind(0)
        part = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        parts.append(part.transpose(1, 2).reshape(count * size, -1))
    attended = _take_rows(torch.cat(parts), plan.rows, plan.tokens, plan.is_filling)
    return attended.view(batch, block, num_heads, head_width)


def _has_kernel(flat: torch.Tensor, dropout: float) -> bool:
    """Return whether `varlen_attn` can compute `[tokens, 3, heads, head_width]`."""
    # It is flash attention without dropout, and takes aligned heads only; `scaled_dot_product_attention` pads others.
    if not flat.is_cuda or dropout or flat.shape[-1] % _ALIGNED_CHANNELS:
        return False
    query, key, value = flat[None].permute(2, 0, 3, 1, 4).unbind(0)
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, False))


def _take_rows(
    x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, unused: torch.Tensor | None
) -> torch.Tensor:
    """Return `x[index]`. Its gradient does not add up rows, which torch's does one by one or in no defined order.

    Args:
        x: rows, `[n, width]`.
        index: `int64[m]`.
        inverse: `int64[n]`, for each row of `x`, where it is in the result.
        unused: `bool[n]`, rows of `x` that are not in the result; None: there are none.
    """
    return cast("torch.Tensor", _TakeRows.apply(x, index, inverse, unused))  # type: ignore[no-untyped-call]


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, unused: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse, unused)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inverse, unused = ctx.saved_tensors
        gradient = gradients[0].index_select(0, inverse)
        if unused is not None:
            gradient.masked_fill_(unused[:, None], 0)
        return gradient, None, None, None


def mask_documents(document_ids: torch.Tensor, *, start: int = 0, num_queries: int | None = None) -> torch.Tensor:
    """Return the attention mask in which each token attends to itself and to earlier tokens of its document.

    For a rank that has a part of the queries of each block, and all keys.

    Args:
        document_ids: `int[batch, block]`.
        start: position of the first query.
        num_queries: number of successive queries; None: those up to the end of the block.

    Returns:
        `bool[batch, 1, query, key]`, True where the query attends to the key. Each query attends to itself, so no
        softmax is over an empty set.
    """
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)
    queries = slice(start, None if num_queries is None else start + num_queries)
    same = document_ids[:, queries, None] == document_ids[:, None, :]
    return (same & (positions[queries, None] >= positions))[:, None]
