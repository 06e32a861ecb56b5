"""Numbers of charts: as text with units, the ticks of an axis, and points that are thinned for drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from datasvc.sizes import format_size

_STEPS: Final = (1, 2, 2.5, 5, 10)
_MIN_BYTES: Final = 1000
MAX_DRAWN: Final = 1e300  # differences and sums of such numbers are finite


def format_quantity(value: float | None, unit: str = "") -> str:
    """Return a value with its unit, as short text: "1.5 GB", "12,500 samples", "0.012", "no value" for NaN or None.

    Args:
        value: the number.
        unit: "bytes" and "bytes/s" are written in kB, MB, GB or TB, "%" without a space.
    """
    if value is None or not math.isfinite(value):
        return "no value" if value is None or math.isnan(value) else str(value)
    if unit in {"bytes", "bytes/s"}:
        if value < _MIN_BYTES:
            size = f"{_plain(value)} {'byte' if value == 1 else 'bytes'}"
        else:
            number, _, size_unit = format_size(value).partition(" ")  # with two decimals
            size = f"{number.rstrip('0').rstrip('.')} {size_unit}"
        return size + unit.removeprefix("bytes")
    gap = "" if unit in {"", "%"} else " "
    return f"{_plain(value)}{gap}{unit}"


def _plain(value: float) -> str:
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def drawable(value: float | None) -> float | None:
    """Return a number that scales can divide, at most 1e300 from zero; None for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return None
    return min(max(value, -MAX_DRAWN), MAX_DRAWN)


def choose_ticks(low: float, high: float, max_ticks: int = 6) -> list[float]:
    """Return round numbers at equal distances; the first is at most `low`, and the last at least `high`."""
    low, high = float(low), float(high)  # whole numbers above 2**53 may differ, and be equal as floats
    if not high > low:
        space = abs(low) / 2 or 1.0
        low, high = (low - space, low + space) if low else (0.0, 1.0)
    exact = (high - low) / max(max_ticks - 1, 1)
    power = 10.0 ** math.floor(math.log10(exact)) if 0 < exact < math.inf else 0.0
    if not power or (low + power == low and high + power == high):  # floats cannot divide the range
        return [low, high]
    step = power * next(step for step in _STEPS if step * power >= exact * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def thin_points(xs: Sequence[float], ys: Sequence[float | None], max_points: int) -> list[tuple[float, float | None]]:
    """Return at most some `max_points` points that draw the same line; the extremes of each section are kept.

    Args:
        xs: ascending. Points whose x is NaN or infinite are left out.
        ys: one value per x; None, NaN or infinity is a gap.
        max_points: above this number, each section of the points gives its first, lowest, highest and last one, and a
            gap.

    Returns:
        Points in order, with None for a gap. See Jugel et al., "M4: A Visualization-Oriented Time Series Data
        Aggregation", VLDB 2014.
    """
    pairs = ((drawable(x), drawable(y)) for x, y in zip(xs, ys, strict=True))
    points = [(x, y) for x, y in pairs if x is not None]
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
