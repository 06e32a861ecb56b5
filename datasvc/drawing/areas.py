"""Stacked areas: what a whole, such as the time of a step, consists of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from datasvc.drawing.elements import Markup, element, number_text, svg
from datasvc.drawing.frame import ChartFrame, hover_strips, legend
from datasvc.drawing.numbers import drawable
from datasvc.drawing.series import ChartSeries, describe_series, describe_values, names_and_colours

_MAX_POINTS: Final = 1000  # more would not be visible


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
    if count <= _MAX_POINTS:
        return list(range(count))
    return sorted({round(number * (count - 1) / (_MAX_POINTS - 1)) for number in range(_MAX_POINTS)})
