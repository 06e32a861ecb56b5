"""Deletion bitmaps, and the splits that have them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.deletions import Deletions, delete_samples, load_deletions
from tests.shards.written_versions import LABELLED_SCHEMA, TEXT_SCHEMA, texts, write_table

flags = st.dictionaries(
    st.integers(0, 50), st.integers(1, 40).flatmap(lambda size: arrays(np.bool_, size)), max_size=8
)


def labelled(*labels):
    return [{"key": f"{place}-{label}", "blob": b"x", "label": label} for place, label in enumerate(labels)]


@pytest.fixture
def table(repository):
    """Three shards: abc, de, f."""
    return write_table(repository.objects, [texts("abc"), texts("de"), texts("f")], TEXT_SCHEMA)


@given(flags)
def test_deletions_decode_to_what_was_encoded_whatever_the_order_of_shards(given_flags):
    deletions = Deletions.build(given_flags)
    raw = deletions.encode()
    assert Deletions.build(dict(reversed(given_flags.items()))).encode() == raw
    decoded = Deletions.decode(raw, "test")
    assert decoded.encode() == raw
    affected = sorted(shard for shard, each in given_flags.items() if each.any())
    assert decoded.shards.tolist() == affected
    assert decoded.samples.tolist() == [len(given_flags[shard]) for shard in affected]
    assert decoded.counts.tolist() == [given_flags[shard].sum() for shard in affected]
    for shard in affected:
        assert decoded.flags(shard).tolist() == given_flags[shard].tolist()
        assert decoded.kept_rows(shard).tolist() == np.flatnonzero(~given_flags[shard]).tolist()
    assert {shard: decoded.bitmap(shard) for shard in set(given_flags) - set(affected)} == dict.fromkeys(
        set(given_flags) - set(affected), b""
    )


@given(flags, st.booleans(), st.integers(0, 100))
def test_rows_of_many_samples_are_mapped_to_those_of_their_files(given_flags, fits_in_memory, seed):
    stored = np.full(52, 7)  # the shards without deletions have 7 samples
    for shard, deleted in given_flags.items():
        stored[shard] = len(deleted)
    deletions = Deletions.build(given_flags)
    kept = [np.flatnonzero(~given_flags.get(shard, np.zeros(7, np.bool_))) for shard in range(len(stored))]
    random = np.random.default_rng(seed)
    shards = random.permutation(np.repeat(np.arange(len(stored)), [min(len(each), 3) for each in kept]))
    rows = random.integers(0, [len(kept[shard]) for shard in shards]) if len(shards) else np.empty(0, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasvc.shards.versions.deletions._MAX_CACHED_ROWS", 1 << 20 if fits_in_memory else 1)
        row_map = deletions.row_map(stored)
    for part in (slice(0, 20), slice(None)):
        found = row_map(shards[part], rows[part]).tolist()
        assert found == [kept[shard][row] for shard, row in zip(shards[part], rows[part], strict=True)]


def test_a_bitmap_takes_one_bit_a_sample_lowest_bit_first():
    deleted = np.zeros(11, np.bool_)
    deleted[[0, 3, 9]] = True
    assert Deletions.build({4: deleted}).bitmap(4) == bytes([0b00001001, 0b00000010])


def test_rows_that_are_kept_in_memory_are_bounded(monkeypatch):
    monkeypatch.setattr("datasvc.shards.versions.deletions._MAX_CACHED_ROWS", 10)
    deleted = np.zeros(8, np.bool_)
    deleted[5] = True
    deletions = Deletions.build(dict.fromkeys(range(4), deleted))
    for shard in (0, 1, 2, 3, 0, 0, 2):
        assert deletions.kept_rows(shard).tolist() == [0, 1, 2, 3, 4, 6, 7]
        kept = deletions._kept_rows
        assert sum(map(len, kept._cached.values())) == kept._num_rows <= 10


def test_kept_rows_are_computed_once():
    deletions = Deletions.build({0: np.array([True, False])})
    assert deletions.kept_rows(0) is deletions.kept_rows(0)


@pytest.mark.parametrize("raw", [b"", b"no arrow", ShardTable.build([], TEXT_SCHEMA).encode()])
def test_what_is_no_deletions_object_is_corrupt(raw):
    with pytest.raises(CorruptDataError, match="is not a deletions object"):
        Deletions.decode(raw, "test")


def test_deletions_of_a_later_format_are_refused(monkeypatch):
    raw = Deletions.build({}).encode()
    monkeypatch.setattr("datasvc.shards.versions.deletions.DELETIONS_FORMAT", 0)
    with pytest.raises(ConfigError, match="deletions object format 1; this datasvc reads up to 0"):
        Deletions.decode(raw, "test")


def test_a_table_counts_what_is_left_and_what_is_stored(repository, table):
    less = delete_samples(repository.objects, table, {0: np.array([1]), 1: np.array([0])})
    assert less.samples_per_shard.tolist() == [2, 1, 1]
    assert less.stored_per_shard.tolist() == [3, 2, 1]
    assert less.deleted_per_shard.tolist() == [1, 1, 0]
    assert less.num_samples == 4
    assert load_deletions(repository.objects, less).kept_rows(0).tolist() == [0, 2]
    assert less.objects() == table.objects() | {less.deletions}


def test_deleting_in_two_steps_or_twice_gives_what_one_step_gives(repository, table):
    objects = repository.objects
    once = delete_samples(objects, table, {0: np.array([2, 0]), 1: np.array([1])})
    stepwise = delete_samples(objects, delete_samples(objects, table, {1: np.array([1, 1])}), {0: np.array([0, 2])})
    assert stepwise.encode() == once.encode()
    assert delete_samples(objects, once, {0: np.array([0]), 1: np.array([1])}).encode() == once.encode()
    assert delete_samples(objects, table, {}) is table


def test_shards_without_any_sample_left_are_not_in_the_table_any_more(repository, table):
    objects = repository.objects
    less = delete_samples(objects, table, {2: np.array([0]), 0: np.array([0, 1, 2])})
    assert less.shards() == [table.shard(1)]
    assert less.deletions is None
    partly = delete_samples(objects, table, {0: np.array([0, 1, 2]), 1: np.array([0])})
    assert partly.shards() == [table.shard(1), table.shard(2)]
    assert load_deletions(objects, partly).kept_rows(0).tolist() == [1]


def test_deleted_samples_are_counted_under_no_label(repository):
    shards = [labelled(0, 1, 1), labelled(2, 0)]
    table = write_table(repository.objects, shards, LABELLED_SCHEMA, ["a", "b", "c"])
    assert table.label_counts == {0: 2, 1: 2, 2: 1}
    less = delete_samples(repository.objects, table, {0: np.array([1]), 1: np.array([0])})
    assert less.label_counts == {0: 2, 1: 1}
    again = delete_samples(repository.objects, less, {0: np.array([1, 2])})
    assert again.label_counts == {0: 2}


@pytest.mark.parametrize("rows", [{1: np.array([0])}, {0: np.array([0, 1])}], ids=["other shards", "other counts"])
def test_deletions_of_another_table_are_corrupt(repository, table, rows):
    objects = repository.objects
    one = delete_samples(objects, table, {0: np.array([0])})
    other = delete_samples(objects, table, rows)
    with pytest.raises(CorruptDataError, match="does not match its shard table"):
        load_deletions(objects, dataclasses.replace(one, deletions=other.deletions))
