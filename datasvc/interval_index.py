"""Index of consecutive intervals (spans) that finds the span of a point.

The access order uses it: a span is the samples of one shard, and the index finds the shard of each sample.
"""

from __future__ import annotations

import numpy as np

from datasvc.keyed_random import Integers


class SpanSearch:
    """Index of consecutive spans that cover range(stop). It is ten times faster than a binary search per point.

    `starts`, `int64[n]`, has the first point of each span, ascending; `starts[0]` must be 0.
    """

    def __init__(self, starts: Integers, stop: int) -> None:
        self._starts = starts
        self._stops = np.append(starts[1:], stop)
        # Divide the points into buckets of 2**shift points, with about four buckets per span. The span of a point is
        # nearly always the first span of its bucket, or one of the next two.
        self._shift = max(0, (stop // max(4 * len(starts), 1)).bit_length() - 1)
        # Count the spans that start at or before each bucket's start. This takes one pass over spans and one over
        # buckets; a binary search per bucket would dominate the time to create an order of millions of shards.
        first_buckets = -(-starts >> self._shift)  # rounded up: the first bucket at or after each span's start
        self._first_of_bucket = np.cumsum(np.bincount(first_buckets, minlength=(stop >> self._shift) + 2)) - 1

    def find(self, points: Integers) -> Integers:
        """Return the index of the span that contains each point: `int64[n]`, for points in range(stop)."""
        spans: Integers = self._first_of_bucket[points >> self._shift]
        # Advance each point that is after its span to the next span, twice.
        for _ in range(2):
            spans += self._stops[spans] <= points
        remaining = np.flatnonzero(self._stops[spans] <= points)
        if remaining.size:  # only if a bucket has many short spans: search for these points
            spans[remaining] = np.searchsorted(self._starts, points[remaining], side="right") - 1
        return spans
