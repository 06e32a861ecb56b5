"""`datasvc columns | label | compact`, and what they print."""

import json

import pytest

from tests.cli.test_cli import datasvc
from tests.shards.written_versions import LABELLED_SCHEMA, labelled, write_version


@pytest.fixture
def relabel(repository, tmp_path):
    """Commit pets@1, and return a file with a label of it and one of no sample."""
    write_version(repository, "pets", {"train": [labelled(a=0, b=1, c=0)]}, LABELLED_SCHEMA, ["cat", "dog"])
    file = tmp_path / "relabel.csv"
    file.write_text("key,label\nb,cat\nx,dog\n", encoding="utf-8")
    return str(file)


def test_labels_are_set_from_a_file_and_diff_says_which(repository, relabel):
    words = ("columns", "pets", "set", "label", "--from", relabel)
    refused = datasvc(*words, repo=repository.url)
    assert refused.returncode == 1
    assert "1 key is not in pets@1: 'x'; nothing was committed" in refused.stderr
    done = datasvc(*words, "--missing", "ok", repo=repository.url)
    assert done.stdout == "committed pets@2: changed 1 train samples\n"
    assert done.stderr == "1 missing key: x\n"
    assert "relabelled: 1 (b dog to cat)" in datasvc("diff", "pets@1", "pets", repo=repository.url).stdout


def test_a_second_set_of_labels_is_added_and_compared(repository, relabel):
    words = ("columns", "pets", "add", "label_bob", "--from", relabel, "--missing", "ok", "--json")
    added = json.loads(datasvc(*words, repo=repository.url).stdout)
    assert (added["version"], added["changed"], added["nulls"]) == ("pets@2", {"train": 1}, {"train": 2})
    shown = datasvc("show", "pets", "--confusion", "label", "label_bob", repo=repository.url).stdout
    assert shown.splitlines() == [
        "train: label and label_bob agree on 0 of 3 samples",
        "label\tlabel_bob\tsamples",
        "cat\t-\t2",
        "dog\tcat\t1",
    ]
    missing = datasvc("show", "pets", "--confusion", "label", "label_eve", repo=repository.url)
    assert "no split of pets has both columns 'label' and 'label_eve'" in missing.stderr


def test_a_class_is_given_by_condition_and_shards_take_the_values(repository, relabel):
    done = datasvc("label", "pets", "--where", "key = 'b'", "--to", "cat", repo=repository.url)
    assert done.stdout == "committed pets@2: changed 1 train samples\n"
    assert datasvc("compact", "pets", repo=repository.url).stdout == ("committed pets@3: wrote 3 train samples\n")
    assert datasvc("compact", "pets", repo=repository.url).stdout == (
        "nothing to change: pets@3 stays the newest version\n"
    )
    assert datasvc("columns", "pets", "rename", "label", "old", repo=repository.url).returncode == 0
    assert datasvc("columns", "pets", "drop", "old", repo=repository.url).returncode == 0
    wrong = datasvc("columns", "pets", "rename", "label", repo=repository.url)
    assert "rename needs the new name" in wrong.stderr
