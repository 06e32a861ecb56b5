"""`REFERENCE[SELECTION]` opens a part of the samples where samples are read; others refuse it, and say why."""

import json

import pyarrow.parquet as pq
import pytest

import datasvc
from datasvc.errors import ConfigError
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from datasvc.shards.versions.delete import delete
from datasvc.shards.views.named import save_view
from tests.cli.command import run
from tests.loaders.numbered import sample_of
from tests.shards.written_versions import LABELLED_SCHEMA, write_version

KEYS = ["a]b", "a[0]b", "it's", 'say "so"', "plain", "[x", "y]"]


@pytest.fixture
def pets(repository):
    shards = [[sample_of(number, LABELLED_SCHEMA) for number in range(first, first + 6)] for first in (0, 6, 12)]
    val = [{"key": key, "blob": b"1", "label": number} for number, key in enumerate(KEYS)]
    write_version(repository, "pets", {"train": shards, "val": [val]}, LABELLED_SCHEMA)
    save_view(repository, "high", open_dataset(repository, "pets")["train"].where("label >= 14"))
    return repository


def command(pets, *words, status=0):
    done = run(*words, "--repo", pets.url)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


REFS = ["pets@1[label in (2, 5)]", "pets[label in (2, 5)]"]


@pytest.mark.slow
@pytest.mark.parametrize("ref", REFS)
def test_commands_that_read_samples_read_those_of_the_view(pets, ref):
    shown = json.loads(command(pets, "show", ref, "--json"))
    train = shown["splits"]["train"]
    assert (shown["version"], train["samples"], train["left_out"]) == ("pets@1", 2, 4)
    assert train["view"] == '("label" IN (2, 5))'
    first = json.loads(command(pets, "head", ref, "--split", "train", "--json"))
    assert [each["key"] for each in first] == ["2", "5"]
    page = json.loads(command(pets, "samples", ref, "--split", "train", "--json"))
    assert [each["key"] for each in page["samples"]] == ["2", "5"]
    rows = json.loads(command(pets, "sql", ref, "select split, key from samples order by all", "--json"))
    found = [(row["split"], row["key"]) for row in rows]
    assert sorted(found) == [("train", "2"), ("train", "5"), ("val", KEYS[5]), ("val", KEYS[2])]
    assert json.loads(command(pets, "sample", ref, "5", "--json"))["key"] == "5"
    counted = json.loads(command(pets, "histogram", ref, "label", "--split", "train", "--json"))
    assert sum(each["count"] for each in counted["bins"]) == 2
    assert datasvc.open(pets.url).datasets.confusion(ref, "label", "key")["train"] == [("2", "2", 1), ("5", "5", 1)]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_export_has_the_samples_of_the_view_and_its_summary_says_which(pets, tmp_path, workers):
    ref = "pets@1[label % 6 = 1]"
    words = ("export", ref, tmp_path / "out", "--format", "parquet", "--split", "train", "--workers", workers)
    assert f"exported {ref} as parquet" in command(pets, *words)
    tables = map(pq.read_table, sorted(tmp_path.glob("out/**/*.parquet")))
    assert [key for table in tables for key in table["key"].to_pylist()] == ["1", "7", "13"]
    summary = json.loads((tmp_path / "out" / "datasvc-export.json").read_text())
    assert summary["splits"]["train"]["view"] == '(("label" % 6) = 1)'


def test_a_cache_stages_only_the_shards_of_the_view(pets, tmp_path):
    words = ("--cache", tmp_path / "cache", "--budget", "100MB", "--split", "train", "--json")
    assert json.loads(command(pets, "stage", "pets[high]", *words))["num_fetched"] == 1
    assert json.loads(command(pets, "stage", "pets@1[label < 7]", *words))["num_fetched"] == 2
    pinned = command(pets, "cache", "pin", "pets@1[label < 7]", "--split", "train", "--cache", tmp_path / "cache")
    assert "pinned pets@1[label < 7]/train: 0 shards fetched" in pinned


@pytest.mark.parametrize(
    "words",
    [("verify", "pets@1[label = 3]"), ("diff", "pets@1", "pets[high]"), ("tag", "pets[high]", "old"),
     ("push", "pets[high]", "--to", "OTHER")],
)  # fmt: skip
def test_commands_on_whole_versions_say_that_they_take_no_selection(pets, tmp_path, words):
    other = Repository.create(str(tmp_path / "other")).url
    words = [other if word == "OTHER" else word for word in words]
    assert "selects a part of the samples of a version, and a whole version is expected" in command(
        pets, *words, status=2
    )


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("key = 'a]b'", ["a]b"]),
        ("key like '%[0-9]%'", []),
        ("key like '%[0]%'", ["a[0]b"]),
        ("regexp_matches(key, '[0-9]')", ["a[0]b"]),
        ("key = 'it''s'", ["it's"]),
        ("key = 'say \"so\"'", ['say "so"']),
        ("key in ('[x', 'y]')", ["[x", "y]"]),
        ("\"key\" = ['a', 'plain'][2]", ["plain"]),
    ],
)
def test_a_condition_may_have_quotes_and_brackets(pets, condition, expected):
    opened = datasvc.open(pets.url).dataset(f"pets@1[{condition}]")
    if not expected:
        with pytest.raises(ConfigError, match="selects no sample of pets@1/val"):
            opened["val"]
        return
    assert [each["key"] for each in opened["val"]] == expected


def test_a_view_is_not_moved_to_a_version_that_is_committed_later(pets):
    stored = open_dataset(pets, "pets@1[label < 3]")["train"]
    delete(pets, "pets", keys=["1"], split="train")
    assert [each["key"] for each in open_dataset(pets, f"pets@1[{stored.digest}]")["train"]] == ["0", "1", "2"]
    assert [each["key"] for each in stored.where("label > 0")] == ["1", "2"]
    assert [each["key"] for each in open_dataset(pets, "pets[label < 3]")["train"]] == ["0", "2"]


def test_the_view_of_a_reference_can_be_saved_and_chosen_from(pets):
    made = json.loads(command(pets, "view", "pets@1[label < 9]", "some", "--where", "label > 5", "--json"))
    assert (made["samples"], made["steps"]) == (3, ['("label" < 9)', '("label" > 5)'])
    assert "pets[top] has 4 samples of pets@1/train" in command(pets, "view", "pets[high]", "top")
    assert "give the name" in command(pets, "view", "pets[high]", status=2)
