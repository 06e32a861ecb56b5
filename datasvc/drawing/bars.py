"""Histograms of numbers and bars of classes. A bar may be a link, so that a filter works without JavaScript."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.drawing.elements import Markup, element, link, shorten_to_width, svg, text_width
from datasvc.drawing.numbers import MAX_DRAWN, choose_ticks, drawable, format_quantity
from datasvc.drawing.table import TableColumn, html_table

_GAP: Final = 6  # between a label and what it names
_BOTTOM: Final = 36
_TOP: Final = 26
_BAR_ROW: Final = 22
_RIGHT: Final = 12
_LABELS: Final = 0.4  # of the width, for the names of bars at most
_HEAD_WIDTH: Final = 144
_HEAD_HEIGHT: Final = 40
_MAX_HEAD_BARS: Final = 5
_HEAD_ROW: Final = 16
_HEAD_BAR: Final = 36  # length of the longest bar


@dataclass(frozen=True)
class HistogramBin:
    """A bar of a histogram: the number of values in `start <= value < stop`.

    Attributes:
        start: lower bound.
        stop: upper bound.
        count: number of values, not negative.
        href: address of the values, such as the same page with a filter.
        is_selected: whether the filter that is in effect selects it.
    """

    start: float
    stop: float
    count: float
    href: str | None = None
    is_selected: bool = False


@dataclass(frozen=True)
class NamedBar:
    """A bar with a name, such as a class.

    Attributes:
        label: its name.
        value: its length, not negative.
        href: address of what it counts.
        is_selected: whether the filter that is in effect selects it.
    """

    label: str
    value: float
    href: str | None = None
    is_selected: bool = False


def histogram(
    bins: Sequence[HistogramBin],
    *,
    title: str,
    unit: str = "",
    count_unit: str = "samples",
    log_scale: bool = False,
    width: int = 480,
    height: int = 200,
    is_small: bool = False,
    with_title: bool = True,
) -> Markup:
    """Return a histogram as SVG. The heights of bars are proportional to their counts, from zero.

    Args:
        bins: ascending and without overlap.
        title: what is counted.
        unit: unit of the bounds, as in `format_quantity`.
        count_unit: unit of the counts.
        log_scale: heights are proportional to log(1 + count).
        width: pixels.
        height: pixels.
        is_small: without axes and text, for the head of a column.
        with_title: whether the title is drawn, too, and not only read to those who do not see.
    """
    most = max((_length(each.count) for each in bins), default=0.0)
    ticks = [] if is_small else _count_ticks(most, log_scale=log_scale)
    labels = [format_quantity(tick) for tick in ticks]
    widest = min(max(map(text_width, labels), default=0) + _GAP, width / 2)
    left, top, bottom = (0, 0, 0) if is_small else (widest, _top(with_title=with_title), _BOTTOM)
    plot_width, plot_height = width - left - (0 if is_small else _RIGHT), height - top - bottom
    full = _scaled(max([most, *ticks]), log_scale=log_scale) or 1.0
    ends = [(_bound(each.start), _bound(each.stop)) for each in bins]
    low, high = (ends[0][0], ends[-1][1]) if bins else (0.0, 1.0)
    span = high - low or 1.0
    bars = []
    for each, (start, stop) in zip(bins, ends, strict=True):
        size = _scaled(_length(each.count), log_scale=log_scale) / full * plot_height
        x = left + (start - low) / span * plot_width
        bar_width = (stop - start) / span * plot_width if high > low else plot_width
        bars.append(_bin(each, unit, count_unit, x, top + plot_height - size, max(bar_width - 1, 0.5), size))
        if each.href is not None:  # the whole height is clicked, so that a low bar is no small target
            hit = element("rect", x=x, y=top, width=bar_width, height=plot_height, fill="transparent")
            bars[-1] = link(Markup(bars[-1] + hit), each.href, title=_bin_text(each, unit, count_unit))
    axes = [] if is_small else _axes(ticks, full, (low, high), unit, (left, top, width, height), log_scale=log_scale)
    if with_title and not is_small:
        axes.insert(0, _title(f"{title} ({count_unit}{', log scale' if log_scale else ''})", width))
    return svg(
        *axes,
        *bars,
        width=width,
        height=height,
        title=title,
        description=f"{len(bins)} bins from {format_quantity(low, unit)} to {format_quantity(high, unit)}; "
        f"the largest has {format_quantity(most, count_unit)}",
        interactive=any(each.href for each in bins),
    )


def histogram_table(
    bins: Sequence[HistogramBin], *, title: str, unit: str = "", count_unit: str = "samples"
) -> Markup:
    """Return the numbers of `histogram` as a table."""
    rows = [
        (format_quantity(each.start, unit), link(format_quantity(each.stop, unit), each.href), each.count)
        for each in bins
    ]
    return html_table(["from", "below", TableColumn(count_unit)], rows, caption=title)


def bar_chart(
    bars: Sequence[NamedBar],
    *,
    title: str,
    unit: str = "samples",
    max_bars: int = 20,
    width: int = 560,
    more_href: str | None = None,
    with_title: bool = True,
) -> Markup:
    """Return horizontal bars with their names on the left and values on the right, as SVG.

    Args:
        bars: in the order in which they are drawn.
        title: what they count.
        unit: unit of the values.
        max_bars: further bars are left out, and "and 312 more" is drawn.
        width: pixels.
        more_href: address of those that are left out.
        with_title: as in `histogram`.
    """
    shown, top = bars[:max_bars], _top(with_title=with_title)
    most = max((_length(bar.value) for bar in bars), default=0.0) or 1.0
    left = min(max((text_width(bar.label[:100]) for bar in shown), default=0), width * _LABELS) + 8
    values = max((text_width(format_quantity(bar.value, unit)) for bar in shown), default=0)
    room = max(width - left - values - _GAP, 1)
    rows = [
        _bar(bar, unit, (left, top + number * _BAR_ROW), _length(bar.value) / most * room)
        for number, bar in enumerate(shown)
    ]
    if len(bars) > len(shown):
        text = element(
            "text", f"and {len(bars) - len(shown):,} more", x=0, y=top + len(shown) * _BAR_ROW + 15, class_="quiet"
        )
        rows.append(link(text, more_href))
    return svg(
        *([_title(title, width)] if with_title else []),
        *rows,
        width=width,
        height=top + len(rows) * _BAR_ROW + 4,
        title=title,
        description="; ".join(f"{bar.label}: {format_quantity(bar.value, unit)}" for bar in shown[:10]),
        interactive=any(bar.href for bar in bars) or more_href is not None,
    )


def bar_table(
    bars: Sequence[NamedBar], *, title: str, name: str = "name", unit: str = "samples", max_rows: int = 1000
) -> Markup:
    """Return the numbers of `bar_chart` as a table."""
    rows = [(link(bar.label, bar.href), bar.value) for bar in bars]
    return html_table([name, TableColumn(unit)], rows, caption=title, max_rows=max_rows)


def _length(value: float) -> float:
    return max(drawable(value) or 0.0, 0.0)


def _bound(value: float) -> float:
    return drawable(min(max(value, -MAX_DRAWN), MAX_DRAWN)) or 0.0


def _scaled(count: float, *, log_scale: bool) -> float:
    return math.log1p(count) if log_scale else count


def _count_ticks(most: float, *, log_scale: bool) -> list[float]:
    if not log_scale:
        return choose_ticks(0.0, most or 1.0, 5)
    return [0.0, *(10.0**power for power in range(math.ceil(math.log10(max(most, 1))) + 1))]


def _bin_text(each: HistogramBin, unit: str, count_unit: str) -> str:
    count = format_quantity(each.count, count_unit)
    return f"{format_quantity(each.start, unit)} to {format_quantity(each.stop, unit)}: {count}"


def _bin(each: HistogramBin, unit: str, count_unit: str, x: float, y: float, width: float, height: float) -> Markup:
    return element(
        "rect",
        element("title", _bin_text(each, unit, count_unit)),
        x=x,
        y=y,
        width=width,
        height=height,
        class_=f"bar mark fill {'c1' if each.is_selected else 'accent'}",
    )


def _top(*, with_title: bool) -> int:
    """Return the upper end of a plot: half of a label of its axis is above it."""
    return _TOP if with_title else 8


def _title(text: str, width: int) -> Markup:
    return element("text", shorten_to_width(text, width, is_bold=True), x=0, y=14, font_weight="bold")


def _axes(
    ticks: Sequence[float],
    full: float,
    ends: tuple[float, float],
    unit: str,
    size: tuple[float, int, int, int],
    *,
    log_scale: bool,
) -> list[Markup]:
    left, top, width, height = size
    base, plot_height = height - _BOTTOM, height - top - _BOTTOM
    parts = []
    for tick in ticks:
        y = base - _scaled(tick, log_scale=log_scale) / full * plot_height
        parts.append(element("line", x1=left, y1=y, x2=width - _RIGHT, y2=y, class_="line pale"))
        label = shorten_to_width(format_quantity(tick), left - _GAP)
        parts.append(element("text", label, x=left - _GAP, y=y + 4, text_anchor="end", class_="quiet"))
    for number, anchor in enumerate(("start", "middle", "end")):
        value = ends[0] + (ends[1] - ends[0]) * number / 2
        x = left + (width - _RIGHT - left) * number / 2
        label = shorten_to_width(format_quantity(value, unit), (width - _RIGHT - left) / 3 - _GAP)
        parts.append(element("text", label, x=x, y=base + 18, text_anchor=anchor, class_="quiet"))
    return parts


def _bar(bar: NamedBar, unit: str, at: tuple[float, float], length: float) -> Markup:
    x, y = at
    text = f"{bar.label}: {format_quantity(bar.value, unit)}"
    row = Markup(
        element("title", text)
        + element("text", shorten_to_width(bar.label, x - 8), x=x - 8, y=y + 15, text_anchor="end")
        + element(
            "rect",
            x=x,
            y=y + 3,
            width=length,
            height=_BAR_ROW - 6,
            class_=f"bar mark fill {'c1' if bar.is_selected else 'accent'}",
        )
        + element("text", format_quantity(bar.value, unit), x=x + length + _GAP, y=y + 15, class_="quiet")
    )
    return element("g", link(row, bar.href, title=text), class_="row")


def number_head(bins: Sequence[HistogramBin], *, title: str, unit: str = "", count_unit: str = "samples") -> Markup:
    """Return a histogram of numbers without axes; for arguments, see `histogram`."""
    return histogram(
        bins, title=title, unit=unit, count_unit=count_unit, width=_HEAD_WIDTH, height=_HEAD_HEIGHT, is_small=True
    )


def value_head(bars: Sequence[NamedBar], *, title: str, unit: str = "samples") -> tuple[Markup, int]:
    """Return the first values as short horizontal bars with their names behind them, and how many are drawn.

    Args:
        bars: the values, the most frequent first; five are drawn.
        title: what they count.
        unit: unit of the counts.
    """
    shown = bars[:_MAX_HEAD_BARS]
    most = max((_length(bar.value) for bar in shown), default=0.0) or 1.0
    picture = svg(
        *(
            _head_row(bar, number * _HEAD_ROW, _length(bar.value) / most * _HEAD_BAR, unit)
            for number, bar in enumerate(shown)
        ),
        width=_HEAD_WIDTH,
        height=max(len(shown), 1) * _HEAD_ROW,
        title=title,
        description="; ".join(_bar_text(bar, unit) for bar in shown),
        interactive=any(bar.href for bar in shown),
    )
    return picture, len(shown)


def _head_row(bar: NamedBar, y: int, length: float, unit: str) -> Markup:
    colour = "c1" if bar.is_selected else "accent"
    row = Markup(
        element("title", _bar_text(bar, unit))
        + element(
            "rect", x=0, y=y + 3, width=max(length, 0.5), height=_HEAD_ROW - 6, class_=f"bar mark fill {colour}"
        )
        + element("text", shorten_to_width(bar.label, _HEAD_WIDTH - _HEAD_BAR - 6), x=_HEAD_BAR + 6, y=y + 12)
        + element("rect", x=0, y=y, width=_HEAD_WIDTH, height=_HEAD_ROW, fill="transparent")
    )
    return element("g", link(row, bar.href, title=_bar_text(bar, unit)), class_="row")


def _bar_text(bar: NamedBar, unit: str) -> str:
    return f"{bar.label}: {format_quantity(bar.value, unit)}"
