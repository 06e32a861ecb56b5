"""What leads from one version to another."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import NotFoundError
from datasvc.repository import Objects, Storage
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.versions.combine import append_table
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.deletions import delete_samples
from datasvc.shards.versions.diff import count_unshared, diff, diff_tables
from datasvc.shards.versions.merge import merge
from tests.shards.written_versions import LABELLED_SCHEMA, TEXT_SCHEMA, labelled, texts, write_table, write_version

KEY = pa.field("key", pa.string(), nullable=False)


def changes(split):
    return list(split.added), list(split.deleted), list(split.changed), split.unchanged


def counts(split):
    return len(split.added), len(split.deleted), len(split.changed), split.unchanged


def test_samples_are_added_deleted_changed_or_unchanged(repository):
    write_version(repository, "pets", {"train": [texts("abc"), texts("de")]})
    write_version(repository, "pets", {"train": [texts("ab"), [*texts("d"), *texts("e", "new {}"), *texts("f")]]})
    found = diff(repository, "pets@1", "pets@2")
    assert (str(found.a), str(found.b)) == ("pets@1", "pets@2")
    assert changes(found.splits["train"]) == (["f"], ["c"], ["e"], 3)
    assert counts(found.splits["train"]) == (1, 1, 1, 3)
    back = diff(repository, "pets@2", "pets@1")
    assert changes(back.splits["train"]) == (["c"], ["f"], ["e"], 3)


def test_a_version_differs_from_itself_in_nothing(repository):
    write_version(repository, "pets", {"train": [texts("abc"), texts("de")]})
    assert changes(diff(repository, "pets", "pets@1").splits["train"]) == ([], [], [], 5)


def test_data_sets_of_different_names_and_shards_compare_by_their_samples(repository):
    write_version(repository, "one", {"train": [texts("abcdef")]})
    write_version(repository, "two", {"train": [texts("fa"), texts("b"), texts("edc")]}, indexed=False)
    assert changes(diff(repository, "one", "two").splits["train"]) == ([], [], [], 6)


def test_the_difference_is_what_a_delete_or_merge_changed(repository):
    write_version(repository, "pets", {"train": [texts("abc"), texts("de")]})
    write_version(repository, "more", {"train": [texts("xy")]})
    delete(repository, "pets", keys=["b", "e"])
    assert changes(diff(repository, "pets@1", "pets@2").splits["train"]) == ([], ["b", "e"], [], 3)
    merge(repository, ["pets@2", "more"], "all")
    assert changes(diff(repository, "pets@1", "all").splits["train"]) == (["x", "y"], ["b", "e"], [], 3)


def test_splits_of_one_version_only_have_all_their_samples_added_or_deleted(repository):
    write_version(repository, "pets", {"train": [texts("ab")], "val": [texts("v"), texts("w")]})
    write_version(repository, "pets", {"train": [texts("ab")], "test": [texts("t")]})
    found = diff(repository, "pets@1", "pets@2")
    assert (found.splits_added, found.splits_removed) == (("test",), ("val",))
    assert changes(found.splits["val"]) == ([], ["v", "w"], [], 0)
    assert changes(found.splits["test"]) == (["t"], [], [], 0)
    assert not found.splits["test"].columns_added


def test_columns_and_classes_that_differ_are_named(repository):
    one = shard_schema([KEY, pa.field("score", pa.int32()), pa.field("old", pa.string())])
    two = shard_schema([KEY, pa.field("score", pa.int64()), pa.field("new", pa.string())])
    write_version(repository, "x", {"train": [[{"key": "a", "score": 1, "old": None}]]}, one, ["cat", "dog"])
    write_version(repository, "x", {"train": [[{"key": "a", "score": 1, "new": None}]]}, two, ["ant", "dog"])
    found = diff(repository, "x@1", "x@2").splits["train"]
    assert found.columns_added == {"new": "string"}
    assert found.columns_removed == {"old": "string"}
    assert found.columns_retyped == {"score": ("int32", "int64")}
    assert (found.classes_added, found.classes_removed) == (("ant",), ("cat",))
    assert counts(found) == (0, 0, 0, 1)


def test_labels_are_compared_by_the_class_they_mean(repository):
    write_version(repository, "x", {"train": [labelled(a=0, b=1, c=0)]}, LABELLED_SCHEMA, ["cat", "dog"])
    write_version(repository, "x", {"train": [labelled(a=1, b=0, c=0)]}, LABELLED_SCHEMA, ["dog", "cat"])
    assert changes(diff(repository, "x@1", "x@2").splits["train"]) == ([], [], ["c"], 2)
    write_version(repository, "x", {"train": [labelled(a=0, b=1, c=0)]}, LABELLED_SCHEMA, ["dog", "cat"])
    renamed = diff(repository, "x@1", "x@3").splits["train"]
    assert changes(renamed) == ([], [], ["a", "b", "c"], 0)
    assert renamed.confusion == [("cat", "dog", 2), ("dog", "cat", 1)]
    assert renamed.confusion is renamed.confusion  # counted once


def test_shards_that_both_have_are_not_looked_at(repository):
    """Their indexes may be gone: only the others are read."""
    objects = repository.objects
    shared = [texts(f"{number}" for number in range(start, start + 5)) for start in range(0, 50, 5)]
    table = write_table(objects, [*shared, texts("ab")], TEXT_SCHEMA)
    other = write_table(objects, [texts("b"), *shared], TEXT_SCHEMA)
    for shard in range(10):
        objects.local_path(table.index(shard)).unlink()
        objects.local_path(table.shard(shard).digest).unlink()
    assert changes(diff_tables(objects, table, other)) == ([], ["a"], [], 51)


def test_of_a_shard_that_both_have_only_the_samples_that_one_deleted_are_read(repository):
    """What both hold there costs nothing; a sample that moved to another shard is still the same sample."""
    objects = repository.objects
    table = write_table(objects, [texts("abcde"), texts("xy")], TEXT_SCHEMA)
    one = delete_samples(objects, table, {0: np.array([0, 1])})
    two = delete_samples(objects, table, {0: np.array([1, 2, 3])})
    assert changes(diff_tables(objects, one, two)) == (["a"], ["c", "d"], [], 3)
    assert changes(diff_tables(objects, two, one)) == (["c", "d"], ["a"], [], 3)
    moved = append_table(objects, two, write_table(objects, [[*texts("d"), *texts("c", "new {}")]], TEXT_SCHEMA))
    assert changes(diff_tables(objects, one, moved)) == (["a"], [], ["c"], 4)
    objects.local_path(table.index(1)).unlink()
    assert counts(diff_tables(objects, table, two)) == (0, 3, 0, 4)
    assert list(diff_tables(objects, table, two).deleted) == ["b", "c", "d"]


def test_a_shard_that_a_split_has_twice_is_compared_once_with_each_of_the_others(repository):
    objects = repository.objects
    table = write_table(objects, [texts("abc")], TEXT_SCHEMA)
    halves = [delete_samples(objects, table, {0: np.array(rows)}) for rows in ([1, 2], [0])]
    twice = append_table(objects, *halves)
    assert twice.shards() == table.shards() * 2
    assert changes(diff_tables(objects, twice, table)) == ([], [], [], 3)
    assert changes(diff_tables(objects, table, twice)) == ([], [], [], 3)
    assert changes(diff_tables(objects, twice, halves[1])) == ([], ["a"], [], 2)


def test_a_version_that_is_not_there_is_not_found(repository):
    write_version(repository, "pets", {"train": [texts("ab")]})
    with pytest.raises(NotFoundError, match="pets has no version 2"):
        diff(repository, "pets", "pets@2")


samples = st.dictionaries(st.text("abc", max_size=2), st.integers(0, 2), max_size=8)


@given(st.data(), samples, samples)
def test_the_difference_is_the_one_of_dictionaries(tmp_path_factory, data, one, two):
    objects = Objects(Storage(str(tmp_path_factory.mktemp("store"))))
    tables = []
    for content in (one, two):
        keys = data.draw(st.permutations(list(content)))
        size = data.draw(st.integers(1, 3))
        shards = [keys[start : start + size] for start in range(0, len(keys), size)]
        table = write_table(
            objects,
            [[{"key": key, "text": str(content[key])} for key in shard] for shard in shards],
            TEXT_SCHEMA,
            indexed=data.draw(st.booleans()),
        )
        gone = [data.draw(st.lists(st.integers(0, len(shard) - 1), max_size=1)) for shard in shards]
        for shard, rows in zip(shards, gone, strict=True):
            for row in rows:
                del content[shard[row]]
        tables.append(
            delete_samples(
                objects, table, {place: pa.array(rows, pa.int64()).to_numpy() for place, rows in enumerate(gone)}
            )
        )
    found = diff_tables(objects, *tables)
    assert sorted(found.added) == sorted(two.keys() - one.keys())
    assert sorted(found.deleted) == sorted(one.keys() - two.keys())
    assert sorted(found.changed) == sorted(key for key in one.keys() & two.keys() if one[key] != two[key])
    assert found.unchanged == sum(one[key] == two[key] for key in one.keys() & two.keys())
    assert counts(found)[:3] == tuple(len(list(keys)) for keys in (found.added, found.deleted, found.changed))


def test_drift_of_classes_is_the_distance_of_their_distributions(repository):
    write_version(repository, "pets", {"train": [labelled(a=0, b=0, c=1, d=1)]}, LABELLED_SCHEMA, ("cat", "dog"))
    write_version(
        repository, "pets", {"train": [labelled(a=0, c=1, d=1, e=2)]}, LABELLED_SCHEMA, ("cat", "dog", "eel")
    )
    found = diff(repository, "pets@1", "pets@2").splits["train"]
    assert found.class_counts == {"cat": (2, 1), "eel": (0, 1)}
    assert found.class_distance == 0.25
    assert diff(repository, "pets@1", "pets@1").splits["train"].class_distance == 0
    write_version(repository, "words", {"train": [texts("ab")]})
    words = diff(repository, "pets@1", "words").splits["train"]
    assert (words.class_counts, words.class_distance) == ({}, None)


def test_each_key_has_its_place_and_each_changed_one_its_place_before(repository):
    write_version(repository, "pets", {"train": [texts("abc"), texts("de")]})
    write_version(
        repository, "pets", {"train": [texts("e", "new {}"), [*texts("a"), *texts("cb", "new {}"), *texts("f")]]}
    )
    found = diff(repository, "pets@1", "pets@2").splits["train"]
    assert list(found.added.places()) == [("f", 1, 3)]
    assert list(found.deleted.places()) == [("d", 1, 0)]
    assert list(found.changed.places()) == [("e", 0, 0), ("c", 1, 1), ("b", 1, 2)]
    assert found.changed_from.shards.tolist() == [1, 0, 0]
    assert found.changed_from.rows.tolist() == [1, 2, 1]
    assert count_unshared(*(open_dataset(repository, ref)["train"].table for ref in ("pets@1", "pets@2"))) == 10
    assert count_unshared(*[open_dataset(repository, "pets@1")["train"].table] * 2) == 0
