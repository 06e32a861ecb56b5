"""Charts of numbers over steps or time: lines, stacked areas, small multiples, and their numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from datasvc.drawing.elements import Markup, element, link, markup, number_text, svg
from datasvc.drawing.frame import (
    ChartFrame,
    ChartMark,
    ChartSeries,
    describe_series,
    describe_values,
    hover_strips,
    legend,
    names_and_colours,
)
from datasvc.drawing.numbers import drawable, format_quantity, thin_points
from datasvc.drawing.table import TableColumn, html_table

_MAX_POINTS: Final = 1000  # of a line; more would not be visible
_MAX_DOTS: Final = 60  # up to this number, each point is a dot with its values on hover
_MAX_ROWS: Final = 1000
_MINOR_MARK: Final = 10  # pixels
_MAX_AREA_POINTS: Final = 1000  # more would not be visible


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
    x_text: Callable[[float], str] = format_quantity,
    y_limit: float | None = None,
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
        x_text: returns the text of an x.
        y_limit: larger values are drawn at the upper edge, so that a line far above the others does not flatten them.
    """
    parts = _lines(
        series,
        title,
        unit,
        x_label,
        marks,
        (width, height),
        from_zero=from_zero,
        x_text=x_text,
        y_limit=math.inf if y_limit is None else y_limit,
    )
    return svg(
        *parts,
        width=width,
        height=height,
        title=title,
        description=describe_series(series, unit),
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
    same_range: bool = False,
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
        same_range: whether all have the same range of y, so that their values can be compared.
        width: of one chart, pixels.
        height: of one chart, pixels.
    """
    ends = _common_ends(series, same_range=same_range)
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
        description=describe_series(series, unit),
        interactive=any(each.href for each in series),
    )


def separate_charts(
    series: Sequence[ChartSeries],
    *,
    unit: str = "",
    x_label: str = "step",
    from_zero: bool | None = None,
    width: int = 320,
    height: int = 160,
    x_text: Callable[[float], str] = format_quantity,
) -> list[Markup]:
    """Return a chart for each series, with the same ranges of x and y, as a page that lays them out needs them.

    For arguments, see `line_chart`; the title of each is the name of its series.
    """
    ends = _common_ends(series, same_range=True)
    return [
        svg(
            *_lines(
                [each],
                each.name,
                unit,
                x_label,
                (),
                (width, height),
                from_zero=from_zero,
                ends=ends,
                with_legend=False,
                x_text=x_text,
            ),
            width=width,
            height=height,
            title=each.name,
            description=describe_series([each], unit),
            interactive=each.href is not None,
        )
        for each in series
    ]


def _common_ends(series: Sequence[ChartSeries], *, same_range: bool) -> tuple[list[float], list[float]]:
    """Return the ends of x of all series, and with `same_range` those of y, for a frame that all have."""
    every_x = [x for each in series for x in map(drawable, each.xs) if x is not None]
    every_y = [y for each in series for y in map(drawable, each.ys) if y is not None] if same_range else []
    return [*_ends(every_x)], [*_ends(every_y)]


def _ends(values: Sequence[float]) -> tuple[float, ...]:
    return (min(values), max(values)) if values else ()


def chart_table(
    series: Sequence[ChartSeries],
    *,
    title: str,
    unit: str = "",
    x_label: str = "step",
    max_rows: int = _MAX_ROWS,
    x_text: Callable[[float], str] | None = None,
) -> Markup:
    """Return the numbers of a chart as a table: a row for each x, a column for each series.

    If there are more than `max_rows`, the table has the last ones.
    """
    values = [dict(zip(each.xs, each.ys, strict=True)) for each in series]
    xs = sorted({x for each in values for x in each})
    rows = [(x if x_text is None else x_text(x), *(each.get(x) for each in values)) for x in xs[-max_rows:]]
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
    ends: tuple[Sequence[float], Sequence[float]] = ((), ()),
    with_legend: bool = True,
    x_text: Callable[[float], str] = format_quantity,
    y_limit: float = math.inf,
) -> list[Markup]:
    thinned = [
        [(x, None if y is None else min(y, y_limit)) for x, y in thin_points(each.xs, each.ys, _MAX_POINTS)]
        for each in series
    ]
    known = [(x, y) for points in thinned for x, y in points if y is not None]
    names, colours = names_and_colours(series)
    is_rate = unit.startswith("bytes") or unit.endswith("/s")
    frame = ChartFrame.of(
        [*(x for x, _ in known), *ends[0]],
        [*(y for _, y in known), *ends[1]],
        size,
        names if with_legend else (),
        unit=unit,
        x_text=x_text,
        from_zero=is_rate if from_zero is None else from_zero,
    )
    middle = ((frame.left + frame.right) / 2, (frame.top + frame.base) / 2)
    nothing = element("text", "no values", x=middle[0], y=middle[1], text_anchor="middle", class_="quiet")
    return [
        *frame.axes(title, unit, x_label),
        *([] if known else [nothing]),
        *hover_strips(
            frame, _shared_points(series), lambda number: describe_values(series, number, unit, x_label, x_text)
        ),
        *(_mark(mark, frame) for mark in marks if frame.xs[0] <= mark.x <= frame.xs[1]),
        *(
            _line(points, frame, colour, each.name, unit, x_text)
            for each, points, colour in zip(series, thinned, colours, strict=True)
        ),
        *(legend(names, colours, [each.href for each in series], size[0]) if with_legend else []),
    ]


def _shared_points(series: Sequence[ChartSeries]) -> list[tuple[int, float]]:
    """Return number and x of the points of lines with equal `xs`; none for other lines."""
    if not series or any(list(each.xs) != list(series[0].xs) for each in series):
        return []
    xs = [(number, drawable(x)) for number, x in enumerate(series[0].xs)]
    # A point that no line has may be outside of the frame.
    return [
        (number, x)
        for number, x in xs
        if x is not None and any(drawable(each.ys[number]) is not None for each in series)
    ]


def _line(
    points: Sequence[tuple[float, float | None]],
    frame: ChartFrame,
    colour: str,
    name: str,
    unit: str,
    x_text: Callable[[float], str],
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
            title = element("title", f"{name} at {x_text(x)}: {format_quantity(y, unit)}")
            parts.append(element("circle", title, cx=frame.x(x), cy=frame.y(y), r=2.5, class_=f"mark fill {colour}"))
    # The script of a page hides a series by its place in the legend.
    return element("g", *parts, class_="part")


def _mark(mark: ChartMark, frame: ChartFrame) -> Markup:
    x = frame.x(mark.x)
    colour = "problem" if mark.is_problem else "grey"
    # A minor mark is a short line on the axis: many long ones would hide the curve.
    top, dashes = (frame.base - _MINOR_MARK, None) if mark.is_minor else (frame.top, "3 3")
    line = element("line", x1=x, y1=top, x2=x, y2=frame.base, class_=f"mark line {colour}", stroke_dasharray=dashes)
    return link(markup([element("g", element("title", mark.label), line)]), mark.href, title=mark.label)


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
        series: the parts, with equal `xs`. Points whose x is not finite are left out. Gaps and negative values count
            as zero.
        title: what it shows.
        unit: unit of the values.
        x_label: name of the x axis, with its unit.
        width: pixels.
        height: pixels.
    """
    numbered = [(number, drawable(x)) for number, x in enumerate(series[0].xs if series else ())]
    points = [(number, x) for number, x in numbered if x is not None]
    points = [points[place] for place in _kept_numbers(len(points))]
    kept, xs = [number for number, _ in points], [x for _, x in points]
    levels = [[0.0] * len(xs)]
    for each in series:
        levels.append(
            [below + _at_least_zero(each.ys[number]) for below, number in zip(levels[-1], kept, strict=True)]
        )
    names, colours = names_and_colours(series)
    frame = ChartFrame.of(xs, levels[-1], (width, height), names, unit=unit, from_zero=True)
    areas = []
    for each, colour, below, above in zip(series, colours, levels, levels[1:], strict=False):
        outline = [*zip(xs, above, strict=True), *reversed(list(zip(xs, below, strict=True)))]
        corners = " ".join(f"{number_text(frame.x(x))},{number_text(frame.y(y))}" for x, y in outline)
        areas.append(
            element(
                "polygon",
                element("title", each.name),
                points=corners,
                class_=f"part area fill {colour}",
                fill_opacity=0.85,
            )
        )
    return svg(
        *frame.axes(title, unit, x_label),
        *areas,
        *hover_strips(frame, points, lambda number: describe_values(series, number, unit, x_label)),
        *legend(names, colours, [each.href for each in series], width),
        width=width,
        height=height,
        title=title,
        description=describe_series(series, unit),
        interactive=any(each.href for each in series),
    )


def _at_least_zero(value: float | None) -> float:
    return max(drawable(value) or 0.0, 0.0)


def _kept_numbers(count: int) -> list[int]:
    """Return the numbers of the points that are drawn, evenly, with the first and the last."""
    if count <= _MAX_AREA_POINTS:
        return list(range(count))
    return sorted({round(number * (count - 1) / (_MAX_AREA_POINTS - 1)) for number in range(_MAX_POINTS)})
