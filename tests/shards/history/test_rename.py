"""Renaming a data set: history, numbers and tags move, old references say where, and no concurrent commit is lost."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datasvc.api.gc import gc
from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository import Repository
from datasvc.repository.branching import branch_history, create_branch, remove_branch
from datasvc.repository.logs.removals import Removals
from datasvc.repository.removal import mark_lost, remove_versions
from datasvc.repository.store.storage import Storage
from datasvc.shards import ingest, open_dataset
from datasvc.shards.history.merge_branch import merge_branch
from datasvc.shards.history.rename import rename
from datasvc.shards.history.revert import revert
from datasvc.shards.versions.dataset import list_datasets
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.describe import describe_version
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.verify import verify
from tests.shards.written_versions import texts, write_version


@pytest.fixture
def pets(repository):
    """pets@1 to pets@3, of which pets@2 is removed; tags old, stable (moved) and gone (deleted)."""
    write_version(repository, "pets", {"train": [texts("ab"), texts("c")]})
    delete(repository, "pets", keys=["a"])
    delete(repository, "pets", keys=["b"])
    repository.tag("datasets", "pets@3", "stable")
    repository.tag("datasets", "pets@1", "old")
    repository.tag("datasets", "pets@1", "stable")
    repository.tag("datasets", "pets@1", "gone")
    repository.untag("datasets", "pets", "gone")
    remove_versions(repository, "datasets", ["pets@2"])
    return repository


def keys_of(repository, ref):
    return [sample["key"] for sample in open_dataset(repository, ref)["train"]]


def check_renamed(repository):
    assert [str(dataset.resolved) for dataset in list_datasets(repository)] == ["animals@3"]
    assert repository.living("datasets", "animals") == [1, 3]
    assert repository.tags("datasets", "animals") == {"old": 1, "stable": 1}
    assert str(repository.resolve("datasets", "animals@stable~1")) == "animals@3"
    assert [len(repository.tag_history("datasets", "animals", tag)) for tag in ("old", "stable", "gone")] == [1, 2, 2]
    assert (keys_of(repository, "animals@1"), keys_of(repository, "animals")) == (["a", "b", "c"], ["c"])
    for ref in ("pets", "pets@1", "pets@3"):
        with pytest.raises(NotFoundError, match=r"was removed on .* \(renamed to animals"):
            open_dataset(repository, ref)
    assert repository.tags("datasets", "pets") == {}


def test_all_versions_numbers_and_tags_have_the_new_name_and_no_object_is_copied(pets):
    before = {file.path for file in pets.storage.walk("objects")}
    assert str(rename(pets, "pets", "animals", message="birds came")) == "animals@3"
    check_renamed(pets)
    assert {file.path for file in pets.storage.walk("objects")} == before
    gc(pets, grace_s=0, no_writers=True, dry_run=False)
    assert verify(pets, "animals@1", deep=True).problems == ()
    facts = describe_version(pets, "pets@3")
    assert facts["removal"]["message"] == "renamed to animals: birds came"


@pytest.mark.parametrize("stop_at", range(1, 24))
def test_a_rename_that_is_killed_is_finished_by_the_same_call(pets, monkeypatch, stop_at):
    create, count = Storage.create, [0]

    def killed(self, path, content):
        count[0] += 1
        if count[0] == stop_at:
            raise KeyboardInterrupt
        return create(self, path, content)

    monkeypatch.setattr(Storage, "create", killed)
    try:
        rename(pets, "pets", "animals")
    except KeyboardInterrupt:
        monkeypatch.undo()
        for name in pets.names("datasets"):  # whatever is visible can be read
            for number in pets.living("datasets", name):
                try:
                    verify(pets, f"{name}@{number}")
                except NotFoundError as error:
                    assert "was renamed to animals" in str(error)  # noqa: PT017 - only between commit and removal
        # Without the commit, nothing has the new name.
        assert Path(pets.url, "datasets/pets/versions/00000004.json").exists() or pets.names("datasets") == ["pets"]
        rename(pets, "pets", "animals")
    check_renamed(pets)


def test_a_version_that_is_committed_meanwhile_is_renamed_too(pets, monkeypatch):
    create, count = Storage.create, [0]

    def late(self, path, content):
        if path.endswith("pets/versions/00000004.json") and not count[0]:
            count[0] = 1
            write_version(pets, "pets", {"train": [texts("x")]})
        return create(self, path, content)

    monkeypatch.setattr(Storage, "create", late)
    assert str(rename(pets, "pets", "animals")) == "animals@4"
    assert keys_of(pets, "animals") == ["x"]
    assert pets.living("datasets", "pets") == []


def test_what_continues_the_old_name_afterwards_is_refused_with_the_new_name(pets, folder):
    rename(pets, "pets", "animals")
    with pytest.raises(ConflictError, match="pets was renamed to animals; use the new name"):
        ingest(pets, str(folder), "pets", append=True)
    with pytest.raises(NotFoundError, match="renamed to animals"):
        delete(pets, "pets", keys=["c"])
    # A new data set may have the old name. Its numbers go on.
    assert str(ingest(pets, str(folder), "pets").version) == "pets@5"
    with pytest.raises(ConfigError, match="the name 'animals' has versions"):
        rename(pets, "pets", "animals")


def test_a_revert_that_loses_against_a_rename_commits_nothing(pets, monkeypatch):
    create = Storage.create

    def late(self, path, content):
        if path.endswith("pets/versions/00000004.json"):
            monkeypatch.undo()
            rename(pets, "pets", "animals")
        return create(self, path, content)

    monkeypatch.setattr(Storage, "create", late)
    with pytest.raises(ConflictError, match="pets was renamed to animals"):
        revert(pets, "pets@1")
    check_renamed(pets)


@pytest.mark.parametrize(
    ("new", "error", "message"),
    [
        ("pets", ConfigError, "has the name 'pets' already"),
        ("Pets!", ConfigError, "not a valid name"),
        ("wild", ConfigError, "the name 'wild' has versions, and their numbers are never used again"),
    ],
)
def test_a_name_that_cannot_be_given_changes_nothing(pets, new, error, message):
    write_version(pets, "wild", {"train": [texts("w")]})
    with pytest.raises(error, match=message):
        rename(pets, "pets", new)
    assert pets.living("datasets", "pets") == [1, 3]
    assert pets.living("datasets", "wild") == [1]


def test_a_data_set_that_does_not_exist_is_not_renamed(pets):
    with pytest.raises(NotFoundError, match=r"no data set 'cats' in .*it has: pets"):
        rename(pets, "cats", "animals")


def test_a_damaged_version_stops_a_rename_until_it_is_marked_as_lost(pets):
    path = Path(pets.url, "datasets/pets/versions/00000003.json")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptDataError, match=r"the entry of pets@3 cannot be read.*nothing was renamed"):
        rename(pets, "pets", "animals")
    mark_lost(pets, "datasets", ["pets@3"])
    assert str(rename(pets, "pets", "animals")) == "animals@1"
    assert pets.removals("datasets", "animals").lost() == {3}


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_version_that_another_process_commits_to_the_new_name_is_not_overwritten(pets, monkeypatch, taken):
    create = Storage.create

    def late(self, path, content):
        if path.endswith(f"animals/versions/{taken:08d}.json"):
            monkeypatch.undo()
            # The other process found no version, or the versions up to this one.
            for number in range(1, taken + 1):
                path_of_other = Path(pets.url, f"datasets/wild/versions/{number:08d}.json")
                create(self, f"datasets/animals/versions/{number:08d}.json", path_of_other.read_bytes())
        return create(self, path, content)

    write_version(pets, "wild", {"train": [texts("x")]})
    for key in ("y", "z"):
        write_version(pets, "wild", {"train": [texts(key)]})
    monkeypatch.setattr(Storage, "create", late)
    with pytest.raises(ConflictError, match="committed to 'animals' meanwhile"):
        rename(pets, "pets", "animals")
    assert pets.living("datasets", "animals") == list(range(1, taken + 1))
    assert keys_of(pets, "animals") == [["x"], ["y"], ["z"]][taken - 1]
    assert keys_of(pets, "pets@stable") == ["a", "b", "c"]
    assert keys_of(pets, "pets") == ["c"]
    with pytest.raises(ConfigError, match="the name 'animals' has versions"):
        rename(pets, "pets", "animals")
    assert str(rename(pets, "pets", "beasts")) == "beasts@3"
    assert pets.tags("datasets", "beasts") == {"old": 1, "stable": 1}


def stop_before(monkeypatch, repository, step, *names):
    """Rename, but end the process before a step."""

    def stop(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"datasvc.shards.history.rename.{step}", stop)
        with pytest.raises(KeyboardInterrupt):
            rename(repository, *names)


@pytest.mark.parametrize("second", ["animals", "beasts"])
def test_of_two_renames_that_reach_the_commit_one_is_done_and_nothing_is_lost(pets, monkeypatch, second):
    create, barrier = Storage.create, threading.Barrier(2)
    has_waited = threading.local()

    def together(self, path, content):
        if path.endswith("pets/versions/00000004.json") and not hasattr(has_waited, "done"):
            has_waited.done = True
            barrier.wait(30)
        return create(self, path, content)

    monkeypatch.setattr(Storage, "create", together)

    def run(new_name):
        try:
            return str(rename(Repository.open(pets.url), "pets", new_name))
        except (ConflictError, NotFoundError) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, ["animals", second]))
    done = [result for result in results if isinstance(result, str)]
    if second == "animals":
        assert done == ["animals@3", "animals@3"]
        check_renamed(pets)
    assert len(done) == (2 if second == "animals" else 1)
    gc(pets, grace_s=0, no_writers=True, dry_run=False)
    assert verify(pets, done[0], deep=True).problems == ()
    assert pets.names("datasets") == sorted({"pets", done[0][:-2]})


@pytest.mark.parametrize("stop_at", range(1, 14))
def test_a_rename_that_another_one_overtakes_anywhere_loses_nothing(pets, monkeypatch, stop_at):
    create, count = Storage.create, [0]

    def overtaken(self, path, content):
        count[0] += 1
        if count[0] == stop_at:
            rename(pets, "pets", "animals")
            count[0] = 1000
        return create(self, path, content)

    monkeypatch.setattr(Storage, "create", overtaken)
    assert str(rename(pets, "pets", "animals")) == "animals@3"
    assert count[0] >= 1000
    check_renamed(pets)
    gc(pets, grace_s=0, no_writers=True, dry_run=False)
    assert verify(pets, "animals@1", deep=True).problems == ()


def test_a_rename_to_a_third_name_is_refused_until_the_interrupted_one_is_finished(pets, monkeypatch):
    stop_before(monkeypatch, pets, "_end_moves", "pets", "animals")
    with pytest.raises(ConflictError, match=r"pets is being renamed to animals; .* `datasvc rename pets animals`"):
        rename(pets, "pets", "beasts")
    rename(pets, "pets", "animals")
    check_renamed(pets)


@pytest.mark.parametrize("step", ["_copy_removals", "_copy_versions", "_end_moves", "remove_untagged"])
def test_a_new_data_set_under_the_old_name_does_not_stop_an_interrupted_rename(pets, folder, monkeypatch, step):
    stop_before(monkeypatch, pets, step, "pets", "animals")
    with pytest.raises(ConflictError, match="pets was renamed to animals"):
        merge(pets, ["pets@1", "pets@3"], "pets", on_common="first")
    assert str(ingest(pets, str(folder), "pets").version) == "pets@5"
    pets.tag("datasets", "pets@5", "stable")
    assert str(rename(pets, "pets", "animals")) == "animals@3"
    assert pets.living("datasets", "pets") == [5]
    assert pets.tags("datasets", "pets") == {"stable": 5}
    assert pets.tags("datasets", "animals") == {"old": 1, "stable": 1}


def test_a_tag_that_was_moved_under_the_new_name_stays_when_the_rename_continues(pets, monkeypatch):
    stop_before(monkeypatch, pets, "remove_untagged", "pets", "animals")
    pets.tag("datasets", "animals@3", "stable")
    rename(pets, "pets", "animals")
    assert pets.tags("datasets", "animals") == {"old": 1, "stable": 3}
    assert pets.living("datasets", "pets") == []


@pytest.mark.parametrize("path", ["pets/versions/00000004.json", "animals/versions/00000003.json"])
def test_a_version_that_is_removed_during_the_rename_stays_removed(pets, monkeypatch, path):
    create = Storage.create

    def late(self, created, content):
        if created.endswith(path):
            monkeypatch.undo()
            remove_versions(pets, "datasets", ["pets@1"], force=True, message="wrong")
        return create(self, created, content)

    monkeypatch.setattr(Storage, "create", late)
    assert str(rename(pets, "pets", "animals")) == "animals@3"
    assert (pets.living("datasets", "animals"), pets.tags("datasets", "animals")) == ([3], {})
    with pytest.raises(NotFoundError, match=r"\(wrong\)"):
        open_dataset(pets, "animals@1")


def test_a_tag_that_is_set_during_the_removal_is_moved_by_the_next_call(pets, monkeypatch):
    add = Removals.add

    def late(self, versions, message=""):
        monkeypatch.undo()
        pets.tag("datasets", "pets@3", "late")
        return add(self, versions, message)

    monkeypatch.setattr(Removals, "add", late)
    with pytest.raises(ConflictError, match="another process moved tags of pets"):
        rename(pets, "pets", "animals")
    rename(pets, "pets", "animals")
    assert pets.tags("datasets", "animals") == {"late": 3, "old": 1, "stable": 1}
    assert pets.living("datasets", "pets") == []


@pytest.fixture
def branched(pets):
    """Besides, pets@4 and pets@5 on `work`, which begins at pets@1, and a branch `done` that was removed."""
    create_branch(pets, "pets@1", "done")
    remove_branch(pets, "pets", "done")
    create_branch(pets, "pets@1", "work")
    delete(pets, "pets@work", keys=["a"])
    delete(pets, "pets@work", keys=["b"])
    return pets


def check_branched(repository):
    state = repository.state("datasets", "animals")
    assert (state.newest, state.branches, state.living) == (3, {"work": 5}, [1, 3, 4, 5])
    assert [move.content["version"] for move in branch_history(repository, "animals", "done")] == [1, None]
    assert repository.branches("pets") == {}
    with pytest.raises(NotFoundError, match=r"pets has no (tag|branch) 'work'"):
        delete(repository, "pets@work", keys=["c"])


def test_branches_move_with_their_data_set_and_continue_there(branched):
    rename(branched, "pets", "animals")
    check_branched(branched)
    write_version(branched, "x", {"train": [texts("n")]})
    merge(branched, ["animals@work", "x"], "animals@work")
    assert keys_of(branched, "animals@work") == ["c", "n"]
    report = merge_branch(branched, "animals@work", "animals")
    assert ([str(base) for base in report.bases], sorted(keys_of(branched, "animals"))) == (["animals@1"], ["c", "n"])


@pytest.mark.parametrize("step", ["_copy_versions", "_end_moves", "remove_untagged"])
def test_an_interrupted_rename_is_finished_with_its_branches(branched, monkeypatch, step):
    stop_before(monkeypatch, branched, step, "pets", "animals")
    # Meanwhile, nothing is committed to the branch of the old name.
    with pytest.raises((ConflictError, NotFoundError), match=r"was renamed to animals|has no (branch|tag)"):
        delete(branched, "pets@work", keys=["c"])
    rename(branched, "pets", "animals")
    check_branched(branched)
