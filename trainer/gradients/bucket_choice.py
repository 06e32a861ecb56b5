"""Chooses the size of buckets from the measured cost of an all-reduce and the times at which gradients are ready.

An all-reduce of n bytes takes alpha + beta n. Small buckets pay alpha often, and large ones are ready late. As in
MG-WFBP (Shi, Chu and Li 2019, arXiv:1811.11141), a model of the step weighs both: one all-reduce runs at a time, in
the order in which the buckets are ready. MG-WFBP merges layers one by one; here the size of the buckets of `buckets`
is searched. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from datasvc.trainer.gradients.buckets import FIRST_BUCKET_BYTES, plan_buckets

_MIN_BYTES: Final = 64 * 1024
# Ratio of successive candidates. Near the best size the time of a step changes little, so it need not be small.
_STEP: Final = 2**0.5
# Sizes count as equally good if their ends differ by at most this share of the time from the first gradient to the
# end of the last all-reduce.
_TOLERANCE: Final = 0.02


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
