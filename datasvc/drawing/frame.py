"""Series of values, and the frame of their chart: scales from values to pixels, axes with units, the legend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from datasvc.drawing.colours import colour_class
from datasvc.drawing.elements import Markup, element, link, shorten, shorten_to_width, text_width
from datasvc.drawing.numbers import choose_ticks, format_quantity
from datasvc.printable import count_text

_MIN_LEFT: Final = 40
_MIN_RIGHT: Final = 12
_GAP: Final = 6  # between a label and the plot
_BOTTOM: Final = 40
_TITLE: Final = 22
_LEGEND_ROW: Final = 18
_MAX_LABEL: Final = 40
_MAX_STRIPS: Final = 100
_NUM_X_TICKS: Final = (6, 5, 4, 3, 2)
_MAX_DESCRIBED: Final = 12


@dataclass(frozen=True)
class ChartFrame:
    """A chart's area and scales, in pixels.

    Attributes:
        width: of the whole chart.
        height: of the whole chart.
        top: upper end of the plot.
        left: left end of the plot; the labels of the y axis have room beside it.
        right: right end of the plot.
        xs: lowest and highest x.
        x_ticks: ticks of the x axis with their labels.
        y_ticks: ticks of the y axis with their labels; the first and last are its ends.
    """

    width: int
    height: int
    top: int
    left: float
    right: float
    xs: tuple[float, float]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]

    @classmethod
    def of(
        cls,
        xs: Sequence[float],
        ys: Sequence[float],
        size: tuple[int, int],
        names: Sequence[str],
        *,
        unit: str,
        from_zero: bool,
        x_text: Callable[[float], str] = format_quantity,
    ) -> ChartFrame:
        """Return the frame of `drawable` values, of a size, with room for a legend of `names`."""
        low, high = min(ys, default=0.0), max(ys, default=1.0)
        if from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        first, last = min(xs, default=0.0), max(xs, default=1.0)
        space = 0.0 if last > first else max(0.5, abs(first) * 1e-9)  # a single x is in the middle
        ends = (first - space, last + space)
        y_unit = unit if unit.startswith("bytes") else ""
        y_ticks = [(tick, format_quantity(tick, y_unit)) for tick in choose_ticks(low, high, 5)]
        # Half of a picture at most: the labels of extreme numbers are cut before the plot disappears.
        widest = min(max(text_width(text) for _, text in y_ticks) + _GAP, size[0] / 2)
        # No tick beside a single x: it would be a step that has not been taken.
        x_ticks = [(first, shorten(x_text(first), 16))] if space and xs else _x_ticks(ends, size[0] - widest, x_text)
        halves = [text_width(text) / 2 for _, text in x_ticks] or [0.0]
        rows = 1 + max((row for row, _ in _legend_places(names, size[0])), default=-1)
        return cls(
            *size,
            _TITLE + rows * _LEGEND_ROW + 8,
            max(_MIN_LEFT, widest, halves[0]),
            size[0] - max(_MIN_RIGHT, halves[-1]),
            ends,
            x_ticks,
            y_ticks,
        )

    @property
    def base(self) -> int:
        """The lower end of the plot."""
        return self.height - _BOTTOM

    def x(self, value: float) -> float:
        """Return the pixel of a value of x."""
        return self.left + (value - self.xs[0]) / (self.xs[1] - self.xs[0]) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the pixel of a value of y."""
        low, high = self.y_ticks[0][0], self.y_ticks[-1][0]
        return self.base - (value - low) / (high - low) * (self.base - self.top)

    def axes(self, title: str, unit: str, x_label: str) -> list[Markup]:
        """Return the title, grid lines and labels."""
        shown = shorten_to_width(f"{title} ({unit})" if unit else title, self.width, is_bold=True)
        parts = [element("text", shown, x=0, y=14, font_weight="bold")]
        for tick, text in self.y_ticks:
            y = self.y(tick)
            parts.append(element("line", x1=self.left, y1=y, x2=self.right, y2=y, class_="line pale"))
            label = shorten_to_width(text, self.left - _GAP)
            parts.append(element("text", label, x=self.left - _GAP, y=y + 4, text_anchor="end", class_="quiet"))
        for tick, text in self.x_ticks:
            parts.append(
                element("text", text, x=self.x(tick), y=self.base + 16, text_anchor="middle", class_="quiet")
            )
        middle = (self.left + self.right) / 2
        name = shorten_to_width(x_label, self.right - self.left)
        parts.append(element("text", name, x=middle, y=self.height - 6, text_anchor="middle", class_="quiet"))
        return parts


def _x_ticks(ends: tuple[float, float], room: float, x_text: Callable[[float], str]) -> list[tuple[float, str]]:
    """Return the ticks of an x axis whose labels do not touch each other."""
    ticks: list[tuple[float, str]] = []
    for count in _NUM_X_TICKS:
        ticks = [
            (tick, shorten(x_text(tick), 16))
            for tick in choose_ticks(*ends, max_ticks=count)
            if ends[0] <= tick <= ends[1]
        ]
        if sum(text_width(text) + 2 * _GAP for _, text in ticks) <= room:
            return ticks
    return ticks[:1]


def hover_strips(frame: ChartFrame, points: Sequence[tuple[int, float]], text: Callable[[int], str]) -> list[Markup]:
    """Return invisible strips over the whole height of a plot, each with the text of its point on hover.

    A script of a page finds them by the class "hover", the x of their points in `data-x`, and its pixel in `data-at`.

    Args:
        frame: frame of the chart.
        points: number and `drawable` x of each point, ascending. At most 100, evenly spaced, have a strip.
        text: returns the text of a point by its number.
    """
    stride = -(-len(points) // _MAX_STRIPS) or 1
    shown = [(frame.x(x), number) for number, x in points[::stride]]
    # A strip reaches half way to its neighbours.
    edges = [
        float(frame.left),
        *((left + right) / 2 for (left, _), (right, _) in pairwise(shown)),
        float(frame.right),
    ]
    return [
        element(
            "rect",
            element("title", text(number)),
            data_x=x,
            data_at=at,
            x=left,
            y=frame.top,
            width=right - left,
            height=frame.base - frame.top,
            fill="transparent",
            class_="hover",
        )
        for (number, x), (at, _), (left, right) in zip(points[::stride], shown, pairwise(edges), strict=False)
    ]


def legend(names: Sequence[str], colours: Sequence[str], hrefs: Sequence[str | None], width: int) -> list[Markup]:
    """Return the legend below the title: a swatch and a name for each series, links where there is an address.

    The class of each entry is "key", by which the script of a page finds it.
    """
    places = _legend_places(names, width)
    xs, tops = [x for _, x in places], [_TITLE + row * _LEGEND_ROW + 4 for row, _ in places]
    return [
        link(
            element(
                "g",
                element("rect", x=x, y=top, width=10, height=10, class_=f"mark fill {colour}"),
                element("text", _legend_text(name, width), x=x + 14, y=top + 9),
                class_="key",
            ),
            href,
            title=name,
        )
        for name, colour, href, x, top in zip(names, colours, hrefs, xs, tops, strict=True)
    ]


def _legend_text(name: str, width: int) -> str:
    return shorten_to_width(shorten(name, _MAX_LABEL), width - 14)


def _legend_places(names: Sequence[str], width: int) -> list[tuple[int, float]]:
    """Return row and x of each entry of a legend."""
    places = []
    row, x = 0, 0.0
    for name in names:
        room = text_width(_legend_text(name, width)) + 14
        if x and x + room > width:
            row, x = row + 1, 0.0
        places.append((row, x))
        x += room + 12
    return places


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
        is_minor: whether it is one of many, such as the checkpoints of a run: a short line on the axis.
    """

    x: float
    label: str
    is_problem: bool = False
    href: str | None = None
    is_minor: bool = False


def names_and_colours(series: Sequence[ChartSeries]) -> tuple[list[str], list[str]]:
    """Return the names and the classes of the colours."""
    colours = [each.colour or colour_class(number) for number, each in enumerate(series)]
    return [each.name for each in series], colours


def describe_values(
    series: Sequence[ChartSeries],
    number: int,
    unit: str,
    x_label: str,
    x_text: Callable[[float], str] = format_quantity,
) -> str:
    """Return the values of all series at one of their equal `xs` in words."""
    lines = [f"{each.name}: {format_quantity(each.ys[number], unit)}" for each in series[:_MAX_DESCRIBED]]
    more = [f"and {len(series) - _MAX_DESCRIBED} more"] if len(series) > _MAX_DESCRIBED else []
    return "; ".join([f"{x_label} {x_text(series[0].xs[number])}", *lines, *more])


def describe_series(series: Sequence[ChartSeries], unit: str) -> str:
    """Return the last value of each series in words, as screen readers read it."""
    lasts = [
        f"{each.name}: last {format_quantity(next((y for y in reversed(each.ys) if y is not None), None), unit)}"
        for each in series
    ]
    return "; ".join([f"{count_text(len(series), 'series', 'series')}", *lasts[:8]])
