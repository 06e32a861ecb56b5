"""Values over steps or time, and events: what charts are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.drawing.colours import colour_class
from datasvc.drawing.numbers import format_quantity
from datasvc.printable import count_text

_MAX_DESCRIBED: Final = 12


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
