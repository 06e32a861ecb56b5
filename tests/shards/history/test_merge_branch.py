"""Merges of branches: which sample comes from which side, conflicts, and what a merge leaves as it is."""

import pytest

from datasvc.errors import ConfigError, ConflictError, NotFoundError
from datasvc.repository.branching import create_branch
from datasvc.repository.removal import mark_lost
from datasvc.shards import ingest, open_dataset
from datasvc.shards.history.merge_branch import merge_branch
from datasvc.shards.history.rename import name_classes
from datasvc.shards.history.three_way import MergeConflict
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.merge import merge
from tests.shards.written_versions import LABELLED_SCHEMA, commit_between, labelled, write_version


def texts(keys, text="old"):
    return [{"key": key, "text": text} for key in keys]


def put(repository, line, keys, text):
    ingest(repository, texts(keys, text), line, append=True, on_common="replace")


def content(repository, ref, split="train"):
    return {sample["key"]: sample["text"] for sample in open_dataset(repository, ref)[split]}


@pytest.fixture
def pets(repository):
    """`pets@1` with keys a to h, and a branch `work` that begins there."""
    ingest(repository, texts("abcdefgh"), "pets")
    create_branch(repository, "pets", "work")
    return repository


def test_what_one_side_changed_is_taken_from_this_side(pets):
    put(pets, "pets", "ax", "main")
    delete(pets, "pets", keys=["b"])
    put(pets, "pets@work", "cy", "work")
    delete(pets, "pets@work", keys=["d"])
    report = merge_branch(pets, "pets@work", "pets", message="try")
    assert (str(report.version), str(report.ours), str(report.theirs)) == ("pets@6", "pets@3", "pets@5")
    assert ([str(base) for base in report.bases], report.is_new, report.conflicts) == (["pets@1"], True, [])
    assert (report.added, report.changed, report.deleted) == ({"train": 1}, {"train": 1}, {"train": 1})
    assert content(pets, "pets") == {
        **dict.fromkeys("efgh", "old"), **dict.fromkeys("ax", "main"), **dict.fromkeys("cy", "work")
    }  # fmt: skip
    entry = pets.versions("datasets", "pets").read(6).content
    assert (entry["parent"], entry["merged"], entry["message"]) == ("pets@3", ["pets@5"], "try")
    assert entry["change"] == {
        "kind": "merge", "bases": ["pets@1"], "added": {"train": 1}, "changed": {"train": 1}, "deleted": {"train": 1}
    }  # fmt: skip
    # The branch, and the versions that were merged, are as before.
    assert pets.resolve("datasets", "pets@work").version == 5
    assert content(pets, "pets@5") == {**dict.fromkeys("abefgh", "old"), "c": "work", "y": "work"}


def conflicting(pets):
    """Make every kind of conflict, and every pair of equal changes."""
    put(pets, "pets", "anps", "main")  # a: both changed; n: both added; p: equal on both sides
    put(pets, "pets@work", "an", "work")
    put(pets, "pets@work", "ps", "main")
    put(pets, "pets", "b", "main")  # b: changed and deleted
    delete(pets, "pets@work", keys=["b", "d"])
    delete(pets, "pets", keys=["c", "d"])  # c: deleted and changed; d: deleted on both sides
    put(pets, "pets@work", "c", "work")


CONFLICTS = [
    MergeConflict("train", "a", "changed", "changed"),
    MergeConflict("train", "b", "changed", "deleted"),
    MergeConflict("train", "c", "deleted", "changed"),
    MergeConflict("train", "n", "added", "added"),
]


def test_conflicts_are_listed_by_key_and_nothing_is_committed(pets):
    conflicting(pets)
    newest = pets.versions("datasets", "pets").head()
    with pytest.raises(ConflictError, match="4 keys were changed on both sides since pets@1") as refused:
        merge_branch(pets, "pets@work", "pets")
    for line in (
        "train/a: changed in pets@7, changed in pets@8",
        "train/b: changed in pets@7, deleted in pets@8",
        "train/c: deleted in pets@7, changed in pets@8",
        "train/n: added in pets@7, added in pets@8",
        "--on-conflict ours",
        "--theirs FILE",
    ):
        assert line in str(refused.value).replace("pets@4", "pets@4")
    assert pets.versions("datasets", "pets").head() == newest
    report = merge_branch(pets, "pets@work", "pets", dry_run=True)
    assert sorted(report.conflicts, key=lambda each: each.key) == CONFLICTS
    assert (report.is_new, str(report.version), pets.versions("datasets", "pets").head()) == (False, "pets@7", newest)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"on_conflict": "ours"}, {"a": "main", "b": "main", "n": "main"}),
        ({"on_conflict": "theirs"}, {"a": "work", "c": "work", "n": "work"}),
        ({"ours": ["a", "b"], "theirs": ["c", "n"]}, {"a": "main", "b": "main", "c": "work", "n": "work"}),
        ({"on_conflict": "ours", "theirs": ["b", "n"]}, {"a": "main", "n": "work"}),
    ],
)
def test_a_conflict_is_settled_by_the_rule_that_is_given(pets, rules, expected):
    conflicting(pets)
    report = merge_branch(pets, "pets@work", "pets", **rules)
    same = {**dict.fromkeys("efgh", "old"), "p": "main", "s": "main"}
    assert content(pets, "pets") == {**same, **expected}
    taken = {conflict.key: conflict.taken for conflict in report.conflicts}
    assert sorted(taken) == ["a", "b", "c", "n"]
    counts = pets.versions("datasets", "pets").read(report.version.version).content["change"]["conflicts"]
    assert counts == {side: list(taken.values()).count(side) for side in sorted(set(taken.values()))}


def test_a_line_without_changes_of_its_own_gets_the_tables_of_the_branch_byte_for_byte(pets):
    put(pets, "pets@work", "ax", "work")
    merge_branch(pets, "pets@work", "pets")
    entries = [pets.versions("datasets", "pets").read(number).content for number in (2, 3)]
    assert entries[0]["splits"] == entries[1]["splits"]
    assert ("branch" in entries[0], "branch" in entries[1], entries[1]["parent"]) == (True, False, "pets@1")


def test_what_the_line_has_already_is_not_merged_again(pets):
    put(pets, "pets@work", "x", "work")
    merge_branch(pets, "pets@work", "pets")
    for ref in ("pets@work", "pets@1", "pets@2", "pets"):
        report = merge_branch(pets, ref, "pets")
        assert (report.is_new, str(report.version)) == (False, "pets@3")


def test_a_second_merge_is_relative_to_the_first_one(pets):
    put(pets, "pets@work", "ax", "work")
    put(pets, "pets", "b", "main")
    merge_branch(pets, "pets@work", "pets")
    put(pets, "pets", "a", "later")  # no conflict with the branch, which has not changed it since
    put(pets, "pets@work", "c", "work")
    report = merge_branch(pets, "pets@work", "pets")
    assert [str(base) for base in report.bases] == ["pets@2"]
    assert content(pets, "pets") == {
        **dict.fromkeys("defgh", "old"), "a": "later", "b": "main", "c": "work", "x": "work"
    }  # fmt: skip


def test_the_main_line_is_merged_into_a_branch_as_well(pets):
    put(pets, "pets", "a", "main")
    put(pets, "pets@work", "b", "work")
    report = merge_branch(pets, "pets", "pets@work")
    assert content(pets, "pets@work") == {**dict.fromkeys("cdefgh", "old"), "a": "main", "b": "work"}
    assert content(pets, "pets")["b"] == "old"
    assert merge_branch(pets, "pets@work", "pets").bases == (pets.resolve("datasets", "pets@2"),)
    assert report.version.version == 4


def test_several_common_ancestors_must_agree(pets):
    """Both sides have merged the other, and then the branch takes its change of `a` back: which counts is open."""
    put(pets, "pets", "ab", "main")
    put(pets, "pets@work", "c", "work")
    merge_branch(pets, "pets@3", "pets")
    merge_branch(pets, "pets@2", "pets@work")
    put(pets, "pets@work", "a", "old")
    put(pets, "pets@work", "d", "work")
    with pytest.raises(ConflictError, match="1 key was changed on both sides since pets@3, pets@2") as refused:
        merge_branch(pets, "pets@work", "pets")
    assert "train/a" in str(refused.value)
    merge_branch(pets, "pets@work", "pets", on_conflict="theirs")
    assert content(pets, "pets") == {
        **dict.fromkeys("aefgh", "old"), "b": "main", "c": "work", "d": "work"
    }  # fmt: skip


def test_a_new_ingest_on_the_main_line_is_a_change_of_all_that_it_lacks(pets):
    put(pets, "pets@work", "a", "work")
    ingest(pets, texts("cdz"), "pets")
    report = merge_branch(pets, "pets@work", "pets", dry_run=True)
    assert report.conflicts == [MergeConflict("train", "a", "deleted", "changed")]
    merge_branch(pets, "pets@work", "pets", on_conflict="ours")
    assert content(pets, "pets") == dict.fromkeys("cdz", "old")


def test_a_lost_version_before_the_common_ancestor_is_not_needed(repository):
    for keys in ("a", "ab", "abc"):
        ingest(repository, texts(keys), "pets")
    path = repository.storage.local_path("datasets/pets/versions/00000002.json")
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    mark_lost(repository, "datasets", ["pets@2"])
    create_branch(repository, "pets@3", "work")
    put(repository, "pets", "x", "main")
    put(repository, "pets@work", "y", "work")
    report = merge_branch(repository, "pets@work", "pets")
    assert ([str(base) for base in report.bases], str(report.version)) == (["pets@3"], "pets@6")
    assert content(repository, "pets") == {**dict.fromkeys("abc", "old"), "x": "main", "y": "work"}


def test_without_a_common_ancestor_the_base_is_given(repository):
    entry = {"origin": {"commit": "1"}}
    ingest(repository, texts("ab"), "pets")
    create_branch(repository, "pets", "work")
    put(repository, "pets@work", "a", "work")
    log = repository.versions("datasets", "pets")
    first = {name: value for name, value in log.read(1).content.items() if name not in ("commit", "created")}
    log.append(lambda _head: {**first, **entry})  # a copy from another repository, without its parents
    with pytest.raises(ConfigError, match=r"pets@3 and pets@2 have no common ancestor.*--base pets@NUMBER"):
        merge_branch(repository, "pets@work", "pets")
    merge_branch(repository, "pets@work", "pets", base="pets@1")
    assert content(repository, "pets") == {"a": "work", "b": "old"}


def test_splits_are_merged_each_and_a_split_of_one_side_is_kept(repository):
    write_version(repository, "pets", {"train": [texts("abc")], "val": [texts("vw")]})
    create_branch(repository, "pets", "work")
    delete(repository, "pets", keys=["a"])
    delete(repository, "pets@work", keys=["v"])
    write_version(repository, "more", {"test": [texts("t")]})
    merge(repository, ["pets@work", "more"], "pets@work")
    report = merge_branch(repository, "pets@work", "pets")
    assert (report.added, report.deleted) == ({"test": 1}, {"val": 1})
    found = {split: sorted(content(repository, "pets", split)) for split in open_dataset(repository, "pets")}
    assert found == {"test": ["t"], "train": ["b", "c"], "val": ["w"]}
    before, after = (open_dataset(repository, ref) for ref in ("pets@2", "pets"))
    assert before["train"].digest == after["train"].digest


def test_a_split_that_loses_its_last_sample_on_both_sides_together_is_left_out(repository):
    write_version(repository, "pets", {"train": [texts("abc")], "val": [texts("vw")]})
    create_branch(repository, "pets", "work")
    delete(repository, "pets", keys=["v"])
    delete(repository, "pets@work", keys=["w"])
    merge_branch(repository, "pets@work", "pets")
    assert list(open_dataset(repository, "pets")) == ["train"]


def test_samples_that_a_merge_brings_into_two_splits_are_refused(repository):
    write_version(repository, "pets", {"train": [texts("abc")], "val": [texts("vw")]})
    create_branch(repository, "pets", "work")
    write_version(repository, "x", {"train": [texts("n")]})
    write_version(repository, "y", {"val": [texts("n")]})
    merge(repository, ["pets", "x"], "pets")
    merge(repository, ["pets@work", "y"], "pets@work")
    with pytest.raises(ConflictError, match="1 sample of 'train' is in 'val' too, by keys: 'n'"):
        merge_branch(repository, "pets@work", "pets")
    report = merge_branch(repository, "pets@work", "pets", on_split_overlap="drop")
    assert sorted(content(repository, "pets", "train")) == ["a", "b", "c"]
    assert len(report.overlaps) == 1


def test_classes_of_both_sides_keep_their_names(repository):
    write_version(repository, "pets", {"train": [labelled(a=0, b=1)]}, LABELLED_SCHEMA, ["ant", "bee"])
    create_branch(repository, "pets", "work")
    write_version(repository, "x", {"train": [labelled(c=0, d=1)]}, LABELLED_SCHEMA, ["cat", "bee"])
    write_version(repository, "y", {"train": [labelled(e=0)]}, LABELLED_SCHEMA, ["emu"])
    merge(repository, ["pets", "x"], "pets")
    merge(repository, ["pets@work", "y"], "pets@work")
    report = merge_branch(repository, "pets@work", "pets")
    split = open_dataset(repository, "pets")["train"]
    names = {sample["key"]: split.classes[sample["label"]] for sample in split}
    assert names == {"a": "ant", "b": "bee", "c": "cat", "d": "bee", "e": "emu"}
    assert (report.added, report.changed, report.conflicts) == ({"train": 1}, {}, [])


def test_class_names_alone_are_merged(repository):
    write_version(repository, "pets", {"train": [labelled(a=0, b=1)]}, LABELLED_SCHEMA)
    create_branch(repository, "pets", "work")
    name_classes(repository, "pets@work", ["ant", "bee"])
    delete(repository, "pets", keys=["a"])
    merge_branch(repository, "pets@work", "pets")
    split = open_dataset(repository, "pets")["train"]
    assert (split.classes, [sample["key"] for sample in split]) == (("ant", "bee"), ["b"])


def test_a_merge_that_loses_a_race_is_made_again_with_what_the_other_committed(pets, monkeypatch):
    put(pets, "pets@work", "a", "work")
    commit_between(monkeypatch, pets, lambda: put(pets, "pets", "bz", "main"))
    report = merge_branch(pets, "pets@work", "pets")
    assert (str(report.ours), str(report.version)) == ("pets@3", "pets@4")
    assert content(pets, "pets") == {**dict.fromkeys("cdefgh", "old"), "a": "work", "b": "main", "z": "main"}


def test_a_commit_to_another_line_meanwhile_does_not_make_a_writer_build_again(pets, monkeypatch):
    from datasvc.shards.versions import delete as module

    calls = []
    build = module._DeleteBuild.__call__
    monkeypatch.setattr(
        module._DeleteBuild, "__call__", lambda self, parent: calls.append(parent) or build(self, parent)
    )

    commit_between(monkeypatch, pets, lambda: put(pets, "pets", "z", "main"))
    assert str(delete(pets, "pets@work", keys=["a"]).version) == "pets@3"
    assert calls == [pets.resolve("datasets", "pets@1")]
    assert pets.versions("datasets", "pets").read(3).content["lines"] == {"": 2}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("cats", "pets"), {}, "are of different data sets"),
        (("pets@work", "pets@1"), {}, "is one version, and a new version is committed to a whole line"),
        (("pets@work", "pets"), {"on_conflict": "both"}, "on_conflict is 'both'; expected one of fail, ours, theirs"),
        (("pets@work", "pets"), {"ours": "a"}, "ours is the string 'a'; expected a list of keys"),
        (("pets@work", "pets"), {"ours": ["a"], "theirs": ["a"]}, "the key 'a' is to be taken from both sides"),
    ],
)
def test_what_cannot_be_merged_is_refused_with_what_to_do(pets, arguments, options, message):
    write_version(pets, "cats", {"train": [texts("a")]})
    with pytest.raises(ConfigError, match=message):
        merge_branch(pets, *arguments, **options)


def test_a_branch_that_does_not_exist_is_named(pets):
    with pytest.raises(NotFoundError, match=r"pets has no branch 'wrok'; it has: work"):
        merge_branch(pets, "pets", "pets@wrok")
    for act in (
        lambda: ingest(pets, texts("z"), "pets@wrok"),
        lambda: ingest(pets, texts("z"), "pets@wrok", append=True),
        lambda: merge(pets, ["pets", "pets@work"], "pets@wrok"),
    ):
        with pytest.raises(
            NotFoundError, match=r"no branch 'wrok'; it has: work; `datasvc branch pets wrok` makes it"
        ):
            act()
    assert pets.versions("datasets", "pets").head() == 1
