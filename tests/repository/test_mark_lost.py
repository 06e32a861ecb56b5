"""Tagged versions that are declared lost; for others, see tests/shards/versions/test_unreadable_versions.py."""

import pytest

from datasvc.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.repository import Repository
from datasvc.repository.logs.removals import Removals
from datasvc.repository.removal import mark_lost


@pytest.fixture
def pets(tmp_path):
    """Three versions: pets@1 was removed, pets@2 has the tags "gold" and "prod"; the entries of both are damaged."""
    made = Repository.create(str(tmp_path / "repo"))
    for _ in range(3):
        made.versions("datasets", "pets").append(lambda _head: {})
    made.removals("datasets", "pets").add([1], "old")
    for tag in ("gold", "prod"):
        made.tag("datasets", "pets@2", tag)
    for number in (1, 2):
        made.storage.local_path(f"datasets/pets/versions/{number:08d}.json").write_bytes(b"{")
    return made


def state(repository):
    removals = repository.removals("datasets", "pets")
    return repository.tags("datasets", "pets"), removals.removed(), removals.lost()


@pytest.mark.parametrize("error", [UnavailableError, KeyboardInterrupt])
def test_tags_are_restored_if_the_commit_fails(pets, monkeypatch, error):
    def fail(*_arguments):
        raise error("no answer")

    monkeypatch.setattr(Removals, "_append", fail)
    with pytest.raises(error):
        mark_lost(pets, "datasets", ["pets@2"], force=True)
    assert state(pets) == ({"gold": 2, "prod": 2}, {1}, frozenset())


def test_a_version_that_is_tagged_meanwhile_stays_with_all_its_tags_and_the_others_are_lost(pets, monkeypatch):
    declare_lost = Removals.declare_lost

    def tagged_just_before(self, versions, message=""):
        pets.tag("datasets", "pets@2", "other")
        return declare_lost(self, versions, message)

    monkeypatch.setattr(Removals, "declare_lost", tagged_just_before)
    with pytest.raises(ConflictError, match=r"'other': 2.* stay, the other versions are marked as lost"):
        mark_lost(pets, "datasets", ["pets@1", "pets@2"], force=True)
    assert state(pets) == ({"gold": 2, "other": 2, "prod": 2}, {1}, {1})


def test_a_version_that_was_restored_is_not_lost_if_it_is_removed_later(pets):
    mark_lost(pets, "datasets", ["pets@2"], force=True)
    removals = pets.removals("datasets", "pets")
    removals.restore([2], "tagged")
    removals.add([2])
    assert state(pets) == ({}, {1, 2}, frozenset())
    removals.declare_lost([2])
    assert removals.lost() == {2}


def test_a_version_that_was_removed_before_it_was_declared_lost_is_named_as_lost(pets):
    with pytest.raises(NotFoundError, match=r"pets@1 was removed on .*\(old\)"):
        pets.resolve("datasets", "pets@1")
    mark_lost(pets, "datasets", ["pets@1"], message="disk failure")
    pets.removals("datasets", "pets").add([3], "not needed")
    with pytest.raises(NotFoundError, match=r"pets@1 was declared lost on .*\(disk failure\); pets still has 2"):
        pets.resolve("datasets", "pets@1")
    assert pets.removals("datasets", "pets").find(3).content["message"] == "not needed"


def test_the_error_of_a_lost_version_does_not_advise_to_give_it_up_again(pets):
    version = pets.resolve("datasets", "pets@2")
    with pytest.raises(CorruptDataError, match="`datasvc mark-lost pets@2` gives it up"):
        pets.entry(version)
    mark_lost(pets, "datasets", ["pets@2"], force=True, message="disk failure")
    with pytest.raises(
        CorruptDataError, match=r"cannot be read: .*; it was declared lost on .*disk failure"
    ) as caught:
        pets.entry(version)
    assert "mark-lost" not in str(caught.value)
