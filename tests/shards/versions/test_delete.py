"""Deleting samples from a data set: by key, by condition, in races."""

import os
import signal

import pyarrow as pa
import pytest

from datasvc.errors import ConfigError, ConflictError, NotFoundError
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.versions.combine import append_table
from datasvc.shards.versions.delete import delete, parse_condition
from datasvc.sql_sandbox import fetch
from tests.shards.written_versions import (
    LABELLED_SCHEMA,
    commit_between,
    describe_table,
    keys_of,
    labelled,
    write_table,
    write_version,
)

KEY = pa.field("key", pa.string(), nullable=False)


@pytest.fixture
def pets(repository):
    """pets@1: train abc, de; val av."""
    splits = {"train": [labelled(a=0, b=1, c=0), labelled(d=1, e=0)], "val": [labelled(a=0, v=1)]}
    write_version(repository, "pets", splits, LABELLED_SCHEMA, ["cat", "dog"], message="first")
    return repository


def test_a_delete_makes_a_version_without_the_samples_and_the_old_one_keeps_them(pets):
    before = open_dataset(pets, "pets@1")
    report = delete(pets, "pets", keys=["b", "e"], message="bad ones")
    assert str(report.version) == "pets@2"
    assert (report.deleted, report.num_deleted, report.missing) == ({"train": 2}, 2, [])
    assert keys_of(pets, "pets") == {"train": ["a", "c", "d"], "val": ["a", "v"]}
    assert keys_of(pets, "pets@1") == {"train": list("abcde"), "val": ["a", "v"]}
    after = open_dataset(pets, "pets")
    assert after["val"].digest == before["val"].digest
    assert after["train"].table.shards() == before["train"].table.shards()
    assert after["train"].table.label_counts == {0: 2, 1: 1}


def test_the_entry_has_what_was_deleted_from_which_version(pets):
    delete(pets, "pets@1", where="label = 1", split="train", message="no dogs")
    entry = pets.versions("datasets", "pets").read(2).content
    assert entry["parent"] == "pets@1"
    assert entry["change"] == {"kind": "delete", "deleted": 2, "where": "label = 1", "split": "train"}
    assert (entry["message"], entry["skipped"], entry["source"]["url"]) == ("no dogs", 0, "pets@1")
    assert entry["splits"]["train"]["samples"] == 3
    assert entry["splits"]["val"] == pets.versions("datasets", "pets").read(1).content["splits"]["val"]


def test_a_key_is_deleted_from_every_split_that_has_it_or_from_the_one_that_is_named(pets):
    assert delete(pets, "pets", keys=["a"], split="val").deleted == {"val": 1}
    assert keys_of(pets, "pets") == {"train": list("abcde"), "val": ["v"]}
    assert delete(pets, "pets@2", keys=iter(["a", "c"])).deleted == {"train": 2}
    assert keys_of(pets, "pets") == {"train": ["b", "d", "e"], "val": ["v"]}


def test_keys_that_are_not_there_are_named_and_nothing_is_committed(pets):
    with pytest.raises(NotFoundError, match="2 keys are not in pets@1: 'x', 'y'; nothing was committed"):
        delete(pets, "pets", keys=["y", "a", "x"])
    with pytest.raises(NotFoundError, match="1 key is not in pets@1/train: 'v'"):
        delete(pets, "pets", keys=["v"], split="train")
    with pytest.raises(NotFoundError, match=r"30 keys are not in pets@1: '10', .*'19' and 20 more"):
        delete(pets, "pets", keys=[str(number) for number in range(10, 40)])
    assert pets.versions("datasets", "pets").head() == 1


def test_missing_keys_may_be_ignored_and_are_reported(pets):
    report = delete(pets, "pets", keys=["y", "a", "x"], split="train", ignore_missing=True)
    assert (report.deleted, report.missing) == ({"train": 1}, ["x", "y"])
    again = delete(pets, "pets", keys=["a"], split="train", ignore_missing=True)
    assert (again.missing, again.num_deleted) == (["a"], 0)


def test_a_dry_run_counts_the_samples_and_stores_nothing(pets):
    before = {file.path for file in pets.storage.walk("")}
    report = delete(pets, "pets", keys=["a", "x"], ignore_missing=True, dry_run=True)
    assert (str(report.version), report.deleted, report.missing) == ("pets@1", {"train": 1, "val": 1}, ["x"])
    assert delete(pets, "pets", where="label > 5", dry_run=True).num_deleted == 0
    with pytest.raises(NotFoundError, match="1 key is not in pets@1"):
        delete(pets, "pets", keys=["x"], dry_run=True)
    with pytest.raises(ConfigError, match="all samples of split 'train'"):
        delete(pets, "pets", where="true", dry_run=True)
    assert {file.path for file in pets.storage.walk("")} == before


@pytest.mark.slow
def test_ctrl_c_ends_a_condition_that_would_run_for_ever(pets, monkeypatch):
    def interrupted(connection, read):
        def read_after_ctrl_c():
            os.kill(os.getpid(), signal.SIGINT)
            return read()

        return fetch(connection, read_after_ctrl_c)

    monkeypatch.setattr("datasvc.shards.versions.delete.fetch", interrupted)
    for_ever = "list_sum(list_transform(range(10000000), lambda x: list_sum(range(x)))) > label"
    with pytest.raises(KeyboardInterrupt):
        delete(pets, "pets", where=for_ever)
    assert pets.versions("datasets", "pets").numbers() == [1]


@pytest.mark.parametrize("what", [{"keys": []}, {"where": "label > 5"}, {"keys": ["x"], "ignore_missing": True}])
def test_deleting_nothing_commits_nothing(pets, what):
    report = delete(pets, "pets", **what)
    assert (str(report.version), report.deleted, report.num_deleted) == ("pets@1", {}, 0)
    assert pets.versions("datasets", "pets").head() == 1


@pytest.mark.parametrize("what", [{"keys": list("abcde")}, {"where": "true"}])
def test_a_split_is_never_emptied(pets, what):
    message = "all samples of split 'train' of pets@1 would be deleted: nothing was committed"
    with pytest.raises(ConfigError, match=message):
        delete(pets, "pets", split="train", **what)
    assert pets.versions("datasets", "pets").head() == 1


def test_either_keys_or_a_condition_must_be_given(pets):
    for what in ({}, {"keys": ["a"], "where": "true"}):
        with pytest.raises(ConfigError, match=r"either keys or a condition that .*, not both or neither"):
            delete(pets, "pets", **what)
    with pytest.raises(ConfigError, match="keys is the string 'abc'; expected a list of keys"):
        delete(pets, "pets", keys="abc")


def test_only_the_newest_version_can_be_continued(pets):
    pets.tag("datasets", "pets@1", "old")
    delete(pets, "pets@1", keys=["b"])
    for ref in ("pets@1", "pets@old"):
        with pytest.raises(ConflictError, match="pets@1 is not the newest version, which is pets@2"):
            delete(pets, ref, keys=["c"])


def test_a_split_or_version_that_is_not_there_is_not_found(pets):
    with pytest.raises(NotFoundError, match="has no split 'test'; it has: train, val"):
        delete(pets, "pets", keys=["a"], split="test")
    with pytest.raises(NotFoundError, match="pets has no version 3"):
        delete(pets, "pets@3", keys=["a"])


def test_a_delete_after_a_lost_race_continues_the_other_version(pets, monkeypatch):
    commit_between(monkeypatch, pets, lambda: delete(pets, "pets", keys=["a", "b"]))
    report = delete(pets, "pets", keys=["b", "e"])
    assert (str(report.version), report.deleted, report.missing) == ("pets@3", {"train": 1}, [])
    assert keys_of(pets, "pets") == {"train": ["c", "d"], "val": ["v"]}
    assert keys_of(pets, "pets@2") == {"train": ["c", "d", "e"], "val": ["v"]}
    assert pets.versions("datasets", "pets").read(3).content["parent"] == "pets@2"


def test_a_delete_of_samples_that_another_one_deleted_meanwhile_commits_nothing(pets, monkeypatch):
    commit_between(monkeypatch, pets, lambda: delete(pets, "pets", keys=["b", "e"]))
    report = delete(pets, "pets", keys=["b", "e"])
    assert (str(report.version), report.num_deleted) == ("pets@2", 0)


@pytest.mark.parametrize(
    ("expression", "left"),
    [
        ("label = 1", ["a", "c", "e"]),
        ("key in ('a', 'b') or key like 'd%'", ["c", "e"]),
        ("octet_length(blob) > 5 and label = 0", ["b", "d"]),
        ("blob = 'blob of a'::BLOB", ["b", "c", "d", "e"]),
        ("label = 1 -- the dogs", ["a", "c", "e"]),
        ("label = 0 and label is null or key = 'a'", ["b", "c", "d", "e"]),
    ],
)
def test_a_condition_chooses_by_columns_and_by_blobs_too(pets, expression, left):
    delete(pets, "pets", where=expression, split="train")
    assert keys_of(pets, "pets")["train"] == left


def test_a_condition_sees_no_deleted_samples(pets):
    delete(pets, "pets", where="key = 'b'", split="train")
    report = delete(pets, "pets", where="case when key = 'b' then error('seen') else label = 1 end", split="train")
    assert report.deleted == {"train": 1}
    assert keys_of(pets, "pets")["train"] == ["a", "c", "e"]


def test_a_field_of_a_struct_is_no_label_and_no_class():
    meta = pa.field("meta", pa.struct([("label", pa.string()), ("class", pa.string())]))
    schema = pa.schema([*LABELLED_SCHEMA, meta])
    for condition in ("meta.label = 'cow'", "meta.class IN ('cow', 'dog')"):
        assert "'cow'" in parse_condition(condition, schema, ["cat", "dog"], "pets").sql
    assert '"LABEL" = 1' in parse_condition("LABEL = 'dog'", schema, ["cat", "dog"], "pets").sql


def test_columns_that_some_shards_lack_are_null_in_conditions(repository):
    objects = repository.objects
    wide = shard_schema([KEY, pa.field("score", pa.float64()), pa.field("tags", pa.list_(pa.string()))])
    head = write_table(objects, [[{"key": "a"}, {"key": "b"}]], shard_schema([KEY]))
    new = write_table(
        objects, [[{"key": "c", "score": 0.5, "tags": ["x"]}, {"key": "d", "score": None, "tags": None}]], wide
    )
    both = describe_table(objects, append_table(objects, head, new))
    repository.versions("datasets", "mixed").append(lambda _head: {"splits": {"train": both}})
    delete(repository, "mixed", where="score < 1 or key = 'a'")
    delete(repository, "mixed", where="tags is null and key = 'd'")
    assert keys_of(repository, "mixed") == {"train": ["b"]}


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("colour = 'red'", 'cannot be evaluated: .*"colour" not found.*the columns are key, blob, label, class$'),
        ("label =", "cannot be parsed: syntax error"),
        ("", "has the type .*, expected BOOLEAN"),
        ("label", "has the type INTEGER, expected BOOLEAN"),
        ("label = 1, label = 0", "has the type .*BOOLEAN, BOOLEAN.*, expected BOOLEAN"),
        ("count(*) > 1", "cannot be evaluated: .*aggregate"),
        ("label = 1); drop table samples; select (true", "cannot be parsed"),
        ("label = 'cow'", "the data set has no class 'cow'; its classes are"),
        ("class = 'cow'", "the data set has no class 'cow'; its classes are"),
        ("key::INT = 1", "cannot be evaluated: .*Could not convert string 'a'"),
        ("key in (select * from read_text('/etc/hostname'))", "has a query of its own"),
        ("key in (select key from pets)", "has a query of its own"),
    ],
)
def test_a_condition_that_is_wrong_is_refused_before_anything_is_committed(pets, expression, message):
    with pytest.raises(ConfigError, match=message):
        delete(pets, "pets", where=expression)
    assert pets.versions("datasets", "pets").head() == 1


def test_a_column_named_like_our_own_is_no_trouble(repository):
    schema = shard_schema([KEY, pa.field("datasvc_row", pa.int64())])
    write_version(repository, "odd", {"train": [[{"key": key, "datasvc_row": 5} for key in "ab"]]}, schema)
    delete(repository, "odd", where="datasvc_row = 5 and key = 'b'")
    assert keys_of(repository, "odd") == {"train": ["a"]}
