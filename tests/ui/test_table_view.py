"""Tables that the address sorts and divides into pages."""

import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.ui.web.page import Query
from datasvc.ui.web.table_view import Column, view_table

COLUMNS = (Column("name", "name"), Column("size", "size", "number"), Column("tags"))
values = st.none() | st.integers(-5, 5) | st.floats() | st.text(max_size=3) | st.just({})


def is_nan(value):
    return isinstance(value, float) and math.isnan(value)


def view(rows, **query):
    return view_table(rows, COLUMNS, Query(query), path="/list")


@given(st.lists(values, max_size=8))
@example([math.nan, 1.0])
def test_any_values_are_sorted_and_rows_without_a_value_come_last(sizes):
    rows = [{"name": "a", "size": size} for size in sizes]
    for sort in ("size", "-size"):
        found = [row["size"] for row in view(rows, sort=sort).rows]
        num_values = sum(isinstance(size, (int, float, str)) and not is_nan(size) for size in sizes)
        assert all(isinstance(size, (int, float, str)) and not is_nan(size) for size in found[:num_values])
        numbers = [size for size in found[:num_values] if isinstance(size, (int, float))]
        assert numbers == sorted(numbers, reverse=sort == "-size")
        assert len(found) == len(sizes)


def test_a_page_has_100_rows_and_a_page_after_the_last_is_the_last():
    rows = [{"name": f"{number:03}", "size": number} for number in range(201)]
    pages = [view(rows, page=str(number), sort="-size") for number in range(4)]
    assert [len(page.rows) for page in pages] == [100, 100, 1, 1]
    assert [row["size"] for page in pages[:3] for row in page.rows] == list(range(200, -1, -1))
    assert {page.num_pages for page in pages} == {3}
    assert pages[3].number == 2
    assert view([]).num_pages == 1
    assert view(rows[:100]).num_pages == 1


def test_a_head_sorts_then_turns_the_order_round_and_begins_on_the_first_page():
    name, size, tags = view([], page="3", other="x").heads
    assert (name.link, size.link, tags.link) == ("/list?other=x&sort=name", "/list?other=x&sort=-size", None)
    assert (name.sorted_as, size.sorted_as) == (None, None)
    name, size, _ = view([], sort="-size").heads
    assert (size.link, size.sorted_as) == ("/list?sort=size", "descending")
    name, size, _ = view([], sort="name").heads
    assert (name.link, name.sorted_as) == ("/list?sort=-name", "ascending")


def test_an_unknown_column_is_refused():
    with pytest.raises(ConfigError, match="expected one of"):
        view([], sort="tags")


def test_the_heads_of_many_numbers_have_a_histogram_of_all_pages():
    columns = (Column("name", "name"), Column("bytes", "bytes", "number", "bytes"))
    rows = [{"name": str(number), "bytes": number * 1000} for number in range(250)]
    text, numbers = view_table(rows, columns, Query(), path="/x").heads
    assert (text.picture, text.range) == (None, "")
    assert numbers.range == "0 bytes to 249 kB"
    assert sum(int(count) for count in re.findall(r": (\d+) rows<", numbers.picture)) == 250
    few = view_table(rows[:5], columns, Query(), path="/x").heads
    assert [head.picture for head in few] == [None, None]
