"""Plots with matplotlib, in the colours of `datasvc.drawing`. Imported only where a plot is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from datasvc.drawing import ChartSeries
from datasvc.drawing.colours import colour_class, colour_values
from datasvc.errors import ConfigError
from datasvc.extras import how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_lines(series: Sequence[ChartSeries], *, title: str, unit: str, x_label: str, ax: Axes | None = None) -> Axes:
    """Plot lines with a dot for each point; None and NaN are gaps.

    Args:
        series: the lines.
        title: what they show.
        unit: label of the y axis.
        x_label: label of the x axis.
        ax: axes to plot into; None for a new figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    ax = ax if ax is not None else _new_axes()
    for number, each in enumerate(series):
        ys = [math.nan if y is None else y for y in each.ys]
        ax.plot(list(each.xs), ys, marker="o", markersize=3, color=_colour(number), label=_plain(each.name))
    ax.set(title=_plain(title), xlabel=_plain(x_label), ylabel=_plain(unit))
    if len(series) > 1:
        ax.legend()
    return ax


def plot_stacks(
    bars: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    title: str,
    unit: str,
    ax: Axes | None = None,
) -> Axes:
    """Plot horizontal bars that consist of parts, the first bar on top.

    Args:
        bars: names of the bars.
        parts: for each part, its length in each bar.
        title: what they show.
        unit: label of the x axis.
        ax: axes to plot into; None for a new figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    ax = ax if ax is not None else _new_axes()
    starts = [0.0] * len(bars)
    for number, (name, lengths) in enumerate(parts.items()):
        ax.barh(range(len(bars)), lengths, left=starts, color=_colour(number), label=_plain(name))
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    ax.set_yticks(range(len(bars)), [_plain(bar) for bar in bars])
    ax.invert_yaxis()
    ax.set(title=_plain(title), xlabel=_plain(unit))
    if len(parts) > 1:
        ax.legend()
    return ax


def _new_axes() -> Axes:
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ConfigError(f"a plot needs matplotlib, which is not installed: {how_to_install('plot')}") from error
    return plt.subplots(figsize=(8, 4.5), layout="constrained")[1]


def _colour(number: int) -> str:
    return colour_values(colour_class(number))[0]


def _plain(text: str) -> str:
    # matplotlib reads a pair of dollar signs as a formula, and fails on one that is not valid.
    return text.replace("$", r"\$")
