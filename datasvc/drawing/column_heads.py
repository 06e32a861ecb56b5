"""Small pictures for the heads of a table's columns: what the values of the column are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from datasvc.drawing.bars import HistogramBin, NamedBar, histogram
from datasvc.drawing.elements import Markup, element, link, shorten_to_width, svg
from datasvc.drawing.numbers import drawable, format_quantity

_WIDTH: Final = 144
_HEIGHT: Final = 40
_MAX_BARS: Final = 5
_ROW: Final = 16
_BAR: Final = 36  # length of the longest bar


def number_head(bins: Sequence[HistogramBin], *, title: str, unit: str = "", count_unit: str = "samples") -> Markup:
    """Return a histogram of numbers without axes; for arguments, see `histogram`."""
    return histogram(bins, title=title, unit=unit, count_unit=count_unit, width=_WIDTH, height=_HEIGHT, is_small=True)


def value_head(bars: Sequence[NamedBar], *, title: str, unit: str = "samples") -> tuple[Markup, int]:
    """Return the first values as short horizontal bars with their names behind them, and how many are drawn.

    Args:
        bars: the values, the most frequent first; five are drawn.
        title: what they count.
        unit: unit of the counts.
    """
    shown = bars[:_MAX_BARS]
    most = max((_length(bar) for bar in shown), default=0.0) or 1.0
    picture = svg(
        *(_row(bar, number * _ROW, _length(bar) / most * _BAR, unit) for number, bar in enumerate(shown)),
        width=_WIDTH,
        height=max(len(shown), 1) * _ROW,
        title=title,
        description="; ".join(_text(bar, unit) for bar in shown),
        interactive=any(bar.href for bar in shown),
    )
    return picture, len(shown)


def _row(bar: NamedBar, y: int, length: float, unit: str) -> Markup:
    colour = "c1" if bar.is_selected else "accent"
    row = Markup(
        element("title", _text(bar, unit))
        + element("rect", x=0, y=y + 3, width=max(length, 0.5), height=_ROW - 6, class_=f"bar mark fill {colour}")
        + element("text", shorten_to_width(bar.label, _WIDTH - _BAR - 6), x=_BAR + 6, y=y + 12)
        + element("rect", x=0, y=y, width=_WIDTH, height=_ROW, fill="transparent")
    )
    return element("g", link(row, bar.href, title=_text(bar, unit)), class_="row")


def _text(bar: NamedBar, unit: str) -> str:
    return f"{bar.label}: {format_quantity(bar.value, unit)}"


def _length(bar: NamedBar) -> float:
    return max(drawable(bar.value) or 0.0, 0.0)
