"""Plans the buckets: the groups of gradients that `GradientReducer` sends together.

The plan depends only on the parameters and the settings, so all ranks and all runs of a model get the same plan. A
position identifies a parameter: its index in the list that is passed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import islice
from typing import TypeVar

from datasvc.trainer.engine.execution.reductions import split_rows

_T = TypeVar("_T")

# The sizes of DistributedDataParallel: small enough that communication starts early in the backward pass, large
# enough that latency does not dominate. The first bucket is smaller, so that communication starts as early as
# possible.
FIRST_BUCKET_BYTES = 1024 * 1024
BUCKET_BYTES = 25 * 1024 * 1024


def plan_buckets(
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    *,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[list[int]]:
    """Group parameters in reverse order, which is roughly the order of the backward pass.

    Args:
        sizes_bytes: size of the gradient of each parameter.
        kinds: kind (dtype and device) of each parameter; all parameters of a bucket have the same kind.
        first_bucket_bytes: maximum size of the first bucket of each kind.
        bucket_bytes: maximum size of the other buckets. A larger parameter has a bucket of its own; with 0, every
            parameter has a bucket of its own.

    Returns:
        Positions of parameters by bucket, each exactly once; buckets in the order of their first parameter.
    """
    buckets: list[list[int]] = []
    # One open bucket per kind, so that parameters of alternating kinds still share buckets.
    open_buckets: dict[Hashable, list[int]] = {}
    space_bytes: dict[Hashable, int] = {}  # unused bytes of the open bucket of each kind
    for position in reversed(range(len(sizes_bytes))):
        kind, size_bytes = kinds[position], sizes_bytes[position]
        if kind not in open_buckets or size_bytes > space_bytes[kind]:
            is_first = kind not in open_buckets
            # `bucket_bytes` may be smaller than the size of the first bucket, and limits it too.
            space_bytes[kind] = min(first_bucket_bytes, bucket_bytes) if is_first else bucket_bytes
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
    """Make one bucket of each group (one per kind of its parameters), and group the other parameters by size.

    Args:
        sizes_bytes: size of the gradient of each parameter.
        kinds: kind (dtype and device) of each parameter.
        groups: positions of parameters by group; each position is in at most one group.
        bucket_bytes: maximum size of the other buckets; does not limit the buckets of the groups.

    Returns:
        Positions of parameters by bucket: the buckets of the groups, in the order of the groups, then the others.
    """
    buckets: list[list[int]] = []
    for group in groups:
        by_kind: dict[Hashable, list[int]] = {}
        for position in group:
            by_kind.setdefault(kinds[position], []).append(position)
        buckets += by_kind.values()
    grouped = {position for group in groups for position in group}
    ungrouped = [position for position in range(len(sizes_bytes)) if position not in grouped]
    # The planned buckets have indices into `ungrouped`.
    planned = plan_buckets(
        [sizes_bytes[position] for position in ungrouped],
        [kinds[position] for position in ungrouped],
        bucket_bytes=bucket_bytes,
    )
    return buckets + [[ungrouped[index] for index in indices] for indices in planned]


def cut_evenly(parameters: Sequence[_T], num_groups: int) -> list[list[_T]]:
    """Split parameters into consecutive groups whose lengths differ by at most one; empty groups are omitted."""
    remaining = iter(parameters)
    return [list(islice(remaining, length)) for length in split_rows(len(parameters), num_groups) if length]
