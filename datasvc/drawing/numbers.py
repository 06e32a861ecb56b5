"""Numbers of charts: as text with units, the ticks of an axis, and points that are thinned for drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from datasvc.sizes import format_size

_STEPS: Final = (1, 2, 2.5, 5, 10)
_MIN_BYTES: Final = 1000


def format_quantity(value: float | None, unit: str = "") -> str:
    """Return a value with its unit, as short text: "1.50 GB", "12,500 samples", "0.012", "no value" for NaN or None.

    Args:
        value: the number.
        unit: "bytes" and "bytes/s" are written in kB, MB, GB or TB, "%" without a space.
    """
    if value is None or not math.isfinite(value):
        return "no value" if value is None or math.isnan(value) else str(value)
    if unit in {"bytes", "bytes/s"}:
        size = format_size(value) if value >= _MIN_BYTES else f"{_plain(value)} {'byte' if value == 1 else 'bytes'}"
        return size + unit.removeprefix("bytes")
    gap = "" if unit in {"", "%"} else " "
    return f"{_plain(value)}{gap}{unit}"


def _plain(value: float) -> str:
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def choose_ticks(low: float, high: float, max_ticks: int = 6) -> list[float]:
    """Return round numbers at equal distances; the first is at most `low`, and the last at least `high`."""
    if not high > low:
        low, high = (low - abs(low) / 2 or -1.0, low + abs(low) / 2 or 1.0) if low else (0.0, 1.0)
    exact = (high - low) / max(max_ticks - 1, 1)
    power = 10.0 ** math.floor(math.log10(exact)) if exact > 0 else 0.0
    if not power or not math.isfinite(high - low):  # the range is below or above what floats can divide
        return [low, high]
    step = power * next(step for step in _STEPS if step * power >= exact * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def thin_points(xs: Sequence[float], ys: Sequence[float | None], max_points: int) -> list[tuple[float, float | None]]:
    """Return at most some `max_points` points that draw the same line; the extremes of each section are kept.

    Args:
        xs: ascending.
        ys: one value per x; None or NaN is a gap.
        max_points: above this number, each section of the points gives its first, lowest, highest and last one, and a
            gap.

    Returns:
        Points in order, with None for a gap. See Jugel et al., "M4: A Visualization-Oriented Time Series Data
        Aggregation", VLDB 2014.
    """
    points = [
        (x, y if y is not None and math.isfinite(y) else None)
        for x, y in zip(xs, ys, strict=True)
        if math.isfinite(x)
    ]
    if len(points) <= max_points:
        return points
    size = math.ceil(len(points) / max(max_points // 5, 1))
    return [point for start in range(0, len(points), size) for point in _extremes(points[start : start + size])]


def _extremes(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    known = [(y, number) for number, (_, y) in enumerate(points) if y is not None]
    kept = {0, len(points) - 1}
    if known:
        kept |= {min(known)[1], max(known)[1], known[0][1], known[-1][1]}
    kept.update(
        [next(number for number, (_, y) in enumerate(points) if y is None)] if len(known) < len(points) else []
    )
    return [points[number] for number in sorted(kept)]
