import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository import Digest, ObjectInfo
from datasvc.shards import ShardStatistics, ShardTable, image_schema

shards = st.lists(
    st.tuples(
        st.builds(
            ObjectInfo, st.binary(min_size=32, max_size=32).map(lambda raw: Digest(raw.hex())), st.integers(0, 2**40)
        ),
        st.builds(ShardStatistics, *[st.integers(0, 2**31 - 1)] * 4),
    ),
    max_size=20,
)


@given(shards, st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
def test_a_table_decodes_to_what_was_encoded_and_equal_tables_give_equal_bytes(rows, classes):
    table = ShardTable.build(rows, image_schema(labelled=True), classes)
    raw = table.encode()
    decoded = ShardTable.decode(raw, "test")
    assert decoded.shards() == [info for info, _ in rows]
    assert decoded.samples_per_shard.tolist() == [statistics.num_samples for _, statistics in rows]
    assert decoded.classes == tuple(classes)
    assert decoded.sample_schema.equals(table.sample_schema, check_metadata=True)
    assert decoded.encode() == raw
    assert decoded.largest("max_width") == max((statistics.max_width for _, statistics in rows), default=0)
    if rows:
        assert decoded.shard(len(rows) - 1) == rows[-1][0]


def test_a_table_costs_some_hundred_bytes_a_shard():
    row = (ObjectInfo(Digest("ab" * 32), 1 << 26), ShardStatistics(600, 500, 400, 10**6))
    assert len(ShardTable.build([row] * 10_000, image_schema(labelled=True)).encode()) < 100 * 10_000


@pytest.mark.parametrize("raw", [b"", b"no arrow"])
def test_what_is_no_table_is_corrupt(raw):
    with pytest.raises(CorruptDataError, match="no shard table"):
        ShardTable.decode(raw, "test")


def test_every_column_holds_what_it_is_named_after():
    row = (ObjectInfo(Digest("ab" * 32), 1000), ShardStatistics(6, 50, 40, 300))
    table = ShardTable.decode(ShardTable.build([row, row], image_schema(labelled=True)).encode(), "test")
    assert table.rows.to_pylist()[1] == {
        "digest": bytes.fromhex("ab" * 32), "samples": 6, "bytes": 1000,
        "max_width": 50, "max_height": 40, "max_sample_bytes": 300,
    }  # fmt: skip
    assert (table.num_samples, table.size_bytes, table.bytes_per_shard.tolist()) == (12, 2000, [1000, 1000])


def test_a_table_of_a_later_format_is_refused(monkeypatch):
    raw = ShardTable.build([], image_schema(labelled=True)).encode()
    monkeypatch.setattr("datasvc.shards.table.TABLE_FORMAT", 0)
    with pytest.raises(ConfigError, match="shard table format 1; this datasvc reads up to 0"):
        ShardTable.decode(raw, "test")
