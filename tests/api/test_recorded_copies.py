"""A purge lists the copies that have the samples, by what was copied, and not those that were made after it."""

import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from datasvc.api.certificates import read_certificates
from datasvc.api.gc import gc
from datasvc.api.purge import purge
from datasvc.api.recorded_copies import read_copies
from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError
from datasvc.models import DataUse, save
from datasvc.models.transfer import copy_in_order, transfer, transfer_datasets
from datasvc.repository import Repository
from datasvc.repository.logs.copies import record_copies
from datasvc.shards import open_dataset
from datasvc.shards.export import FORMATS, export
from datasvc.shards.history.rename import rename
from datasvc.shards.versions.merge import merge
from tests.shards.export.contents import write_photos
from tests.shards.written_versions import create_pets, write_version


def sample(key):
    return {"key": key, "text": f"the text of {key}"}


@pytest.fixture
def repository(tmp_path):
    """pets@1 has a to f in three shards; pets@2 is without f."""
    return create_pets(tmp_path / "repo", sample)


@pytest.fixture
def other(tmp_path):
    return Repository.create(str(tmp_path / "other"))


def listed(repository, *keys, dataset="pets"):
    """Return what a dry run lists: the last part of each destination, and the number of the samples."""
    report = purge(repository, dataset, keys=keys)
    return [(Path(copy.destination).name, number) for copy, number in report.destinations]


def view(repository, condition, ref="pets@1"):
    return f"{ref}[{open_dataset(repository, ref)['train'].where(condition).digest}]"


def test_copies_are_listed_by_the_samples_that_they_have(repository, other, tmp_path):
    export(repository, "pets@2", str(tmp_path / "live"), "parquet")
    export(repository, view(repository, "key = 'a'"), str(tmp_path / "one"), "parquet")
    export(repository, view(repository, "key <> 'a'"), str(tmp_path / "rest"), "parquet")
    transfer_datasets(repository, other, ["pets@2"])
    assert listed(repository, "a") == [("live", 1), ("one", 1), ("other", 1)]
    # The shard of f was pushed as it is, with what the version has deleted.
    assert listed(repository, "f") == [("rest", 1), ("other", 1)]
    assert listed(repository, "a", "b", "c") == [("live", 3), ("one", 1), ("rest", 2), ("other", 3)]


@pytest.mark.parametrize("format_name", sorted({*FORMATS} - {"coco"}))  # that of boxes alone
def test_every_format_is_recorded(repository, tmp_path, format_name):
    dataset = write_photos(repository)
    report = export(repository, "photos@1", str(tmp_path / "out"), format_name, split="val")
    (copy,) = read_copies(repository, "photos")
    assert replace(copy, by="", created="") == report.copy
    assert (copy.version, copy.samples, copy.tables) == ("photos@1", 2, {"val": dataset["val"].digest})


def test_what_was_copied_after_a_purge_is_not_listed(repository, other, tmp_path):
    export(repository, "pets@1", str(tmp_path / "before"), "parquet")
    transfer_datasets(repository, other, ["pets@1"])
    third = Repository.create(str(tmp_path / "third"))
    transfer_datasets(repository, third, ["pets@1"])
    report = purge(repository, "pets", keys=["a"], dry_run=False)
    assert [(Path(copy.destination).name, number) for copy, number in report.destinations] == [
        ("before", 1),
        ("other", 1),
        ("third", 1),
    ]
    certificate = json.loads(repository.objects.read(report.certificate))
    assert [(each["version"], each["kind"], each["purged"]) for each in certificate["destinations"]] == [
        ("pets@1", "export", 1),
        ("pets@1", "transfer", 1),
        ("pets@1", "transfer", 1),
    ]
    export(repository, "pets@1", str(tmp_path / "after"), "parquet")
    assert listed(repository, "a") == [("before", 1), ("other", 1), ("third", 1)]
    # This push carries the redactions to the other repository; the third one still has the sample.
    transfer_datasets(repository, other, ["pets@1"])
    assert listed(repository, "a") == [("before", 1), ("third", 1)]
    assert listed(repository, "a", "b") == [("before", 2), ("other", 1), ("third", 2), ("after", 1)]


def test_an_export_that_continues_after_a_purge_counts_as_begun_before_it(repository, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(UnavailableError):
        patch.setattr("datasvc.shards.export.exporter._join", lambda *_: fail())
        export(repository, "pets@1", str(tmp_path / "out"), "webdataset")
    assert read_copies(repository) == []
    purge(repository, "pets", keys=["a"], dry_run=False)
    export(repository, "pets@1", str(tmp_path / "out"), "webdataset")
    assert listed(repository, "a") == [("out", 1)]


def fail():
    raise UnavailableError("the disk is full")


def test_an_export_that_was_killed_before_its_record_is_recorded_when_repeated(repository, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(UnavailableError):
        patch.setattr("datasvc.shards.export.exporter.record_copies", lambda *_: fail())
        export(repository, "pets@1", str(tmp_path / "out"), "parquet")
    assert read_copies(repository) == []
    export(repository, "pets@1", str(tmp_path / "out"), "parquet")
    assert listed(repository, "a") == [("out", 1)]


def test_shards_that_data_sets_share_and_renamed_ones_are_found(repository, other):
    write_version(repository, "birds", {"train": [[sample("z")]]})
    merge(repository, ["pets@1", "birds"], "both")
    transfer_datasets(repository, other, ["both"])
    rename(repository, "pets", "beasts")
    assert listed(repository, "a", dataset="beasts") == [("other", 1)]
    assert read_copies(repository, "beasts") == []
    assert [copy.version for copy in read_copies(repository, "both")] == ["both@1"]


def test_a_model_with_its_data_is_recorded_and_one_without_is_not(repository, other):
    table = open_dataset(repository, "pets@1")["train"].digest
    save(repository, "net", {"w": 1.0}, step=1, data=[DataUse("pets@1", "train", {"version": table, "position": 3})])
    transfer(repository, other, ["net"])
    assert read_copies(repository) == []
    transfer(repository, other, ["net"], with_data=True, dry_run=True)
    assert read_copies(repository) == []
    transfer(repository, other, ["net"], with_data=True)
    assert [(copy.version, copy.kind, copy.samples) for copy in read_copies(repository)] == [
        ("pets@1", "transfer", 6)
    ]


def test_gc_keeps_what_says_which_samples_a_copy_has(repository, tmp_path):
    export(repository, "pets@1[key = 'a']", str(tmp_path / "one"), "parquet")
    for _ in range(2):
        gc(repository, grace_s=0, dry_run=False, no_writers=True)
        assert listed(repository, "a") == [("one", 1)]
        assert listed(repository, "b") == []


def test_a_copy_whose_table_is_lost_may_have_the_samples(repository, tmp_path):
    export(repository, view(repository, "key = 'a'"), str(tmp_path / "one"), "parquet")
    (copy,) = read_copies(repository)
    Path(repository.objects.local_path(copy.tables["train"])).unlink()
    assert listed(repository, "b") == [("one", None)]


def test_a_damaged_log_stops_purge_and_gc_before_they_change_anything(repository, tmp_path):
    export(repository, "pets@1", str(tmp_path / "out"), "parquet")
    (Path(repository.url) / "copies/00000001.json").write_text("no JSON")
    with pytest.raises(CorruptDataError, match=r"copies/00000001\.json"):
        purge(repository, "pets", keys=["a"], dry_run=False)
    assert open_dataset(repository, "pets@1")["train"][0]["text"] == "the text of a"
    with pytest.raises(CorruptDataError, match=r"copies/00000001\.json"):
        gc(repository, grace_s=0, dry_run=False, no_writers=True)


def test_an_export_of_a_read_only_repository_says_that_it_is_not_recorded(repository, tmp_path):
    reader = Repository.open(repository.url, read_only=True)
    with pytest.warns(UserWarning, match=r"out is complete, but not recorded"):
        assert export(reader, "pets@1", str(tmp_path / "out"), "parquet").copy.samples == 6
    shutil.rmtree(tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(reader, "pets@1", str(tmp_path / "out"), "parquet", record=False)
    record_copies(repository.storage, [])
    assert read_copies(repository) == []


def test_samples_that_are_purged_during_a_transfer_are_not_at_the_target(repository, other, monkeypatch):
    record = copy_in_order.record_copies

    def purge_first(storage, copies):
        monkeypatch.undo()
        record(storage, copies)
        purge(Repository.open(repository.url), "pets", keys=["a"], dry_run=False)

    monkeypatch.setattr(copy_in_order, "record_copies", purge_first)
    transfer_datasets(repository, other, ["pets@1"])
    found = {row["key"]: row["text"] for row in open_dataset(Repository.open(other.url), "pets@1")["train"]}
    assert (found["a"], found["b"]) == ("", "the text of b")
    assert listed(repository, "a") == []
    assert [number for _, number in listed(repository, "b")] == [1]


def test_versions_before_one_that_cannot_be_copied_are_recorded(repository, other):
    write_version(repository, "zoo", {"train": [[sample("z")]]})
    (shard,) = open_dataset(repository, "zoo@1")["train"].table.shards()
    repository.storage.delete_if_older(repository.objects.path(shard.digest), math.inf)
    with pytest.raises(NotFoundError):
        transfer_datasets(repository, other, ["pets@1", "zoo@1"])
    assert other.names("datasets") == ["pets"]
    assert [copy.version for copy in read_copies(repository)] == ["pets@1"]


def test_an_export_whose_deletions_are_lost_has_an_unknown_number(repository, tmp_path):
    ref = view(repository, "key = 'a'")
    export(repository, ref, str(tmp_path / "one"), "parquet")
    deletions = open_dataset(repository, ref)["train"].table.deletions
    repository.storage.delete_if_older(repository.objects.path(deletions), math.inf)
    assert listed(Repository.open(repository.url), "b") == [("one", None)]


def test_a_certificate_with_hashed_keys_has_no_condition_of_an_export(repository, tmp_path):
    export(repository, "pets@1[key = 'a']", str(tmp_path / "one"), "parquet")
    for hash_keys in (False, True):  # the second hashes the certificate of the first, too
        purge(Repository.open(repository.url), "pets", keys=["a"], hash_keys=hash_keys, dry_run=False)
        texts = [json.dumps(each) for each in read_certificates(Repository.open(repository.url))]
        assert ["key = 'a'" in text for text in texts] == ([False, False] if hash_keys else [True])


def test_a_name_without_data_set_and_copies_is_an_error(repository):
    assert read_copies(repository, "pets") == []
    for name in ("pets@1", "cats"):
        with pytest.raises(NotFoundError, match="without a version"):
            read_copies(repository, name)
