"""Heat maps: cells whose opacity grows with their value, such as the change of each layer from version to version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from datasvc.drawing.elements import Markup, element, shorten_to_width, svg, text_width
from datasvc.drawing.numbers import format_quantity
from datasvc.drawing.table import TableColumn, html_table

_MAX_LABEL_WIDTH: Final = 220
_TOP: Final = 44  # of the cells, below the title
_TITLE_HEIGHT: Final = 22
_CELL_HEIGHT: Final = 20
_MIN_OPACITY: Final = 0.04
_NUMBERED_OPACITY: Final = 0.6  # of the largest value, so that its number can be read
_NUM_SWATCHES: Final = 5
_SWATCH: Final = 20


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    title: str,
    unit: str = "",
    max_rows: int = 100,
    cell_width: int = 36,
    log_scale: bool = False,
    with_numbers: bool = False,
    with_title: bool = True,
) -> Markup:
    """Return a heat map as SVG, with its scale.

    Args:
        rows: names of the rows.
        columns: names of the columns.
        values: for each row a value for each column, not negative; None and NaN are empty cells.
        title: what the values are.
        unit: their unit, as in `format_quantity`.
        max_rows: further rows are left out, and "and 312 more" is drawn.
        cell_width: pixels; a number takes some 70.
        log_scale: opacity is proportional to the logarithm of the value; smaller values are then told apart.
        with_numbers: whether each cell has its number, to three digits.
        with_title: whether the title and the unit are drawn; without, they are for screen readers only.
    """
    known = [value for row in values for value in row if value is not None and math.isfinite(value)]
    low, high = min((value for value in known if value > 0), default=1.0), max(known, default=1.0)
    strongest = _NUMBERED_OPACITY if with_numbers else 1.0
    shown = rows[:max_rows]
    left = min(max((text_width(name[:100]) for name in shown), default=0.0) + 8, _MAX_LABEL_WIDTH)
    width = max(left + len(columns) * cell_width, left + 80, _scale_width(low, high, unit)) + 8
    caption = shorten_to_width(f"{title} ({unit})" if unit else title, width, is_bold=True)
    parts = [element("text", caption, x=0, y=14, font_weight="bold")] if with_title else []
    y_scale = _TITLE_HEIGHT if with_title else 0
    top = y_scale + _TOP
    parts += _scale(y_scale, (low, high), unit, strongest, log_scale=log_scale) if known else []
    parts += _column_names(columns, (left, top - 8), cell_width)
    for number, (name, row) in enumerate(zip(shown, values, strict=False)):
        y = top + number * _CELL_HEIGHT
        text = shorten_to_width(name, left - 8)
        parts.append(element("text", element("title", name), text, x=left - 8, y=y + 14, text_anchor="end"))
        for place, (column, value) in enumerate(zip(columns, row, strict=True)):
            strength = _strength(value, low, high, log_scale=log_scale)
            x = left + place * cell_width
            hover = element("title", f"{name}, {column}: {format_quantity(value, unit)}")
            parts.append(_cell(hover, (x, y), cell_width, None if strength is None else strength * strongest))
            if with_numbers and strength is not None:
                text = shorten_to_width(f"{value:.3g}", cell_width - 8)
                parts.append(element("text", hover, text, x=x + cell_width - 6, y=y + 14, text_anchor="end"))
    if len(rows) > len(shown):
        y = top + len(shown) * _CELL_HEIGHT + 15
        parts.append(element("text", f"and {len(rows) - len(shown):,} more", x=0, y=y, class_="quiet"))
    return svg(
        *parts,
        width=width,
        height=top + (len(shown) + 1) * _CELL_HEIGHT,
        title=title,
        description=f"{len(rows)} rows and {len(columns)} columns; "
        f"the largest value is {format_quantity(max(known, default=None), unit)}",
    )


def _column_names(columns: Sequence[str], at: tuple[float, float], cell_width: int) -> list[Markup]:
    """Return the names of the columns that have room for theirs, from the place `at` to the right."""
    every = max(1, math.ceil(70 / cell_width))
    return [
        element(
            "text",
            shorten_to_width(columns[number], every * cell_width - 6, 12),
            x=at[0] + number * cell_width,
            y=at[1],
            class_="quiet",
        )
        for number in range(0, len(columns), every)
    ]


def _cell(hover: Markup, at: tuple[float, float], width: float, opacity: float | None) -> Markup:
    return element(
        "rect",
        hover,
        x=at[0],
        y=at[1],
        width=width - 1,
        height=_CELL_HEIGHT - 1,
        class_="cell fill grey" if opacity is None else "cell fill accent",
        fill_opacity=0 if opacity is None else max(opacity, _MIN_OPACITY),
    )


def _scale(y: float, ends: tuple[float, float], unit: str, strongest: float, *, log_scale: bool) -> list[Markup]:
    """Return the scale at the height `y`: the colours between the lowest and the highest value."""
    low, high = ends
    first = format_quantity(low if log_scale else 0, unit)
    x = text_width(first) + 6
    parts = [element("text", first, x=0, y=y + 14, class_="quiet")]
    for number in range(_NUM_SWATCHES):
        share = number / (_NUM_SWATCHES - 1)
        strength = _strength(low * (high / low) ** share, low, high, log_scale=True) if log_scale else share
        parts.append(
            element(
                "rect",
                x=x + number * _SWATCH,
                y=y + 4,
                width=_SWATCH,
                height=12,
                class_="fill accent",
                fill_opacity=max((strength or 0.0) * strongest, _MIN_OPACITY),
            )
        )
    last = format_quantity(high, unit) + (", log scale" if log_scale else "")
    parts.append(element("text", last, x=x + _NUM_SWATCHES * _SWATCH + 6, y=y + 14, class_="quiet"))
    return parts


def _scale_width(low: float, high: float, unit: str) -> float:
    texts = (format_quantity(low, unit), f"{format_quantity(high, unit)}, log scale")
    return sum(map(text_width, texts)) + _NUM_SWATCHES * _SWATCH + 12


def heat_map_table(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    title: str,
    name: str = "name",
    unit: str = "",
    max_rows: int = 1000,
) -> Markup:
    """Return the numbers of `heat_map` as a table."""
    cells = [(row, *each) for row, each in zip(rows, values, strict=True)]
    return html_table(
        [name, *(TableColumn(column, unit) for column in columns)], cells, caption=title, max_rows=max_rows
    )


def _strength(value: float | None, low: float, high: float, *, log_scale: bool) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    if not log_scale:
        return min(max(value / high, 0.0), 1.0) if high > 0 else 0.0
    if value <= 0:
        return 0.0
    # Not log(high / low): the quotient may be infinite.
    span = math.log(high) - math.log(low)
    return (1 + math.log(value) - math.log(low)) / (1 + span) if high > low else 1.0
