"""What two sides have in common: compared with a dictionary, whichever is smaller, whatever hashes meet."""

import secrets
import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.versions import keys
from datasvc.shards.versions.keys import ShardValues, Side, SplitKeys, hash_values, match_values


def side(shards, data_type):
    """Return a side whose shards hold these values, a number of its own attached to each."""

    def read():
        number = 0
        for shard, values in enumerate(shards):
            attached = pa.array([str(number + each) for each in range(len(values))])
            number += len(values)
            yield ShardValues(
                shard, 2 * np.arange(len(values)), pa.array(values, data_type), lambda own=attached: own
            )

    return Side(sum(map(len, shards)), read)


def flat(shards):
    return [
        (value, shard, 2 * row) for shard, values in enumerate(shards) for row, value in enumerate(values)
    ]  # fmt: skip


@pytest.mark.parametrize("data_type", [pa.string(), pa.binary(16)], ids=str)
@given(data=st.data())
def test_every_sample_of_one_side_meets_the_first_equal_one_of_the_other(data_type, data):
    value = (
        st.sampled_from("abcdä") if data_type == pa.string() else st.sampled_from([b"%016d" % n for n in range(5)])
    )
    shards = st.lists(st.lists(value, max_size=5), max_size=4)
    a, b = data.draw(shards), data.draw(shards)
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr("datasvc.shards.versions.keys.hash_values", lambda values: hash_values(values) % 2)
        found = match_values(side(a, data_type), side(b, data_type))
    first = {}
    for number, (each, *place) in enumerate(flat(a)):
        first.setdefault(each, (str(number), *place))
    expected = [
        (each, first[each], (str(number), *place)) for number, (each, *place) in enumerate(flat(b)) if each in first
    ]
    sides = [
        list(zip(attached.to_pylist(), places.shards.tolist(), places.rows.tolist(), strict=True))
        for attached, places in ((found.attached_a, found.a), (found.attached_b, found.b))
    ]
    assert list(zip(found.values.to_pylist(), *sides, strict=True)) == expected


def test_a_remote_split_is_read_by_many_requests_at_once_and_in_order(folder, monkeypatch):
    repository = Repository.create(f"memory://{secrets.token_hex(8)}")
    ingest(repository, str(folder), "pets", shard_bytes=600)
    table = open_dataset(repository, "pets@1")["train"].table
    at_once, read = 4, keys.read_index
    assert table.num_shards >= at_once
    meeting = threading.Barrier(at_once)

    def read_together(objects, table, shard):
        if shard < at_once:
            meeting.wait(60)
        return read(objects, table, shard)

    monkeypatch.setattr(keys, "read_index", read_together)
    assert [each.shard for each in SplitKeys(repository.objects, table)] == list(range(table.num_shards))


def test_remote_shards_without_indexes_are_read_one_after_the_other(folder, monkeypatch):
    repository = Repository.create(f"memory://{secrets.token_hex(8)}")
    ingest(repository, str(folder), "pets", shard_bytes=600)
    table = open_dataset(repository, "pets@1")["train"].table
    table = table.with_column("index", [None] * table.num_shards)
    opened, read = [], keys.open_table_shard
    monkeypatch.setattr(keys, "open_table_shard", lambda *place: opened.append(place[-1]) or read(*place))
    for number, _ in enumerate(SplitKeys(repository.objects, table)):
        assert opened == list(range(number + 1))


def test_digests_of_an_array_that_is_a_slice_are_hashed_where_they_lie():
    digests = pa.array([b"%016d" % n for n in range(4)], pa.binary(16))
    assert hash_values(digests[1:3]).tolist() == hash_values(digests)[1:3].tolist()
