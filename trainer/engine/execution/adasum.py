"""Adasum: sums gradients that are orthogonal and averages those that are parallel (Maleki et al. 2020).

Ranks combine pairwise: at level k each swaps with the rank whose number differs in bit k, so that all end with the
same tree and the same bits. Dot products are taken per tensor, not per buffer, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def combine_over_tree(
    parts: Sequence[Tensor], flat: Tensor, *, place: int, num_places: int, swap: Callable[[Tensor, int], Tensor]
) -> None:
    """Overwrites `parts`, views into `flat`, with what all places combine to.

    Args:
        parts: the tensors, flat.
        flat: the memory that travels.
        place: of this rank, from 0.
        num_places: a power of two.
        swap: sends a tensor to a place and returns what comes back.
    """
    distance = 1
    while distance < num_places:
        partner = place ^ distance
        received = swap(flat, partner)
        offset = flat.storage_offset()
        theirs = [received[p.storage_offset() - offset :][: p.numel()] for p in parts]
        for mine, other in zip(parts, theirs, strict=True):
            lower, upper = (mine, other) if place < partner else (other, mine)
            mine.copy_(combine(lower, upper))
        distance *= 2


def combine(a: Tensor, b: Tensor) -> Tensor:
    """`a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2)`; a zero vector adds nothing and takes nothing away.

    Args:
        a: floating, flat.
        b: of the same dtype and length.
    """
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    product, norm_a, norm_b = (
        float(torch.dot(x, y)) for x, y in ((wide_a, wide_b), (wide_a, wide_a), (wide_b, wide_b))
    )
    share_a = 1.0 - product / (2 * norm_a) if norm_a else 1.0
    share_b = 1.0 - product / (2 * norm_b) if norm_b else 1.0
    return (wide_a * share_a + wide_b * share_b).to(a.dtype)
