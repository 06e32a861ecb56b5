"""`datasvc delete | classes | diff | merge` as a user runs them."""

import os
import subprocess
import sys

import pytest

from datasvc.shards import open_dataset
from tests.cli.command import ROOT
from tests.cli.test_cli import datasvc, said
from tests.drawing.hostile import parsed, text_of, with_class
from tests.shards.written_versions import LABELLED_SCHEMA, write_version


def labelled(**labels):
    return [{"key": key, "blob": key.encode(), "label": label} for key, label in labels.items()]


@pytest.fixture
def pets(repository):
    splits = {"train": [labelled(a=0, b=1, c=0), labelled(d=1)], "val": [labelled(v=0)]}
    write_version(repository, "pets", splits, LABELLED_SCHEMA, ["cat", "dog"])
    write_version(repository, "wild", {"train": [labelled(d=0, w=0)]}, LABELLED_SCHEMA, ["wolf"])
    return repository


def keys_of(repository, ref, split="train"):
    return [sample["key"] for sample in open_dataset(repository, ref)[split]]


def test_keys_in_a_file_are_deleted(pets, tmp_path):
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbfb\r\n\r\nd\n")
    done = datasvc("delete", "pets", "--keys", tmp_path / "keys", "-m", "bad", repo=pets.url)
    assert (done.returncode, done.stdout) == (0, "committed pets@2: deleted 2 train samples\n")
    assert keys_of(pets, "pets") == ["a", "c"]
    shown = said(datasvc("show", "pets", "--json", repo=pets.url))
    assert (shown["message"], shown["parent"], shown["change"]["deleted"]) == ("bad", "pets@1", 2)


def test_a_dry_run_of_a_deletion_deletes_nothing(pets):
    done = datasvc("delete", "pets", "--where", "label = 0", "--split", "train", "--dry-run", repo=pets.url)
    assert done.stdout == "would delete 2 train samples of pets@1; nothing was committed\n"
    facts = said(datasvc("delete", "pets", "--where", "key = 'a'", "--dry-run", "--json", repo=pets.url))
    assert (facts["committed"], facts["deleted"]) == (False, {"train": 1})
    assert pets.versions("datasets", "pets").head() == 1


def test_classes_of_integer_labels_get_names(repository, tmp_path):
    write_version(repository, "pets", {"train": [labelled(a=0, b=1)]}, LABELLED_SCHEMA)
    (tmp_path / "few.txt").write_text("cat\n", encoding="utf-8")
    refused = datasvc("classes", "pets", tmp_path / "few.txt", repo=repository.url)
    assert refused.returncode == 2
    assert "labels without class names up to 1, but there are only 1 class names" in refused.stderr
    (tmp_path / "names.txt").write_text("cat\ndog\n", encoding="utf-8")
    done = datasvc("classes", "pets", tmp_path / "names.txt", repo=repository.url)
    assert (done.returncode, done.stdout) == (0, "committed pets@2: 2 classes have names\n")
    assert open_dataset(repository, "pets")["train"].table.classes == ("cat", "dog")


@pytest.mark.slow
def test_keys_come_from_standard_input_too(pets):
    done = subprocess.run(
        [sys.executable, "-m", "datasvc.cli.main", "delete", "pets", "--keys", "-", "--repo", pets.url],
        input=b"c",
        capture_output=True,
        cwd=ROOT,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert keys_of(pets, "pets") == ["a", "b", "d"]


def test_samples_that_meet_a_condition_are_deleted_and_the_facts_come_as_json(pets):
    facts = said(datasvc("delete", "pets", "--where", "label = 0 and key != 'v'", "--json", repo=pets.url))
    assert facts == {"version": "pets@2", "committed": True, "deleted": {"train": 2}, "missing": []}
    assert keys_of(pets, "pets") == ["b", "d"]


def test_a_delete_without_samples_commits_nothing(pets):
    done = datasvc("delete", "pets", "--where", "label > 5", repo=pets.url)
    assert (done.returncode, done.stdout) == (0, "nothing to delete: pets@1 stays the newest version\n")
    facts = said(datasvc("delete", "pets", "--where", "label > 5", "--json", repo=pets.url))
    assert facts == {"version": "pets@1", "committed": False, "deleted": {}, "missing": []}


def test_missing_keys_may_be_ignored_and_are_named(pets, tmp_path):
    (tmp_path / "keys").write_text("b\nx\n")
    done = datasvc("delete", "pets", "--keys", tmp_path / "keys", "--ignore-missing", repo=pets.url)
    assert (done.returncode, done.stderr) == (0, "1 missing key: x\n")
    assert keys_of(pets, "pets") == ["a", "c", "d"]
    assert datasvc("delete", "pets", "--damaged", "--ignore-missing", repo=pets.url).returncode == 2


def test_a_difference_is_counted_with_some_keys_or_all(pets):
    many = [{"key": f"n{number:02}", "blob": b"", "label": 0} for number in range(12)]
    write_version(
        pets, "pets", {"train": [labelled(a=0, b=0), many], "test": [labelled(t=0)]}, LABELLED_SCHEMA, ["cat", "fox"]
    )
    shown = datasvc("diff", "pets@1", "pets@2", repo=pets.url).stdout
    assert "from: pets@1\nto: pets@2\nadded split test:\n  added: 1 (t)\n" in shown
    assert "  added: 12 (n00, n01, n02, n03, n04, n05, n06, n07, n08, n09, ...)\n" in shown
    assert "  deleted: 2 (c, d)\n  changed: 1 (b)\n" in shown
    assert "  unchanged: 1\n" in shown
    assert "  classes added: fox\n  classes removed: dog\n" in shown
    assert "removed split val:\n  added: 0\n  deleted: 1 (v)\n" in shown
    assert "n10, n11)" in datasvc("diff", "pets@1", "pets@2", "--keys", repo=pets.url).stdout
    facts = said(datasvc("diff", "pets@1", "pets@2", "--json", repo=pets.url))
    assert (facts["a"], facts["b"]) == ("pets@1", "pets@2")
    assert (facts["splits_added"], facts["splits_removed"]) == (["test"], ["val"])
    train = facts["splits"]["train"]
    assert {name: train[name] for name in ("added", "deleted", "changed", "unchanged")} == {
        "added": 12, "deleted": 2, "changed": 1, "unchanged": 1,
    }  # fmt: skip
    assert (len(train["keys"]["added"]), train["keys"]["changed"]) == (10, ["b"])
    everything = said(datasvc("diff", "pets@1", "pets@2", "--json", "--keys", repo=pets.url))
    assert everything["splits"]["train"]["keys"]["added"] == [sample["key"] for sample in many]


def test_data_sets_are_merged(pets):
    done = datasvc("combine", "all", "pets", "wild", "--on-common", "last", repo=pets.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("committed all@1 from pets@1, wild@1: 5 train, 1 val samples, 3 shards, ")
    assert keys_of(pets, "all") == ["a", "b", "c", "d", "w"]
    facts = said(datasvc("combine", "all", "pets", "wild", "--on-common", "first", "--json", repo=pets.url))
    assert (facts["version"], facts["merged"]) == ("all@2", ["pets@1", "wild@1"])
    assert (facts["samples"], facts["shards"]) == ({"train": 5, "val": 1}, {"train": 3, "val": 1})
    assert facts["bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["delete", "pets"], 2, "expected either keys or a condition"),
        (["delete", "pets", "--keys", "/nonexistent/keys"], 1, "file /nonexistent/keys with the keys does not exist"),
        (["delete", "pets", "--keys", sys.executable], 2, "is not UTF-8"),
        (["delete", "pets", "--keys", "/"], 2, "is a folder"),
        (["delete", "pets", "--keys", __file__], 1, "keys are not in pets@1: "),
        (["delete", "pets", "--where", "colour = 1"], 2, "the columns are key, blob, label"),
        (["delete", "pets", "--where", "true"], 2, "would be deleted: nothing was committed"),
        (["delete", "pets", "--where", "true", "--split", "test"], 1, "has no split 'test'"),
        (["delete", "cats", "--where", "true"], 1, "no data set 'cats'"),
        (["diff", "pets", "cats"], 1, "no data set 'cats'"),
        (["combine", "all", "pets"], 2, "at least two versions"),
        (["combine", "all", "pets", "wild"], 4, "1 key is on both sides: 'd'"),
        (["combine", "all", "pets", "wild", "--on-common", "any"], 2, "--on-common"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_say_what_to_do_without_a_traceback_and_with_their_exit_code(pets, arguments, code, message):
    done = datasvc(*arguments, repo=pets.url)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_delete_from_an_old_version_is_a_conflict(pets):
    datasvc("delete", "pets", "--where", "key = 'a'", repo=pets.url)
    done = datasvc("delete", "pets@1", "--where", "key = 'b'", repo=pets.url)
    assert done.returncode == 4
    assert "pets@1 is not the newest version, which is pets@2" in done.stderr


def test_versions_with_equal_keys_are_merged_with_a_prefix(pets):
    done = datasvc("combine", "all", "pets", "wild", "--key-prefix", "wild=wild/", repo=pets.url)
    assert done.returncode == 0, done.stderr
    assert keys_of(pets, "all") == ["a", "b", "c", "d", "wild/d", "wild/w"]
    assert datasvc("combine", "all", "pets", "wild", "--key-prefix", "wild", repo=pets.url).returncode == 2
    assert datasvc("combine", "all", "pets", "wild", "--key-prefix", "wild=", repo=pets.url).returncode == 2


def test_versions_are_reverted_removed_and_renamed(pets):
    assert datasvc("delete", "pets", "--where", "key = 'a'", repo=pets.url).returncode == 0
    done = datasvc("revert", "pets@1", "-m", "a is back", repo=pets.url)
    assert (done.returncode, done.stdout) == (0, "committed pets@3: it has the samples of pets@1\n")
    again = datasvc("revert", "pets@1", repo=pets.url)
    assert (again.returncode, again.stdout) == (0, "nothing to revert: pets@3 has the samples of pets@1 already\n")
    facts = said(datasvc("revert", "pets@2", "--json", repo=pets.url))
    assert facts == {"version": "pets@4", "equal_to": "pets@2", "committed": True}

    assert datasvc("tag", "pets@2", "stable", repo=pets.url).returncode == 0
    refused = datasvc("rm", "pets@2", "pets@1", repo=pets.url)
    assert refused.returncode == 2
    assert "pets@2 is pets@stable; nothing was removed" in refused.stderr
    done = datasvc("rm", "pets@2", "pets@1", "--force", "-m", "not needed", repo=pets.url)
    assert done.stdout == (
        "removed tag pets@stable\n"
        "removed pets@1, pets@2; `datasvc gc` frees their bytes after its grace period\n"
    )  # fmt: skip
    assert said(datasvc("rm", "wild@1", "--json", repo=pets.url)) == {
        "removed": ["wild@1"],
        "untagged": [],
        "damaged": [],
    }
    assert "pets@2 (removed)\t" in datasvc("log", "pets", repo=pets.url).stdout
    logged = said(datasvc("log", "pets", "--json", repo=pets.url))
    assert [entry.get("removed") for entry in logged] == [True, True, None, None]
    shown = datasvc("show", "pets@1", repo=pets.url).stdout
    assert "version: pets@1\nREMOVED: " in shown
    assert "(not needed): only this metadata is left" in shown
    assert "split train:\n" in shown

    assert datasvc("rename", "pets", "animals", repo=pets.url).stdout == (
        "renamed pets to animals: its newest version is animals@4\n"
    )
    assert said(datasvc("rename", "animals", "beasts", "--json", repo=pets.url)) == {
        "from": "animals", "to": "beasts", "version": "beasts@4",
    }  # fmt: skip
    missing = datasvc("head", "pets@3", repo=pets.url)
    assert missing.returncode == 1
    assert "(renamed to animals)" in missing.stderr
    assert [row["name"] for row in said(datasvc("ls", "--json", repo=pets.url))] == ["beasts"]


def test_tags_are_listed_moved_by_compare_and_set_removed_and_have_a_history(pets):
    write_version(pets, "pets", {"train": [labelled(z=0)]}, LABELLED_SCHEMA, ["cat", "dog"])
    assert datasvc("tag", "pets@1", "stable", repo=pets.url).stdout == "pets@stable is pets@1\n"
    assert datasvc("tag", "pets@2", "stable", "--expect", "2", repo=pets.url).returncode == 4
    assert datasvc("tag", "pets@2", "stable", "--expect", "pets@1", repo=pets.url).returncode == 0
    assert datasvc("tag", "pets", repo=pets.url).stdout == "tag\tversion\nstable\tpets@2\n"
    assert said(datasvc("tag", "pets", "--json", repo=pets.url)) == {"stable": 2}
    assert datasvc("tag", "pets", "stable", "--remove", repo=pets.url).stdout == (
        "removed pets@stable; its history stays\n"
    )
    history = datasvc("tag", "pets", "stable", "--history", repo=pets.url).stdout.splitlines()
    assert [line.split("\t")[:2] for line in history[1:]] == [["~0", "removed"], ["~1", "2"], ["~2", "1"]]
    assert datasvc("tag", "pets", "--remove", repo=pets.url).returncode == 2


def test_the_log_as_a_picture_has_merges_and_tags(pets, tmp_path):
    datasvc("delete", "pets", "--where", "key = 'a'", "-m", "<script>", repo=pets.url)
    datasvc("combine", "pets", "pets", "wild", "--on-common", "first", repo=pets.url)
    pets.tag("datasets", "pets@2", "stable")
    path = tmp_path / "pets.svg"
    done = datasvc("log", "pets", "--svg", path, repo=pets.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"wrote 3 versions to {path}\n")
    root = parsed(path.read_text())
    merged, deleted, ingested = (" ".join(text_of(node).split()) for node in with_class(root, "node"))
    assert "samples · merge" in merged
    assert "stable" in deleted
    assert "<script>" in deleted
    assert "ingest" in ingested
    assert len(with_class(root, "line")) > 2
    assert len(said(datasvc("log", "pets", "--json", "--last", 1, repo=pets.url))) == 1
