"""Adasum: a combination of gradients that sums orthogonal ones and averages parallel ones (Maleki et al. 2020).

`Reductions` uses it for allreduces with `Adasum`. Ranks combine in pairs: at level k of a tree, each rank exchanges
with the rank whose number differs in bit k. Both get the same result, so after the last level all ranks have the
same bits. Dot products are computed per tensor, not per buffer, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def combine_over_tree(
    parts: Sequence[Tensor], flat: Tensor, *, place: int, num_places: int, swap: Callable[[Tensor, int], Tensor]
) -> None:
    """Overwrite `parts` with their Adasum over all places. Every rank calls this in the same order.

    A place is a participant in the tree: one rank, or one node that has averaged the tensors of its ranks.

    Args:
        parts: tensors that are combined one by one; flat views of `flat`.
        flat: flat tensor that is exchanged; contains all parts.
        place: number of this rank's participant, from 0.
        num_places: number of participants, a power of two.
        swap: function that sends a tensor to a place and returns the tensor received from it.
    """
    distance = 1
    while distance < num_places:
        partner = place ^ distance
        # Send the whole buffer in one message, although the parts are combined one by one.
        received = swap(flat, partner)
        # The parts have the same positions in the received tensor as in `flat`.
        offset = flat.storage_offset()
        received_parts = [received[p.storage_offset() - offset :][: p.numel()] for p in parts]
        for part, received_part in zip(parts, received_parts, strict=True):
            # Both partners use the same order of arguments, so they get the same bits.
            lower, upper = (part, received_part) if place < partner else (received_part, part)
            part.copy_(combine(lower, upper))
        distance *= 2


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Return `a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2)` of two flat tensors; if one is zero, return the other."""
    # Computed in float64, because a dot product sums over a whole tensor: in half precision, small terms would be
    # lost or the sum would overflow.
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    product, norm_a, norm_b = (
        float(torch.dot(x, y)) for x, y in ((wide_a, wide_b), (wide_a, wide_a), (wide_b, wide_b))
    )
    weight_a = 1.0 - product / (2 * norm_a) if norm_a else 1.0
    weight_b = 1.0 - product / (2 * norm_b) if norm_b else 1.0
    return (wide_a * weight_a + wide_b * weight_b).to(a.dtype)
