"""Heat maps: cells whose opacity grows with their value, such as the change of each layer from version to version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from datasvc.drawing.elements import Markup, element, shorten, svg
from datasvc.drawing.numbers import format_quantity
from datasvc.drawing.table import TableColumn, html_table

_LABEL_WIDTH: Final = 220
_MAX_LABEL: Final = 30
_TOP: Final = 44
_CELL_HEIGHT: Final = 20
_MIN_OPACITY: Final = 0.04


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
) -> Markup:
    """Return a heat map as SVG.

    Args:
        rows: names of the rows.
        columns: names of the columns.
        values: for each row a value for each column, not negative; None and NaN are empty cells.
        title: what the values are.
        unit: their unit, as in `format_quantity`.
        max_rows: further rows are left out, and "and 312 more" is drawn.
        cell_width: pixels.
        log_scale: opacity is proportional to the logarithm of the value; smaller values are then told apart.
    """
    known = [value for row in values for value in row if value is not None and math.isfinite(value)]
    low, high = min((value for value in known if value > 0), default=1.0), max(known, default=1.0)
    shown = rows[:max_rows]
    parts = [element("text", f"{title} ({unit})" if unit else title, x=0, y=14, font_weight="bold")]
    every = max(1, math.ceil(70 / cell_width))  # not every column has room for its name
    for number in range(0, len(columns), every):
        x = _LABEL_WIDTH + number * cell_width
        parts.append(element("text", shorten(columns[number], 12), x=x, y=_TOP - 8, class_="quiet", font_size=11))
    for number, (name, row) in enumerate(zip(shown, values, strict=False)):
        y = _TOP + number * _CELL_HEIGHT
        label = element(
            "text", element("title", name), shorten(name, _MAX_LABEL), x=_LABEL_WIDTH - 8, y=y + 14, text_anchor="end"
        )
        parts.append(label)
        for place, (column, value) in enumerate(zip(columns, row, strict=True)):
            strength = _strength(value, low, high, log_scale=log_scale)
            parts.append(
                element(
                    "rect",
                    element("title", f"{name}, {column}: {format_quantity(value, unit)}"),
                    x=_LABEL_WIDTH + place * cell_width,
                    y=y,
                    width=cell_width - 1,
                    height=_CELL_HEIGHT - 1,
                    class_="cell fill grey" if strength is None else "cell fill accent",
                    fill_opacity=0 if strength is None else max(strength, _MIN_OPACITY),
                )
            )
    if len(rows) > len(shown):
        y = _TOP + len(shown) * _CELL_HEIGHT + 15
        parts.append(element("text", f"and {len(rows) - len(shown):,} more", x=0, y=y, class_="quiet"))
    return svg(
        *parts,
        width=_LABEL_WIDTH + max(len(columns) * cell_width, 80) + 8,
        height=_TOP + (len(shown) + 1) * _CELL_HEIGHT,
        title=title,
        description=f"{len(rows)} rows and {len(columns)} columns; "
        f"the largest value is {format_quantity(max(known, default=None), unit)}",
    )


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
