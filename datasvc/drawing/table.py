"""Tables as HTML: also the numbers of every chart, for reading and for screen readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datasvc.drawing.elements import Markup, element, markup
from datasvc.drawing.numbers import format_quantity

Cell = str | float | None


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    Attributes:
        name: its heading.
        unit: unit of its numbers, as in `format_quantity`.
        head: markup below the heading, such as a small histogram.
    """

    name: str
    unit: str = ""
    head: Markup | None = None


def html_table(
    columns: Sequence[str | TableColumn],
    rows: Sequence[Sequence[Cell]],
    *,
    caption: str = "",
    max_rows: int | None = None,
) -> Markup:
    """Return a table. Numbers have thousands separators and stand on the right; None is an empty cell.

    Args:
        columns: headings, in order.
        rows: the cells of each row: text, numbers, or markup such as a `link`.
        caption: what the table shows.
        max_rows: further rows are left out, and a last row gives their number; None for all rows.
    """
    heads = [column if isinstance(column, TableColumn) else TableColumn(column) for column in columns]
    shown = rows[:max_rows]
    is_number = [
        any(_is_number(row[number]) for row in shown)
        and all(_is_number(row[number]) or row[number] is None for row in shown)
        for number in range(len(heads))
    ]
    classes = ["number" if each else None for each in is_number]
    body = [
        element(
            "tr",
            *(
                element("td", cell_text(cell, head.unit), class_=css)
                for cell, head, css in zip(row, heads, classes, strict=True)
            ),
        )
        for row in shown
    ]
    if len(rows) > len(shown):
        body.append(element("tr", element("td", f"and {len(rows) - len(shown):,} more", colspan=len(heads))))
    head_row = element(
        "tr",
        *(
            element("th", head.name, head.head or Markup(), scope="col", class_=css)
            for head, css in zip(heads, classes, strict=True)
        ),
    )
    return element(
        "table",
        *([element("caption", caption)] if caption else []),
        element("thead", head_row),
        element("tbody", markup(body)),
    )


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def cell_text(cell: Cell, unit: str = "") -> str:
    """Return a cell as text: numbers with separators and their unit, "yes" and "no", and "" for None."""
    if isinstance(cell, str):
        return cell
    if cell is None or isinstance(cell, bool):
        return "" if cell is None else ("yes" if cell else "no")
    return format_quantity(cell, unit)
