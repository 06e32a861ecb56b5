"""Tables of many rows: sorted and divided into pages by the address, so that they work without JavaScript."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from datasvc.drawing import HistogramBin, Markup, format_quantity, number_head
from datasvc.drawing.numbers import drawable
from datasvc.ui.web.links import with_query
from datasvc.ui.web.page import Query

_ROWS_PER_PAGE: Final = 100
_MIN_PICTURED: Final = 20  # values of a histogram
_NUM_BINS: Final = 12


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        text: its head.
        key: of its value in a row; None if the table is not sorted by it.
        kind: what the values are. Numbers and times are sorted with the largest or newest first at the first click.
        unit: unit of numbers, as in `format_quantity`.
    """

    text: str
    key: str | None = None
    kind: Literal["text", "number", "time"] = "text"
    unit: str = ""


@dataclass(frozen=True)
class ColumnHead:
    """The head of a column, as the template shows it.

    Attributes:
        text: its text.
        is_number: whether its values are numbers, aligned on the right.
        link: address of the table sorted by this column, or the other way round; None if it is not sorted by it.
        sorted_as: "ascending" or "descending", the value of `aria-sort`; None if another order is in effect.
        picture: histogram of the values of all rows, of all pages; None if there are few values, or no numbers.
        range: the smallest and the largest value, as text; "" without a histogram.
    """

    text: str
    is_number: bool
    link: str | None
    sorted_as: str | None
    picture: Markup | None = None
    range: str = ""


@dataclass(frozen=True)
class TableView:
    """One page of a sorted table.

    Attributes:
        rows: of this page.
        heads: of its columns.
        link: address of the table without the number of the page.
        page_name: name of the parameter that has the number of the page.
        number: number of this page, from 0.
        num_pages: number of all pages, at least 1.
    """

    rows: Sequence[Mapping[str, Any]]
    heads: Sequence[ColumnHead]
    link: str
    page_name: str
    number: int
    num_pages: int


def view_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], query: Query, *, path: str, prefix: str = ""
) -> TableView:
    """Return the page of a table that the address names by `sort` and `page`.

    Args:
        rows: all rows, in the order without `sort`. Rows without a value of a column, or with NaN, come last if
            sorted by it.
        columns: its columns. `sort=bytes` is ascending by the value `bytes`, and `sort=-bytes` descending.
        query: parameters of the address. A page after the last one is the last one.
        path: path of the page.
        prefix: before the names of the parameters, where a page has several tables.

    Raises:
        ConfigError: `sort` is no column, or `page` is no number.
    """
    sort_name, page_name = f"{prefix}sort", f"{prefix}page"
    keys = [column.key for column in columns if column.key is not None]
    sort = query.choice(sort_name, ("", *keys, *(f"-{key}" for key in keys)))
    last = max(len(rows) - 1, 0) // _ROWS_PER_PAGE
    number = min(query.number(page_name, 0), last)
    shown = _sorted(rows, sort)[number * _ROWS_PER_PAGE : (number + 1) * _ROWS_PER_PAGE]
    # A new order begins on the first page.
    orders = {**query, page_name: ""}
    heads = [
        _with_picture(_head(column, sort, lambda value: with_query(path, orders, **{sort_name: value})), column, rows)
        for column in columns
    ]
    return TableView(shown, heads, with_query(path, orders), page_name, number, last + 1)


def _sorted(rows: Sequence[Mapping[str, Any]], sort: str) -> Sequence[Mapping[str, Any]]:
    key = sort.removeprefix("-")
    if not key:
        return rows
    with_value = [row for row in rows if _has_order(row.get(key))]
    without = [row for row in rows if not _has_order(row.get(key))]
    # Logs may have any JSON value, and Python does not compare texts with numbers.
    with_value.sort(key=lambda row: (isinstance(row[key], str), row[key]), reverse=sort.startswith("-"))
    return [*with_value, *without]


def _has_order(value: object) -> bool:
    return isinstance(value, (int, float, str)) and value == value  # noqa: PLR0124 - NaN is not equal to itself


def _head(column: Column, sort: str, link: Callable[[str], str]) -> ColumnHead:
    is_number = column.kind == "number"
    if column.key is None:
        return ColumnHead(column.text, is_number, None, None)
    ascending, descending = column.key, f"-{column.key}"
    first, second = (ascending, descending) if column.kind == "text" else (descending, ascending)
    sorted_as = {ascending: "ascending", descending: "descending"}.get(sort)
    return ColumnHead(column.text, is_number, link(second if sort == first else first), sorted_as)


def _with_picture(head: ColumnHead, column: Column, rows: Sequence[Mapping[str, Any]]) -> ColumnHead:
    """Return a head with the histogram of the numbers of its column."""
    if column.kind != "number" or column.key is None:
        return head
    found = [row.get(column.key) for row in rows]
    values = [value for each in found if isinstance(each, (int, float)) and (value := drawable(each)) is not None]
    if len(values) < _MIN_PICTURED or not min(values) < max(values):
        return head
    low, high = min(values), max(values)
    edges = [low + (high - low) * number / _NUM_BINS for number in range(_NUM_BINS)] + [high]
    counts = [0] * _NUM_BINS
    for value in values:
        counts[min(int((value - low) / (high - low) * _NUM_BINS), _NUM_BINS - 1)] += 1
    bins = [HistogramBin(start, stop, count) for start, stop, count in zip(edges, edges[1:], counts, strict=False)]
    ends = " to ".join(format_quantity(end, column.unit) for end in (low, high))
    return replace(
        head, picture=number_head(bins, title=column.text, unit=column.unit, count_unit="rows"), range=ends
    )
