"""Reverting a data set to an old version: one log entry, no data."""

import pytest

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.removal import remove_versions
from datasvc.shards.history.revert import revert
from datasvc.shards.versions.delete import delete
from tests.shards.written_versions import keys_of, texts, write_version


@pytest.fixture
def pets(repository):
    write_version(repository, "pets", {"train": [texts("ab"), texts("c")], "val": [texts("v")]})
    delete(repository, "pets", keys=["a"])
    return repository


def test_a_revert_commits_an_old_version_again_without_a_new_object(pets):
    before = {file.path for file in pets.storage.walk("objects")}
    report = revert(pets, "pets@1", message="a was good")
    assert (str(report.version), str(report.equal_to), report.is_new) == ("pets@3", "pets@1", True)
    assert {file.path for file in pets.storage.walk("objects")} == before
    assert keys_of(pets, "pets") == keys_of(pets, "pets@1")
    assert keys_of(pets, "pets@2")["train"] == ["b", "c"]
    entry = pets.versions("datasets", "pets").read(3).content
    assert (entry["parent"], entry["change"], entry["message"]) == (
        "pets@2", {"kind": "revert", "to": "pets@1"}, "a was good",
    )  # fmt: skip


def test_a_version_that_is_equal_already_is_not_committed_again(pets):
    report = revert(pets, "pets@2")
    assert (str(report.version), report.is_new) == ("pets@2", False)
    assert pets.versions("datasets", "pets").head() == 2


def test_a_revert_continues_what_another_writer_has_committed_meanwhile(pets, monkeypatch):
    log = type(pets.versions("datasets", "pets"))
    append, reverted = log.append, []

    def late(self, build, **more):
        if not reverted:
            reverted.append(True)
            delete(pets, "pets", keys=["c"])
            return append(self, build, head=2)  # listed before the other commit
        return append(self, build, **more)

    monkeypatch.setattr(log, "append", late)
    assert str(revert(pets, "pets@1").version) == "pets@4"
    assert pets.versions("datasets", "pets").read(4).content["parent"] == "pets@3"


def test_only_an_existing_version_with_a_number_or_a_tag_is_reverted_to(pets):
    with pytest.raises(ConfigError, match="'pets' names no version"):
        revert(pets, "pets")
    with pytest.raises(NotFoundError, match="no version 7"):
        revert(pets, "pets@7")
    remove_versions(pets, "datasets", ["pets@1"])
    with pytest.raises(NotFoundError, match=r"pets@1 was removed"):
        revert(pets, "pets@1")
