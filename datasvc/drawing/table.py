"""Tables, facts, folded sections and figures as HTML; also the numbers of every chart, for screen readers."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
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


def facts_table(facts: Mapping[str, Cell], *, caption: str = "") -> Markup:
    """Return names with values, a row for each; None is left out."""
    rows = [
        element("tr", element("th", name, scope="row"), element("td", cell_text(value)))
        for name, value in facts.items()
        if value is not None
    ]
    return element("table", *([element("caption", caption)] if caption else []), element("tbody", markup(rows)))


def folded(summary: str, content: Markup, *, is_open: bool = False) -> Markup:
    """Return content that is shown after a click on its summary; without content, nothing."""
    if not content:
        return Markup()
    return element("details", element("summary", summary), content, open="open" if is_open else None)


def figure(image: bytes | None, captions: Iterable[str], *, title: str, is_problem: bool = False) -> Markup:
    """Return a picture with lines of text below.

    Args:
        image: a PNG file that this program has encoded; None for a sample without a picture.
        captions: the lines.
        title: what it is, for screen readers and on hover.
        is_problem: whether to mark it.
    """
    encoded = None if image is None else base64.b64encode(image).decode()
    picture = (
        element("img", src=f"data:image/png;base64,{encoded}", alt=title, title=title)
        if encoded is not None
        else Markup()
    )
    lines = [element("div", line) for line in captions if line]
    return element("figure", picture, element("figcaption", *lines), class_="bad" if is_problem else None)
