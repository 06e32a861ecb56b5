import dataclasses
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository import Digest, ObjectInfo
from datasvc.shards.format.schema import image_schema
from datasvc.shards.format.shard_table import ShardTable, TableRow
from datasvc.shards.format.writer import ShardStatistics

digests = st.binary(min_size=32, max_size=32).map(lambda raw: Digest(raw.hex()))
counts = st.dictionaries(st.integers(-1, 5), st.integers(1, 9), max_size=3)
statistics = st.builds(
    ShardStatistics,
    *[st.integers(0, 2**31 - 1)] * 4,
    label_counts=counts,
    image_kinds=st.dictionaries(st.sampled_from(["JPEG", "PNG"]), st.integers(1, 9)),
)
shards = st.lists(
    st.builds(TableRow, st.builds(ObjectInfo, digests, st.integers(0, 2**40)), statistics, st.none() | digests),
    max_size=20,
)


@given(shards, st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5), st.none() | digests)
def test_a_table_decodes_to_what_was_encoded_and_equal_tables_give_equal_bytes(rows, classes, deletions):
    table = dataclasses.replace(ShardTable.build(rows, image_schema(labelled=True), classes), deletions=deletions)
    raw = table.encode()
    decoded = ShardTable.decode(raw, "test")
    assert decoded.shards() == [row.shard for row in rows]
    assert decoded.samples_per_shard.tolist() == [row.statistics.num_samples for row in rows]
    assert [decoded.index(number) for number in range(len(rows))] == [row.index for row in rows]
    assert decoded.classes == tuple(classes)
    assert decoded.deletions == deletions
    assert decoded.sample_schema.equals(table.sample_schema, check_metadata=True)
    assert decoded.encode() == raw
    assert decoded.largest("max_width") == max((row.statistics.max_width for row in rows), default=0)
    assert decoded.label_counts == sum((Counter(row.statistics.label_counts) for row in rows), Counter())
    assert decoded.image_kinds == sum((Counter(row.statistics.image_kinds) for row in rows), Counter())
    named = {row.shard.digest for row in rows} | {row.index for row in rows} | {deletions}
    assert decoded.objects() == named - {None}
    if rows:
        assert decoded.shard(len(rows) - 1) == rows[-1].shard


@given(shards)
def test_a_table_that_was_changed_encodes_as_one_that_was_built_so(rows):
    table = ShardTable.build(rows, image_schema(labelled=True))
    assert table.with_column("deleted", [0] * len(rows)).encode() == table.encode()
    halves = dataclasses.replace(table, rows=pa.concat_tables([table.rows.slice(0, 1), table.rows.slice(1)]))
    assert halves.encode() == table.encode()


def test_a_table_costs_some_hundred_bytes_a_shard():
    shard = ObjectInfo(Digest("ab" * 32), 1 << 26)
    row = TableRow(shard, ShardStatistics(600, 500, 400, 10**6), Digest("cd" * 32))
    assert len(ShardTable.build([row] * 10_000, image_schema(labelled=True)).encode()) < 120 * 10_000


@pytest.mark.parametrize("raw", [b"", b"no arrow"])
def test_what_is_no_table_is_corrupt(raw):
    with pytest.raises(CorruptDataError, match="is not a shard table"):
        ShardTable.decode(raw, "test")


def test_every_column_holds_what_it_is_named_after():
    row = TableRow(ObjectInfo(Digest("ab" * 32), 1000), ShardStatistics(6, 50, 40, 300), Digest("cd" * 32))
    table = ShardTable.decode(ShardTable.build([row, row], image_schema(labelled=True)).encode(), "test")
    assert table.rows.to_pylist()[1] == {
        "digest": bytes.fromhex("ab" * 32), "samples": 6, "bytes": 1000,
        "max_width": 50, "max_height": 40, "max_sample_bytes": 300,
        "index": bytes.fromhex("cd" * 32), "deleted": 0,
    }  # fmt: skip
    assert (table.num_samples, table.size_bytes, table.bytes_per_shard.tolist()) == (12, 2000, [1000, 1000])
    table = table.with_column("deleted", [0, 2])
    assert (table.num_samples, table.samples_per_shard.tolist()) == (10, [6, 4])
    assert (table.stored_per_shard.tolist(), table.deleted_per_shard.tolist()) == ([6, 6], [0, 2])


def test_a_table_of_a_later_format_is_refused(monkeypatch):
    raw = ShardTable.build([], image_schema(labelled=True)).encode()
    monkeypatch.setattr("datasvc.shards.format.shard_table.TABLE_FORMAT", 0)
    with pytest.raises(ConfigError, match="shard table format 2; this datasvc reads up to 0"):
        ShardTable.decode(raw, "test")
