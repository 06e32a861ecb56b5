"""A data-set version whose entry is damaged hides no other one, and can be given up."""

import os
import time
import warnings
from pathlib import Path

import pytest

from datasvc.api import DataRepository
from datasvc.api.gc import gc
from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError, UnreadableVersionWarning
from datasvc.repository.logs.log import encode_entry
from datasvc.repository.removal import mark_lost
from datasvc.shards import open_dataset
from datasvc.shards.ingestion.ingest import ingest
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.merge import merge
from tests.models.every_kind import flip
from tests.shards.written_versions import texts, write_version


def entry_file(repository, name, number):
    return repository.storage.local_path(f"datasets/{name}/versions/{number:08d}.json")


@pytest.fixture
def datasets(repository):
    """Two versions of `pets`, of which the second is damaged, and one of `tales`."""
    write_version(repository, "pets", {"train": [texts("abc")]})
    delete(repository, "pets", keys=["a"])
    write_version(repository, "tales", {"train": [texts("x")]})
    path = entry_file(repository, "pets", 2)
    flip(path, path.stat().st_size // 2)
    return repository


def test_lists_have_all_other_versions_and_a_warning(datasets):
    facade = DataRepository(datasets).datasets
    with pytest.warns(UnreadableVersionWarning, match=r"pets@2 is left out.*`datasvc mark-lost pets@2`"):
        assert [str(dataset.resolved) for dataset in facade.ls()] == ["tales@1"]
    with pytest.warns(UnreadableVersionWarning, match="pets@2"):
        assert [entry.number for entry in facade.log("pets")] == [1]
    with pytest.raises(CorruptDataError, match="the entry of pets@2 cannot be read"):
        open_dataset(datasets, "pets")


def test_an_entry_whose_splits_are_no_splits_hides_no_other_data_set(datasets):
    good = datasets.versions("datasets", "pets").read(1).content["splits"]["train"]
    facade = DataRepository(datasets).datasets
    odd_splits = [{**good, name: value} for name in good for value in (None, "x", -1, True, 1.5, [], {})]
    odd_splits += [None, 3, "train", ["train"], {"train": None}, {"train": ["table"]}, {"train": {"table": 3}}]
    for odd in odd_splits:
        splits = {"train": odd} if isinstance(odd, dict) and "table" in odd else odd
        entry_file(datasets, "pets", 2).write_bytes(encode_entry({"format": 1, "splits": splits}))
        with pytest.warns(UnreadableVersionWarning, match="pets@2"):
            assert [str(dataset.resolved) for dataset in facade.ls()] == ["tales@1"]
        with pytest.warns(UnreadableVersionWarning, match="pets@2"):
            assert [entry.number for entry in facade.log("pets")] == [1]
        for operation in (facade.open, facade.describe, facade.verify):
            with pytest.raises(
                CorruptDataError, match=r"entry of pets@2 has no valid list of splits|is not a digest"
            ):
                operation("pets@2")


def test_a_lost_version_is_passed_over_by_what_continues_the_data_set(datasets):
    with pytest.raises(CorruptDataError):
        delete(datasets, "pets", keys=["b"])
    facade = DataRepository(datasets).datasets
    assert list(map(str, facade.mark_lost(["pets@2"], message="no backup").versions)) == ["pets@2"]
    with pytest.raises(NotFoundError, match=r"pets@2 was declared lost on .*no backup.*still has 1"):
        open_dataset(datasets, "pets@2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [str(dataset.resolved) for dataset in facade.ls()] == ["pets@1", "tales@1"]
        assert [entry.number for entry in facade.log("pets")] == [1]
        assert str(delete(datasets, "pets", keys=["b"]).version) == "pets@3"
    assert len(open_dataset(datasets, "pets")["train"]) == 2
    with pytest.raises(ConflictError, match="which is pets@3"):
        delete(datasets, "pets@1", keys=["b"])


def test_an_append_and_a_merge_continue_the_version_before_a_lost_one(datasets):
    mark_lost(datasets, "datasets", ["pets@2"])
    merge(datasets, ["pets", "tales"], "pets")
    assert open_dataset(datasets, "pets@3").entry.content["parent"] == "pets@1"
    path = entry_file(datasets, "pets", 3)
    flip(path, path.stat().st_size // 2)
    mark_lost(datasets, "datasets", ["pets@3"])
    ingest(datasets, texts(["new"]), "pets", append=True)
    assert open_dataset(datasets, "pets").entry.content["parent"] == "pets@1"
    assert len(open_dataset(datasets, "pets")["train"]) == 4


def test_if_all_versions_are_lost_an_append_starts_again(datasets):
    for number in (1, 2):
        entry_file(datasets, "pets", number).write_bytes(b"{")
    mark_lost(datasets, "datasets", ["pets@1", "pets@2"])
    assert str(ingest(datasets, texts(["new"]), "pets", append=True).version) == "pets@3"


def test_only_what_cannot_be_read_is_given_up(datasets):
    with pytest.raises(ConfigError, match="pets@1 is intact"):
        mark_lost(datasets, "datasets", ["pets@1"])
    datasets.tag("datasets", "pets@2", "stable")
    with pytest.raises(ConfigError, match="pets@stable"):
        mark_lost(datasets, "datasets", ["pets@2"])
    assert mark_lost(datasets, "datasets", ["pets@2"], force=True).untagged == ("pets@stable",)


def test_gc_runs_again_when_the_loss_is_older_than_its_grace(datasets):
    with pytest.raises(CorruptDataError, match=r"pets@2.*Nothing was deleted"):
        gc(datasets)
    mark_lost(datasets, "datasets", ["pets@2"])
    with pytest.raises(CorruptDataError, match=r"pets@2 was declared lost.*Nothing was deleted"):
        gc(datasets)
    for path in Path(datasets.url).rglob("*"):
        os.utime(path, (time.time() - 8 * 24 * 3600,) * 2)
    assert gc(datasets, dry_run=False).objects
    assert len(open_dataset(datasets, "pets@1")["train"]) == 3
