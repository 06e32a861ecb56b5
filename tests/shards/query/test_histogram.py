"""Histograms count what their conditions select, and read no more shards than they may."""

import datetime as dt
import itertools
import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.query.histogram import histogram, histogram_of, list_columns, plan_edges
from datasvc.shards.query.sample_page import read_page
from tests.shards.written_versions import LABELLED_SCHEMA, write_version

MIXED_SCHEMA = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("blob", pa.large_binary()),
        pa.field("score", pa.float64()),
        pa.field("text", pa.string()),
        pa.field("day", pa.date32()),
        pa.field("is_new", pa.bool_()),
        pa.field("my column", pa.int64()),
        pa.field("vector", pa.list_(pa.float32())),
    ]
)


def mixed(number):
    return {
        "key": f"k{number}",
        "blob": None if number == 3 else b"x" * (100 * number),
        "score": None if number == 4 else number / 7,
        "text": None if number == 5 else f"it's {number % 4}",
        "day": dt.date(2026, 1, 1 + number % 2),
        "is_new": number % 3 == 0,
        "my column": number * 10,
        "vector": [1.0],
    }


@pytest.fixture
def pets(repository):
    shards = [[mixed(number) for number in range(start, start + 10)] for start in range(0, 40, 10)]
    write_version(repository, "pets", {"train": shards}, MIXED_SCHEMA)
    return repository


def bars(counted):
    return {bar.label: bar.count for bar in counted.bins}


@pytest.mark.parametrize("where", [None, "is_new", "score > 2 -- comment"])
@pytest.mark.parametrize(
    "column", ["blob", "score", "text", "day", "is_new", "my column", "score * 3 -- x", "key[:2]"]
)
def test_the_condition_of_a_bar_selects_the_samples_that_it_counts(pets, column, where):
    counted = histogram(pets, "pets", column, bins=7, where=where)
    assert 1 <= len(counted.bins) <= 7
    for bar in counted.bins:
        condition = bar.where if where is None else f"({bar.where}) and ({where}\n)"
        assert len(read_page(pets, "pets", where=condition).samples) == bar.count
    assert sum(bars(counted).values()) + counted.other + counted.null == counted.num_samples
    assert counted.num_samples == len(read_page(pets, "pets", where=where).samples)


def test_classes_are_counted_from_the_table_without_reading_a_shard(repository):
    labels = [{"key": str(number), "blob": b"", "label": number % 3} for number in range(10)]
    write_version(repository, "pets", {"train": [labels]}, LABELLED_SCHEMA, ("cat", "dog", "eel"))
    split = open_dataset(repository, "pets")["train"]
    repository.objects.local_path(split.table.shard(0).digest).unlink()
    counted = histogram_of(split, "label")
    assert (bars(counted), counted.other, counted.read_shards) == ({"cat": 4, "dog": 3, "eel": 3}, 0, 1)
    largest = histogram_of(split, "label", bins=2)
    assert (bars(largest), largest.other) == ({"cat": 4, "dog": 3}, 3)


def test_classes_among_selected_samples_are_counted(repository):
    labels = [{"key": str(number), "blob": b"", "label": number % 4} for number in range(10)]
    write_version(repository, "pets", {"train": [labels]}, LABELLED_SCHEMA, ("cat", "dog", "eel"))
    counted = histogram(repository, "pets", "label", where="label > 0")
    assert bars(counted) == {"cat": 0, "dog": 3, "eel": 2, "3": 2}
    assert [bar.where for bar in counted.bins] == [f"label = {label}" for label in range(4)]


def test_a_bounded_number_of_shards_is_read(pets):
    counted = histogram(pets, "pets", "my column", max_shards=2)
    assert (counted.read_shards, counted.num_shards, counted.num_samples) == (2, 4, 20)
    assert (counted.low, counted.high) == (100, 390)  # of shards 1 and 3


def test_values_that_are_no_numbers_of_an_axis_are_counted_apart(repository):
    scores = [0.0, 1.0, math.nan, math.inf, None]
    stored = [{**mixed(1), "key": str(number), "score": score} for number, score in enumerate(scores)]
    write_version(repository, "pets", {"train": [stored]}, MIXED_SCHEMA)
    counted = histogram(repository, "pets", "score")
    assert (counted.null, counted.other, sum(bars(counted).values())) == (2, 1, 2)
    empty = histogram(repository, "pets", "score", where="false")
    assert (empty.bins, empty.num_samples, empty.low) == ([], 0, None)


def test_columns_for_a_page_have_classes_first_and_no_keys_or_lists(pets, digits):
    assert list_columns(open_dataset(pets, "pets")["train"]) == [
        "blob", "score", "text", "day", "is_new", "my column",
    ]  # fmt: skip
    assert list_columns(digits["train"]) == ["label", "image", "width", "height", "width / height"]


ODD_SCHEMA = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        *(pa.field(name, pa.int64()) for name in ("order", "group", "end", "user")),
        pa.field("took", pa.duration("s")),
        pa.field("bytes", pa.binary()),
    ]
)


@pytest.fixture
def odd(repository):
    values = {"group": 1, "end": 2, "took": dt.timedelta(seconds=2), "bytes": b"\xff"}
    stored = [{"key": f"k{number}", "order": number, "user": number, **values} for number in range(4)]
    write_version(repository, "odd", {"train": [stored]}, ODD_SCHEMA)
    return repository


@pytest.mark.parametrize("column", ["order", "group", "end", "user"])
def test_a_column_may_have_the_name_of_a_keyword(odd, column):
    counted = histogram(odd, "odd", column)
    assert counted.kind == "numbers"
    for bar in counted.bins:
        assert len(read_page(odd, "odd", where=bar.where).samples) == bar.count


@pytest.mark.parametrize("column", ["took", "bytes"])
def test_values_that_are_not_countable_are_refused_and_not_listed(odd, column):
    with pytest.raises(ConfigError, match=rf"'{column}' has values of type .*expected numbers, Booleans"):
        histogram(odd, "odd", column)
    assert list_columns(open_dataset(odd, "odd")["train"]) == ["order", "group", "end", "user"]


def test_the_error_of_a_wrong_expression_lists_the_columns(pets):
    with pytest.raises(ConfigError, match=r"'scor'.*the columns are key, blob, score"):
        histogram(pets, "pets", "scor")
    with pytest.raises(ConfigError, match="bins is 0"):
        histogram(pets, "pets", "score", bins=0)


@given(st.floats(-1e12, 1e12), st.floats(0, 1e12), st.integers(1, 50), st.booleans())
def test_edges_are_round_and_contain_every_value(low, span, bins, is_whole):
    if is_whole:
        low, span = math.floor(low), math.floor(span)
    edges = plan_edges(low, low + span, bins, is_whole=is_whole)
    assert 2 <= len(edges) <= bins + 1
    assert edges[0] <= low <= low + span < edges[-1]
    assert all(start < stop for start, stop in itertools.pairwise(edges))


def test_edges_of_common_ranges():
    assert plan_edges(0.1, 0.71, 10, is_whole=False) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    assert plan_edges(32, 48, 20, is_whole=True) == list(range(32, 50))
    assert plan_edges(7, 7, 10, is_whole=True) == [7, 8]
