"""How gradients are grouped into buckets: pure, and equal on all ranks and in all runs of one model."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import TypeVar

_T = TypeVar("_T")

# As DistributedDataParallel has them: small enough that communication starts early in the backward pass,
# large enough that latency does not count; the first even smaller, because nothing hides it.
FIRST_BUCKET_BYTES = 1024 * 1024
BUCKET_BYTES = 25 * 1024 * 1024


def plan_buckets(
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    *,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[list[int]]:
    """Groups parameters in reverse order, roughly that in which the backward pass reaches them.

    Args:
        sizes_bytes: of each parameter's gradient.
        kinds: of each parameter, what a bucket has only one of: dtype and device.
        first_bucket_bytes: bound of the first bucket of each kind.
        bucket_bytes: bound of the others. A larger parameter has a bucket of its own; with a bound of 0 every
            parameter has.

    Returns:
        Positions of parameters by bucket, each exactly once; buckets in the order of their first parameter.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    space_bytes: dict[Hashable, int] = {}
    for position in reversed(range(len(sizes_bytes))):
        kind, size_bytes = kinds[position], sizes_bytes[position]
        if kind not in open_buckets or size_bytes > space_bytes[kind]:
            bound_bytes = bucket_bytes if kind in open_buckets else min(first_bucket_bytes, bucket_bytes)
            space_bytes[kind] = bound_bytes
            open_buckets[kind] = []
            buckets.append(open_buckets[kind])
        open_buckets[kind].append(position)
        space_bytes[kind] -= size_bytes
    return buckets


def plan_groups(
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    groups: Sequence[Sequence[int]],
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[list[int]]:
    """Makes each group of parameters a bucket, or one for each kind in it, and groups the rest by size.

    Args:
        sizes_bytes: see `plan_buckets`.
        kinds: see `plan_buckets`.
        groups: positions of parameters, each in one group at most.
        bucket_bytes: see `plan_buckets`; groups have no bound.

    Returns:
        Positions of parameters by bucket, each exactly once: first those of the groups, in their order.
    """
    buckets: list[list[int]] = []
    for group in groups:
        by_kind: dict[Hashable, list[int]] = {}
        for position in group:
            by_kind.setdefault(kinds[position], []).append(position)
        buckets += by_kind.values()
    grouped = {position for group in groups for position in group}
    rest = [position for position in range(len(sizes_bytes)) if position not in grouped]
    planned = plan_buckets(
        [sizes_bytes[position] for position in rest],
        [kinds[position] for position in rest],
        bucket_bytes=bucket_bytes,
    )
    return buckets + [[rest[i] for i in members] for members in planned]


def cut_evenly(parameters: Sequence[_T], num_groups: int) -> list[list[_T]]:
    """Runs of neighbours whose lengths differ by one at most, in order; fewer where there are fewer parameters."""
    share, rest = divmod(len(parameters), num_groups)
    bounds = [0]
    for group in range(num_groups):
        bounds.append(bounds[-1] + share + (group < rest))
    return [list(parameters[start:stop]) for start, stop in itertools.pairwise(bounds) if stop > start]
