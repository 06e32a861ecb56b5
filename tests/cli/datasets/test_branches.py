"""`datasvc branch`, and the other commands on branches, as a user runs them."""

import json

import pytest

from datasvc.shards import open_dataset
from tests.cli.command import run
from tests.drawing.hostile import parsed
from tests.shards.written_versions import write_version


def texts(*keys):
    return [{"key": key, "text": key} for key in keys]


@pytest.fixture
def pets(repository, tmp_path):
    write_version(repository, "pets", {"train": [texts(*"abcdef")]})
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in texts("x", "y")))
    return repository


def datasvc(pets, *words, status=0):
    done = run(*words, DATASVC_REPO=pets.url)
    assert done.returncode == status, done.stderr
    return done.stdout if not status else done.stderr


def test_a_branch_is_created_filled_looked_at_merged_and_removed(pets, tmp_path):
    assert datasvc(pets, "branch", "pets", "try", "-m", "an idea") == "pets@try is pets@1\n"
    source = ("ingest", tmp_path / "more.jsonl", "pets@try", "--append", "--key", "key", "--workers", "1")
    assert datasvc(pets, *source).startswith("committed pets@2: 8 train samples")
    (tmp_path / "keys").write_text("a\n")
    assert datasvc(pets, "delete", "pets@try", "--keys", tmp_path / "keys") == (
        "committed pets@3: deleted 1 train samples\n"
    )
    assert datasvc(pets, "branch", "pets").partition("\n")[2] == "try\tpets@3\tpets@1\n"
    assert json.loads(datasvc(pets, "branch", "pets", "--json")) == {"try": {"head": "pets@3", "start": "pets@1"}}
    assert "version: pets@3\n" in (shown := datasvc(pets, "show", "pets@try"))
    assert "head of branch: try" in shown
    assert "added: 2 (x, y)" in datasvc(pets, "diff", "pets", "pets@try")
    dry = datasvc(pets, "merge", "pets", "pets@try", "--dry-run")
    assert dry == "would merge pets@3 into pets@1 (common ancestor pets@1): added 2 train; deleted 1 train\n"
    merged = datasvc(pets, "merge", "pets", "pets@try")
    assert merged == (
        "committed pets@4, pets@3 merged into pets@1 (common ancestor pets@1): added 2 train; deleted 1 train\n"
    )
    assert datasvc(pets, "merge", "pets", "pets@try") == "nothing to merge: pets@4 has pets@3 already\n"
    assert datasvc(pets, "branch", "pets", "try", "--remove") == (
        "removed the branch pets@try; its newest version pets@3 stays until it is removed\n"
    )
    history = datasvc(pets, "branch", "pets", "try", "--history").splitlines()
    assert [line.split("\t")[1] for line in history[1:]] == ["removed", "from pets@1"]
    assert history[2].endswith("an idea")
    assert sorted(sample["key"] for sample in open_dataset(pets, "pets")["train"]) == [*"bcdefxy"]


def test_lists_show_branches_only_where_there_are_any(pets, tmp_path):
    write_version(pets, "cats", {"train": [texts("c")]})
    before = datasvc(pets, "ls"), datasvc(pets, "log", "pets")
    assert {len(line.split("\t")) for line in before[0].splitlines()} == {5}
    assert len(before[1].splitlines()[1].split("\t")) == 4
    datasvc(pets, "branch", "pets", "try")
    (tmp_path / "keys").write_text("a\n")
    datasvc(pets, "delete", "pets@try", "--keys", tmp_path / "keys")
    rows = {line.split("\t")[0]: line.split("\t")[-1] for line in datasvc(pets, "ls").splitlines()[1:]}
    assert rows == {"cats": "-", "pets": "try=2"}
    log = [line.split("\t")[:2] for line in datasvc(pets, "log", "pets").splitlines()[1:]]
    assert log == [["pets@2", "try"], ["pets@1", "-"]]
    datasvc(pets, "revert", "pets@1", "--branch", "try")
    write_version(pets, "pets", {"train": [texts("new")]})
    numbers = [line.split("\t")[0] for line in datasvc(pets, "log", "pets@try").splitlines()[1:]]
    assert numbers == ["pets@3", "pets@2", "pets@1"]
    assert [entry["version"] for entry in json.loads(datasvc(pets, "log", "pets@try", "--json", "--last", "2"))] == [
        2,
        3,
    ]
    run("log", "pets", "--svg", tmp_path / "log.svg", DATASVC_REPO=pets.url)
    drawing = parsed((tmp_path / "log.svg").read_text())
    assert [text.text for text in drawing.iter() if text.text == "try"] == ["try"]


def test_a_conflict_ends_with_status_4_and_names_the_keys_and_files_of_keys_settle_it(pets, tmp_path):
    datasvc(pets, "branch", "pets", "try")
    (tmp_path / "keys").write_text("a\n")
    (tmp_path / "a.jsonl").write_text(json.dumps({"key": "a", "text": "new"}))
    datasvc(
        pets, "ingest", tmp_path / "a.jsonl", "pets@try", "--append", "--on-common", "replace", "--key", "key",
        "--workers", "1",
    )  # fmt: skip
    datasvc(pets, "delete", "pets", "--keys", tmp_path / "keys")
    refused = datasvc(pets, "merge", "pets", "pets@try", status=4)
    assert "train/a: deleted in pets@3, changed in pets@2" in refused
    facts = json.loads(datasvc(pets, "merge", "pets", "pets@try", "--dry-run", "--json"))
    assert facts["conflicts"] == [
        {"split": "train", "key": "a", "ours": "deleted", "theirs": "changed", "taken": None}
    ]  # fmt: skip
    done = datasvc(pets, "merge", "pets", "pets@try", "--theirs", tmp_path / "keys")
    assert done.startswith("committed pets@4")
    assert {sample["key"]: sample["text"] for sample in open_dataset(pets, "pets")["train"]}["a"] == "new"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("branch", "pets", "--remove"), "need a branch"),
        (("branch", "pets", "try", "--remove", "--history"), "exclude each other"),
        (("branch", "pets", "try", "--from", "cats@1"), "is not a version of pets"),
        (("branch", "pets@1"), "is not a valid name of a data set"),
        (("branch", "pets", "main"), "cannot be the name of a branch"),
        (("merge", "pets", "pets@1", "--on-conflict", "any"), "--on-conflict"),
        (("merge", "pets", "cats"), "of different data sets"),
    ],
)
def test_options_that_do_not_fit_are_refused(pets, words, message):
    write_version(pets, "cats", {"train": [texts("c")]})
    assert message in datasvc(pets, *words, status=2)
