"""Deleting what is damaged: a version without the lost samples, all of whose shards can be read."""

import pytest

from datasvc.errors import ConfigError, ConflictError
from datasvc.shards import open_dataset
from datasvc.shards.history.repair import delete_damaged
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.verify import verify
from tests.shards.written_versions import LABELLED_SCHEMA, write_version

STEP = 12


def samples(start, stop):
    return [
        {"key": f"k{number:03}", "blob": b"<blob %03d>" % number * 5, "label": number % 3}
        for number in range(start, stop)
    ]


@pytest.fixture
def pets(repository, monkeypatch):
    """Two shards of 12 samples in batches of 5 in "train", of which k001 is deleted, and one in "val"."""
    monkeypatch.setattr("datasvc.shards.format.writer.BATCH_SAMPLES", 5)
    splits = {"train": [samples(0, STEP), samples(STEP, 2 * STEP)], "val": [samples(50, 55)]}
    write_version(repository, "pets", splits, LABELLED_SCHEMA, ("a", "b", "c"))
    delete(repository, "pets", keys=["k001", "k013"])
    return repository


def path_of(repository, shard, split="train"):
    return repository.objects.local_path(open_dataset(repository, "pets@2")[split].table.shard(shard).digest)


def check(repository, lost):
    split = open_dataset(repository, "pets@3")["train"]
    expected = {f"k{number:03}" for number in range(2 * STEP)} - {"k001", "k013"} - lost
    assert [sample["key"] for sample in split] == sorted(expected)
    for sample in split:
        assert sample["blob"] == b"<blob %s>" % sample["key"][1:].encode() * 5
    labels = [sample["label"] for sample in split]
    assert split.table.label_counts == {label: labels.count(label) for label in sorted(set(labels))}
    assert verify(repository, "pets@3", deep=True).problems == ()
    assert open_dataset(repository, "pets@3")["val"].digest == open_dataset(repository, "pets@2")["val"].digest


def test_of_a_changed_shard_only_the_changed_sample_is_lost(pets):
    path = path_of(pets, 0)
    path.write_bytes(path.read_bytes().replace(b"<blob 003>" * 5, b"<blob 0x3>" + b"<blob 003>" * 4))
    before = {file.path for file in pets.storage.walk("")}
    assert delete_damaged(pets, "pets", dry_run=True).deleted == {"train": 1}
    assert {file.path for file in pets.storage.walk("")} == before
    report = delete_damaged(pets, "pets@2", message="a bad disk")
    assert (str(report.version), report.deleted) == ("pets@3", {"train": 1})
    check(pets, {"k003"})
    change = pets.versions("datasets", "pets").read(3).content["change"]
    assert change == {"kind": "delete", "deleted": 1, "damaged": True}


def test_a_missing_shard_is_left_out_with_its_samples(pets):
    path_of(pets, 1).unlink()
    assert delete_damaged(pets, "pets").deleted == {"train": STEP - 1}
    check(pets, {f"k{number:03}" for number in range(STEP, 2 * STEP)})


def test_a_truncated_shard_keeps_its_first_batches(pets):
    path = path_of(pets, 0)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    lost = delete_damaged(pets, "pets").deleted["train"]
    keys = {sample["key"] for sample in open_dataset(pets, "pets@3")["train"]}
    assert 0 < lost < STEP
    assert "k000" in keys
    check(pets, {f"k{number:03}" for number in range(STEP)} - {"k001"} - keys)


def test_a_missing_index_of_a_good_shard_is_made_again(pets):
    pets.objects.local_path(open_dataset(pets, "pets")["train"].table.index(0)).unlink()
    assert delete_damaged(pets, "pets").deleted == {"train": 0}
    check(pets, set())


def test_of_a_good_version_nothing_is_deleted(pets):
    report = delete_damaged(pets, "pets")
    assert (str(report.version), report.deleted) == ("pets@2", {})


def test_a_split_is_never_emptied_and_only_the_newest_version_continued(pets):
    with pytest.raises(ConflictError, match="pets@1 is not the newest version, which is pets@2"):
        delete_damaged(pets, "pets@1")
    path_of(pets, 0, "val").unlink()
    with pytest.raises(ConfigError, match="all samples of split 'val' of pets@2 are lost"):
        delete_damaged(pets, "pets")
