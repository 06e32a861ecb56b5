"""Orders log entries by one of their metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from datasvc.repository.logs.metric_mode import MetricMode


def finite_metrics(metrics: Any) -> dict[str, float]:
    """Return the finite numbers in the metrics of an entry, because NaN and infinity cannot be ordered."""
    items = metrics.items() if isinstance(metrics, Mapping) else ()
    return {
        str(name): float(value)
        for name, value in items
        # An integer of JSON may be too large for a float.
        if (isinstance(value, float) and math.isfinite(value)) or (type(value) is int and abs(value) < 1 << 1023)
    }


def rank_by_metric(scores: Mapping[int, Mapping[str, float]], metric: str, mode: MetricMode) -> list[int]:
    """Return the numbers of the entries that have a metric, best first; equal ones are ordered newest first.

    Args:
        scores: result of `finite_metrics` for each entry, by its number.
        metric: name of the metric.
        mode: whether a high or a low value is better.
    """
    sign = -1 if mode == "max" else 1
    return sorted(
        (number for number, score in scores.items() if metric in score),
        key=lambda number: (sign * scores[number][metric], -number),
    )
