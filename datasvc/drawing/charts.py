"""Charts of numbers over steps or time: lines, small multiples and stacked areas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.drawing.colours import colour_class
from datasvc.drawing.elements import Markup, element, link, markup, number_text, svg
from datasvc.drawing.frame import ChartFrame, legend
from datasvc.drawing.numbers import format_quantity, thin_points
from datasvc.drawing.table import TableColumn, html_table
from datasvc.printable import count_text

_MAX_POINTS: Final = 1000  # of a line; more would not be visible
_MAX_DOTS: Final = 60  # up to this number, each point is a dot with its values on hover
_MAX_ROWS: Final = 1000


@dataclass(frozen=True)
class ChartSeries:
    """Values over x.

    Attributes:
        name: as in the legend.
        xs: ascending.
        ys: one value for each x; None and NaN are gaps.
        colour: class of the colour; by default the next of the palette. The same thing has one colour on every page.
        href: address of what it shows.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: str | None = None
    href: str | None = None


@dataclass(frozen=True)
class ChartMark:
    """An event at an x, such as a checkpoint or a stall: a vertical line.

    Attributes:
        x: where it is.
        label: what happened, on hover.
        is_problem: whether it is drawn as a problem.
        href: address of what it marks.
    """

    x: float
    label: str
    is_problem: bool = False
    href: str | None = None


def line_chart(
    series: Sequence[ChartSeries],
    *,
    title: str,
    unit: str = "",
    x_label: str = "step",
    marks: Sequence[ChartMark] = (),
    from_zero: bool | None = None,
    width: int = 640,
    height: int = 240,
) -> Markup:
    """Return lines over x as SVG.

    Args:
        series: the lines. Long ones are thinned, their extremes are kept.
        title: what it shows.
        unit: unit of the values, as in `format_quantity`.
        x_label: name of the x axis, with its unit.
        marks: events.
        from_zero: whether the axis begins at zero; by default that of bytes and rates does.
        width: pixels.
        height: pixels.
    """
    parts = _lines(series, title, unit, x_label, marks, (width, height), from_zero=from_zero)
    return svg(
        *parts,
        width=width,
        height=height,
        title=title,
        description=_description(series, unit),
        interactive=any(each.href for each in series) or any(mark.href for mark in marks),
    )


def small_multiples(
    series: Sequence[ChartSeries],
    *,
    title: str,
    unit: str = "",
    x_label: str = "step",
    num_columns: int = 2,
    from_zero: bool | None = None,
    width: int = 320,
    height: int = 160,
) -> Markup:
    """Return a chart for each series, in a grid, with the same range of x; for arguments, see `line_chart`.

    Args:
        series: one for each chart.
        title: what all show.
        unit: unit of the values.
        x_label: name of the x axes.
        num_columns: charts side by side.
        from_zero: as in `line_chart`.
        width: of one chart, pixels.
        height: of one chart, pixels.
    """
    every_x = [x for each in series for x in (*each.xs[:1], *each.xs[-1:])]
    ends = (min(every_x), max(every_x)) if every_x else None
    panels = []
    for number, each in enumerate(series):
        row, column = divmod(number, num_columns)
        inside = _lines(
            [each], each.name, unit, x_label, (), (width, height), from_zero=from_zero, ends=ends, with_legend=False
        )
        panels.append(element("g", *inside, transform=f"translate({column * (width + 16)} {row * (height + 12)})"))
    num_rows = math.ceil(len(series) / num_columns)
    return svg(
        *panels,
        width=min(max(len(series), 1), num_columns) * (width + 16),
        height=max(num_rows, 1) * (height + 12),
        title=title,
        description=_description(series, unit),
        interactive=any(each.href for each in series),
    )


def stacked_areas(
    series: Sequence[ChartSeries],
    *,
    title: str,
    unit: str = "",
    x_label: str = "step",
    width: int = 640,
    height: int = 240,
) -> Markup:
    """Return areas on top of each other as SVG, the first at the bottom: the parts of a whole, such as a step's time.

    Args:
        series: the parts, with equal `xs`; gaps and negative values count as zero.
        title: what it shows.
        unit: unit of the values.
        x_label: name of the x axis, with its unit.
        width: pixels.
        height: pixels.
    """
    xs = list(series[0].xs) if series else []
    kept = _kept_numbers(len(xs))
    xs = [xs[number] for number in kept]
    levels = [[0.0] * len(xs)]
    for each in series:
        levels.append(
            [below + _at_least_zero(each.ys[number]) for below, number in zip(levels[-1], kept, strict=True)]
        )
    names, colours = _names_and_colours(series)
    frame = ChartFrame.of(xs, levels[-1], (width, height), names, from_zero=True)
    areas = []
    for each, colour, below, above in zip(series, colours, levels, levels[1:], strict=False):
        outline = [*zip(xs, above, strict=True), *reversed(list(zip(xs, below, strict=True)))]
        points = " ".join(f"{number_text(frame.x(x))},{number_text(frame.y(y))}" for x, y in outline)
        areas.append(
            element(
                "polygon", element("title", each.name), points=points, class_=f"area fill {colour}", fill_opacity=0.85
            )
        )
    return svg(
        *frame.axes(title, unit, x_label),
        *areas,
        *legend(names, colours, [each.href for each in series], width),
        width=width,
        height=height,
        title=title,
        description=_description(series, unit),
        interactive=any(each.href for each in series),
    )


def chart_table(
    series: Sequence[ChartSeries], *, title: str, unit: str = "", x_label: str = "step", max_rows: int = _MAX_ROWS
) -> Markup:
    """Return the numbers of a chart as a table: a row for each x, a column for each series.

    If there are more than `max_rows`, the table has the last ones.
    """
    values = [dict(zip(each.xs, each.ys, strict=True)) for each in series]
    xs = sorted({x for each in values for x in each})
    rows = [(x, *(each.get(x) for each in values)) for x in xs[-max_rows:]]
    caption = title if len(xs) <= max_rows else f"{title}; the last {max_rows:,} of {len(xs):,} values"
    return html_table([x_label, *(TableColumn(each.name, unit) for each in series)], rows, caption=caption)


def _lines(
    series: Sequence[ChartSeries],
    title: str,
    unit: str,
    x_label: str,
    marks: Sequence[ChartMark],
    size: tuple[int, int],
    *,
    from_zero: bool | None,
    ends: tuple[float, float] | None = None,
    with_legend: bool = True,
) -> list[Markup]:
    thinned = [thin_points(each.xs, each.ys, _MAX_POINTS) for each in series]
    known = [(x, y) for points in thinned for x, y in points if y is not None]
    names, colours = _names_and_colours(series)
    is_rate = unit.startswith("bytes") or unit.endswith("/s")
    frame = ChartFrame.of(
        [*(x for x, _ in known), *(ends or ())],
        [y for _, y in known],
        size,
        names if with_legend else (),
        from_zero=is_rate if from_zero is None else from_zero,
    )
    return [
        *frame.axes(title, unit, x_label),
        *(_mark(mark, frame) for mark in marks if frame.xs[0] <= mark.x <= frame.xs[1]),
        *(
            _line(points, frame, colour, each.name, unit)
            for each, points, colour in zip(series, thinned, colours, strict=True)
        ),
        *(legend(names, colours, [each.href for each in series], size[0]) if with_legend else []),
    ]


def _line(
    points: Sequence[tuple[float, float | None]], frame: ChartFrame, colour: str, name: str, unit: str
) -> Markup:
    way = []
    is_down = False
    for x, y in points:
        if y is not None:
            way.append(f"{'L' if is_down else 'M'}{number_text(frame.x(x))} {number_text(frame.y(y))}")
        is_down = y is not None
    parts = [element("path", element("title", name), d="".join(way), class_=f"line {colour}", stroke_width=1.5)]
    known = [(x, y) for x, y in points if y is not None]
    if len(known) <= _MAX_DOTS:
        for x, y in known:
            title = element("title", f"{name} at {format_quantity(x)}: {format_quantity(y, unit)}")
            parts.append(element("circle", title, cx=frame.x(x), cy=frame.y(y), r=2.5, class_=f"mark fill {colour}"))
    return markup(parts)


def _mark(mark: ChartMark, frame: ChartFrame) -> Markup:
    x = frame.x(mark.x)
    colour = "problem" if mark.is_problem else "grey"
    line = element(
        "line", x1=x, y1=frame.top, x2=x, y2=frame.base, class_=f"mark line {colour}", stroke_dasharray="3 3"
    )
    return link(markup([element("g", element("title", mark.label), line)]), mark.href, title=mark.label)


def _names_and_colours(series: Sequence[ChartSeries]) -> tuple[list[str], list[str]]:
    colours = [each.colour or colour_class(number) for number, each in enumerate(series)]
    return [each.name for each in series], colours


def _at_least_zero(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) and value > 0 else 0.0


def _kept_numbers(count: int) -> list[int]:
    """Return the numbers of the points that are drawn, evenly, with the first and the last."""
    if count <= _MAX_POINTS:
        return list(range(count))
    return sorted({round(number * (count - 1) / (_MAX_POINTS - 1)) for number in range(_MAX_POINTS)})


def _description(series: Sequence[ChartSeries], unit: str) -> str:
    """Return the last value of each series in words, as screen readers read it."""
    lasts = [
        f"{each.name}: last {format_quantity(next((y for y in reversed(each.ys) if y is not None), None), unit)}"
        for each in series
    ]
    return "; ".join([f"{count_text(len(series), 'series', 'series')}", *lasts[:8]])
