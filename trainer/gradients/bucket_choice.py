"""Chooses the size of buckets from the measured cost of an all-reduce and the times at which gradients are ready.

An all-reduce of n bytes takes alpha + beta n. Small buckets pay alpha often, and large ones are ready late. As in
MG-WFBP (Shi, Chu and Li 2019, arXiv:1811.11141), a model of the step weighs both: one all-reduce runs at a time, in
the order in which the buckets are ready. MG-WFBP merges layers one by one; here the size of the buckets
is searched. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

import torch

from datasvc.trainer.engine.execution.reductions import split_rows

_MIN_BYTES: Final = 64 * 1024
# Ratio of successive candidates. Near the best size the time of a step changes little, so it need not be small.
_STEP: Final = 2**0.5
# Sizes count as equally good if their ends differ by at most this share of the time from the first gradient to the
# end of the last all-reduce.
_TOLERANCE: Final = 0.02


_T = TypeVar("_T")

# The sizes of DistributedDataParallel: small enough that communication starts early in the backward pass, large
# enough that latency does not dominate. The first bucket is smaller, so that communication starts as early as
# possible.
FIRST_BUCKET_BYTES = 1024 * 1024
BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True)
class AllReduceCost:
    """The time of an all-reduce without other traffic: `alpha_s + beta_s * size_bytes`.

    Attributes:
        alpha_s: fixed cost: negotiation and the latencies of all messages.
        beta_s: seconds per byte.
    """

    alpha_s: float
    beta_s: float

    def seconds(self, size_bytes: int) -> float:
        """Return the time for so many bytes."""
        return self.alpha_s + self.beta_s * size_bytes


def fit_cost(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> AllReduceCost:
    """Return the costs with the least sum of squared relative errors; both are at least 0.

    Args:
        sizes_bytes: sizes of measured all-reduces, at least two different ones.
        times_s: their times, more than 0.
    """
    times = torch.tensor(times_s, dtype=torch.float64, device="cpu")
    sizes = torch.tensor(sizes_bytes, dtype=torch.float64, device="cpu")
    # Scaled by the times, so that a small all-reduce counts as much as a large one.
    rows = torch.stack([1 / times, sizes / times], dim=1)
    alpha_s, beta_s = torch.linalg.lstsq(
        rows, torch.ones(len(times), 1, dtype=torch.float64, device="cpu")
    ).solution.flatten()
    return AllReduceCost(max(0.0, float(alpha_s)), max(0.0, float(beta_s)))


def choose_bucket_bytes(
    cost: AllReduceCost,
    sizes_bytes: Sequence[int],
    ready_s: Sequence[float],
    *,
    kinds: Sequence[Hashable] | None = None,
    max_bytes: int,
) -> int:
    """Return the maximum size of buckets with which the last all-reduce ends first; the largest of equally good ones.

    Args:
        cost: cost of an all-reduce, for the bytes of `sizes_bytes`.
        sizes_bytes: size of the gradient of each parameter, in the order of the parameters.
        ready_s: time at which each gradient is ready, from any common origin.
        kinds: kind of each parameter as for `plan_buckets`; None if all are of one kind.
        max_bytes: largest size to return.
    """
    kinds = [None] * len(sizes_bytes) if kinds is None else kinds
    largest = max(1, min(sum(sizes_bytes), max_bytes))
    candidates = [largest]
    while candidates[-1] > _MIN_BYTES:
        candidates.append(int(candidates[-1] / _STEP))
    ends_s = [predict_end_s(cost, sizes_bytes, ready_s, kinds=kinds, bucket_bytes=size) for size in candidates]
    # Of equally good sizes, take the largest: each message takes processor time, which the model leaves out.
    latest_s = min(ends_s) + _TOLERANCE * (min(ends_s) - min(ready_s))
    return next(size for size, end_s in zip(candidates, ends_s, strict=True) if end_s <= latest_s)


def predict_end_s(
    cost: AllReduceCost,
    sizes_bytes: Sequence[int],
    ready_s: Sequence[float],
    *,
    kinds: Sequence[Hashable],
    bucket_bytes: int,
) -> float:
    """Return the time at which the last all-reduce ends, from the origin of `ready_s`.

    The arguments are those of `choose_bucket_bytes`; `bucket_bytes` is the maximum size of buckets.
    """
    plan = plan_buckets(sizes_bytes, kinds, first_bucket_bytes=FIRST_BUCKET_BYTES, bucket_bytes=bucket_bytes)
    messages = sorted(
        (max(ready_s[position] for position in members), sum(sizes_bytes[position] for position in members))
        for members in plan
    )
    end_s = float("-inf")
    # e_n = max(r_n, e_(n-1)) + alpha + beta n: the recurrence of the profile's `step_time`.
    for bucket_ready_s, size_bytes in messages:
        end_s = max(bucket_ready_s, end_s) + cost.seconds(size_bytes)
    return end_s


# The plan depends only on the parameters and the settings, so all ranks and all runs of a model get the same plan. A
# position identifies a parameter: its index in the list that is passed.


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
