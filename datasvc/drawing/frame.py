"""The frame of a chart: scales from values to pixels, axes with units, and the legend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from datasvc.drawing.elements import Markup, element, link, shorten
from datasvc.drawing.numbers import choose_ticks, format_quantity

_LEFT: Final = 72
_RIGHT: Final = 16
_BOTTOM: Final = 40
_TITLE: Final = 22
_LEGEND_ROW: Final = 18
_CHARACTER: Final = 7
_MAX_LABEL: Final = 40
_MAX_STRIPS: Final = 100


@dataclass(frozen=True)
class ChartFrame:
    """A chart's area and scales, in pixels.

    Attributes:
        width: of the whole chart.
        height: of the whole chart.
        top: upper end of the plot.
        xs: lowest and highest x.
        y_ticks: ticks of the y axis; the first and last are its ends.
    """

    width: int
    height: int
    top: int
    xs: tuple[float, float]
    y_ticks: Sequence[float]

    @classmethod
    def of(
        cls, xs: Sequence[float], ys: Sequence[float], size: tuple[int, int], names: Sequence[str], *, from_zero: bool
    ) -> ChartFrame:
        """Return the frame of `drawable` values, of a size, with room for a legend of `names`."""
        low, high = min(ys, default=0.0), max(ys, default=1.0)
        if from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        first, last = min(xs, default=0.0), max(xs, default=1.0)
        top = _TITLE + (1 + max((row for row, _ in _legend_places(names, size[0])), default=-1)) * _LEGEND_ROW + 8
        return cls(
            *size,
            top,
            (first, last if last > first else first + max(1.0, abs(first) * 1e-9)),
            choose_ticks(low, high, 5),
        )

    @property
    def base(self) -> int:
        """The lower end of the plot."""
        return self.height - _BOTTOM

    @property
    def left(self) -> int:
        """The left end of the plot."""
        return _LEFT

    @property
    def right(self) -> int:
        """The right end of the plot."""
        return self.width - _RIGHT

    def x(self, value: float) -> float:
        """Return the pixel of a value of x."""
        return _LEFT + (value - self.xs[0]) / (self.xs[1] - self.xs[0]) * (self.right - _LEFT)

    def y(self, value: float) -> float:
        """Return the pixel of a value of y."""
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.base - (value - low) / (high - low) * (self.base - self.top)

    def axes(self, title: str, unit: str, x_label: str) -> list[Markup]:
        """Return the title, grid lines and labels."""
        shown = f"{title} ({unit})" if unit else title
        parts = [element("text", shorten(shown, self.width // _CHARACTER), x=0, y=14, font_weight="bold")]
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(element("line", x1=_LEFT, y1=y, x2=self.right, y2=y, class_="line pale"))
            text = format_quantity(tick, unit if unit.startswith("bytes") else "")
            parts.append(element("text", text, x=_LEFT - 6, y=y + 4, text_anchor="end", class_="quiet"))
        for tick in choose_ticks(*self.xs, max_ticks=5):
            if self.xs[0] <= tick <= self.xs[1]:
                text = format_quantity(tick)
                parts.append(
                    element("text", text, x=self.x(tick), y=self.base + 16, text_anchor="middle", class_="quiet")
                )
        middle = (_LEFT + self.right) / 2
        parts.append(element("text", x_label, x=middle, y=self.height - 6, text_anchor="middle", class_="quiet"))
        return parts


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
                element("text", shorten(name, _MAX_LABEL), x=x + 14, y=top + 9),
                class_="key",
            ),
            href,
            title=name,
        )
        for name, colour, href, x, top in zip(names, colours, hrefs, xs, tops, strict=True)
    ]


def _legend_places(names: Sequence[str], width: int) -> list[tuple[int, int]]:
    """Return row and x of each entry of a legend."""
    places = []
    row, x = 0, 0
    for name in names:
        room = min(len(name), _MAX_LABEL) * _CHARACTER + 30
        if x and x + room > width:
            row, x = row + 1, 0
        places.append((row, x))
        x += room
    return places
