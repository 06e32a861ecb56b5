"""Removing versions of data sets; tests/models/registry/test_removal.py has the same for models."""

import time
from pathlib import Path

import pytest

from datasvc.api.gc import GRACE_S, gc, gc_at
from datasvc.errors import ConfigError, ConflictError, NotFoundError, UnavailableError
from datasvc.repository import Repository
from datasvc.repository.logs.removals import Removals
from datasvc.repository.removal import remove_versions
from datasvc.shards import ingest, open_dataset
from datasvc.shards.versions.dataset import list_datasets
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.describe import describe_version
from datasvc.shards.versions.verify import verify
from tests.shards.written_versions import write_version

LATER = time.time() + GRACE_S + 3600


def texts(*keys):
    return [{"key": key, "text": f"text of {key}"} for key in keys]


def remove(repository, *refs, **more):
    return remove_versions(repository, "datasets", list(refs), **more)


@pytest.fixture
def pets(repository):
    """pets@1 has the shards ab and c, pets@2 only shares c with it, and pets@3 is pets@2 without c."""
    write_version(repository, "pets", {"train": [texts("a", "b"), texts("c")]})
    write_version(repository, "pets", {"train": [texts("d", "e"), texts("c")]})
    delete(repository, "pets", keys=["c"])
    return repository


def shards_of(repository, ref):
    return {shard.digest for split in open_dataset(repository, ref).values() for shard in split.table.shards()}


def test_gc_frees_the_shards_that_only_removed_versions_have(pets):
    first, third = shards_of(pets, "pets@1"), shards_of(pets, "pets@3")
    done = remove(pets, "pets@1", "pets@2", message="wrong labels")
    assert [str(version) for version in done.versions] == ["pets@1", "pets@2"]
    with pytest.raises(NotFoundError, match=r"pets@1 was removed on .* \(wrong labels\); pets still has 3"):
        open_dataset(pets, "pets@1")
    assert gc(pets, dry_run=False).objects == ()  # a running reader may have the version open
    freed = {info.digest for info in gc_at(pets, LATER, dry_run=False).objects}
    assert freed == first - third
    assert verify(pets, "pets@3", deep=True).problems == ()
    assert gc_at(pets, LATER, dry_run=False).objects == ()


def test_numbers_are_not_used_again_and_the_next_version_continues_the_newest_that_is_left(pets):
    remove(pets, "pets@3", "pets@2")
    assert pets.living("datasets", "pets") == [1]
    assert str(list_datasets(pets)[0].resolved) == "pets@1"
    assert str(delete(pets, "pets", keys=["a"]).version) == "pets@4"
    assert pets.versions("datasets", "pets").read(4).content["parent"] == "pets@1"


def test_a_tagged_version_is_removed_only_by_force(pets):
    pets.tag("datasets", "pets@1", "stable")
    with pytest.raises(ConfigError, match=r"pets@1 is pets@stable; nothing was removed.*--force"):
        remove(pets, "pets@2", "pets@stable")
    assert pets.living("datasets", "pets") == [1, 2, 3]
    assert remove(pets, "pets@stable", force=True).untagged == ("pets@stable",)
    assert (pets.tags("datasets", "pets"), pets.living("datasets", "pets")) == ({}, [2, 3])


@pytest.mark.parametrize(
    ("refs", "error", "message"),
    [
        (["pets"], ConfigError, "'pets' names no version"),
        (["pets@2", "pets@7"], NotFoundError, "no version 7"),
        ("pets@2", ConfigError, r"expected a list of references, such as \['pets@2'\]"),
    ],
)
def test_what_cannot_be_removed_leaves_all_the_others(pets, refs, error, message):
    with pytest.raises(error, match=message):
        remove_versions(pets, "datasets", refs)
    assert pets.living("datasets", "pets") == [1, 2, 3]


def test_a_tag_that_is_set_while_its_version_is_removed_reverts_one_of_the_two(pets, monkeypatch):
    add = Removals.add

    def tagged_just_before(self, versions, message=""):
        monkeypatch.undo()
        pets.tag("datasets", "pets@1", "stable")
        return add(self, versions, message)

    monkeypatch.setattr(Removals, "add", tagged_just_before)
    with pytest.raises(ConflictError, match="'stable': 1"):
        remove(pets, "pets@1", "pets@2")
    assert pets.living("datasets", "pets") == [1, 3]
    move = type(pets._tags("datasets", "pets")).move

    def removed_just_before(self, *arguments, **more):
        monkeypatch.undo()
        remove(pets, "pets@3")
        return move(self, *arguments, **more)

    monkeypatch.setattr(type(pets._tags("datasets", "pets")), "move", removed_just_before)
    with pytest.raises(ConflictError, match="pets@3 was removed while tag 'best' was moved to it"):
        pets.tag("datasets", "pets@3", "best")
    assert pets.tags("datasets", "pets") == {"stable": 1}


@pytest.mark.parametrize("error", [KeyboardInterrupt, UnavailableError])
@pytest.mark.parametrize("step", ["delete a tag", "remove"])
def test_tags_are_restored_if_a_removal_is_interrupted(pets, monkeypatch, error, step):
    for tag in ("gold", "prod"):
        pets.tag("datasets", "pets@1", tag)
    untag = Repository.untag

    def interrupt_after(self, kind, name, tag, *, expect=None):
        untag(self, kind, name, tag, expect=expect)
        if tag == "prod":
            raise error("no answer")

    def interrupt(*_arguments):
        raise error("no answer")

    if step == "remove":
        monkeypatch.setattr(Removals, "add", interrupt)
    else:
        monkeypatch.setattr(Repository, "untag", interrupt_after)
    with pytest.raises(error):
        remove(pets, "pets@1", force=True)
    assert (pets.tags("datasets", "pets"), pets.living("datasets", "pets")) == ({"gold": 1, "prod": 1}, [1, 2, 3])


def test_a_removed_version_is_described_by_its_entry(pets):
    assert describe_version(pets, "pets@1")["splits"]["train"]["columns"] == {"key": "string", "text": "string"}
    remove(pets, "pets@1", message="wrong")
    gc_at(pets, LATER, dry_run=False)
    facts = describe_version(pets, "pets@1")
    assert (facts["removed"], facts["removal"]["message"]) == (True, "wrong")
    assert facts["splits"]["train"]["samples"] == 3


def test_an_ingest_whose_version_was_removed_commits_a_new_one(repository, folder, monkeypatch):
    monkeypatch.setattr("datasvc.repository.logs.journal.Journal.remove", lambda _self: None)
    assert str(ingest(repository, str(folder), "pets").version) == "pets@1"
    assert str(ingest(repository, str(folder), "pets").version) == "pets@1"  # the same journal: it was interrupted
    remove(repository, "pets@1")
    assert str(ingest(repository, str(folder), "pets").version) == "pets@2"


def test_a_removal_on_disk_is_like_that_of_a_model(pets):
    remove(pets, "pets@1", "pets@2")
    (entry,) = Path(pets.url, "datasets/pets/removals").iterdir()
    assert entry.name == "00000001.json"
    assert pets.removals("datasets", "pets")._log.read(1).content["removed"] == "1-2"
