"""Parts of a page that describes one value: facts, sections that open on a click, and figures with captions."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping

from datasvc.drawing.elements import Markup, element, markup
from datasvc.drawing.table import Cell, cell_text


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
