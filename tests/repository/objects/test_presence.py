"""A commit looks once more whether what it names is there: a gc with a wrong clock may have removed it."""

import math
import sys
import threading

import pytest
import torch

from datasvc.errors import NotFoundError
from datasvc.models import CheckpointManager, restore, save
from datasvc.models.transfer import transfer
from datasvc.repository import Digest, Objects, Repository, Storage
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.objects.presence import check_present, find_missing
from datasvc.shards import ingest, open_dataset
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.merge import merge
from datasvc.testing import FaultyStore
from tests.models.as_ranks import rows, save_as_ranks
from tests.repository.conftest import url  # noqa: F401 - the fixture: each kind of store
from tests.shards.written_versions import write_version


def weights(step=0.0):
    torch.manual_seed(0)
    return {"w": torch.randn(60_000) * 0.02 + step, "v": torch.randn(60_000)}


def remove(repository, digest):
    assert repository.storage.delete_if_older(repository.objects.path(digest), math.inf)


def objects_of(repository):
    return {file.path.rpartition("/")[2] for file in repository.storage.walk("objects")}


def removing_before_commit(monkeypatch, repository, module, choose):
    """Let an object vanish, as by a gc that believes it old, just before the last look of `module`."""
    real = check_present

    def looking(objects, named, what):
        named = set(named)
        gone = choose(named)
        if gone is not None:
            remove(repository, gone)
        real(objects, named, what)

    monkeypatch.setattr(sys.modules[module], "check_present", looking)


@pytest.mark.parametrize("num_objects", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_on_every_store_just_those_that_are_gone_are_missing(url, num_objects):  # noqa: F811
    repository = Repository.create(url)
    there = [repository.objects.put(b"%d" % number).digest for number in range(num_objects)]
    lost = {there[0], digest_of(b"never there")}
    remove(repository, there[0])
    assert find_missing(repository.objects, [*there, *lost]) == lost
    assert find_missing(repository.objects, there[1:]) == find_missing(repository.objects, []) == set()


@pytest.fixture
def store():
    with FaultyStore() as store:
        yield store


def num_requests(store):
    """Return how many folders a store was asked to list, and at how many objects to look."""
    operations = [operation for operation, _ in store.requests]
    return operations.count("list"), operations.count("info")


def in_one_folder(repository, num_objects, folder="ab"):
    """Store so many objects that lie in the same one of the 256 folders."""
    there = [Digest(f"{folder}{number:062x}") for number in range(num_objects)]
    for digest in there:
        repository.storage.put_bytes(Objects.path(digest), b"")
    return there


def test_few_objects_of_a_large_remote_store_are_checked_one_by_one(store):
    """A list of one folder of a large store takes some hundred requests, one after another."""
    repository = Repository.create(store.url)
    there = in_one_folder(repository, 200)
    store.requests.clear()
    gone = digest_of(b"gone")
    assert find_missing(repository.objects, [*there[:20], gone]) == {gone}
    assert num_requests(store) == (0, 21)


def test_few_objects_of_one_folder_are_checked_in_parallel(monkeypatch):
    repository = Repository.create("memory://side-by-side")
    there = in_one_folder(repository, 16)
    together = threading.Barrier(16, timeout=60)
    monkeypatch.setattr(type(repository.objects), "size", lambda _self, _digest: together.wait())
    assert find_missing(repository.objects, there) == set()


@pytest.mark.parametrize(("num_there", "num_lists", "num_looks"), [(100, 2, 0), (70_000, 1, 51)])
def test_many_objects_of_a_folder_are_listed_unless_that_takes_more_requests(
    store, monkeypatch, num_there, num_lists, num_looks
):
    repository = Repository.create(store.url)
    there = [*in_one_folder(repository, 60), *in_one_folder(repository, 50, folder="cd")]
    gone = {Digest(folder + "f" * 62) for folder in ("ab", "cd")}
    store.requests.clear()
    real = Storage.list
    others = ["0" * 64] * num_there
    monkeypatch.setattr(Storage, "list", lambda self, folder: [*real(self, folder), *others])
    assert find_missing(repository.objects, [*there, *gone]) == gone
    assert num_requests(store) == (num_lists, num_looks)


@pytest.mark.parametrize("codec", ["none", "delta"])
def test_a_save_whose_object_vanished_is_an_error_and_no_version(url, monkeypatch, codec):  # noqa: F811
    repository = Repository.create(url)
    removing_before_commit(monkeypatch, repository, "datasvc.models.versions.commit", max)
    with pytest.raises(
        NotFoundError, match=r"'cnn' is not committed: it references object .*, which no longer exists"
    ):
        save(repository, "cnn", weights(), step=1, codec=codec)
    assert repository.names("models") == []


def test_a_sharded_save_whose_object_vanished_is_an_error_and_no_version(repository, monkeypatch):
    removing_before_commit(monkeypatch, repository, "datasvc.models.versions.commit", max)
    whole = torch.arange(400_000.0).view(4, -1)
    with pytest.raises(NotFoundError, match="is not committed"):
        save_as_ranks(repository.url, [{"w": rows(whole, rank, 2)} for rank in range(2)])
    assert repository.names("models") == []


def test_a_run_whose_version_before_lost_an_object_saves_in_full_after_one_failure(monkeypatch):
    """A remote version before is not looked at while its pieces are named again, only at the commit."""
    repository = Repository.create("memory://lost-base")
    with CheckpointManager(repository, "cnn", failures="log") as model:
        model.save(weights(), step=1, wait=True)
        # The save has stored the changes of the checkout, if there are any; they may be the largest object.
        changes = (repository.entry(repository.resolve("models", "cnn")).content.get("code") or {}).get("diff")
        remove(repository, max(objects_of(repository) - {changes}, key=repository.objects.size))
        with pytest.raises(NotFoundError, match="is not committed"):
            model.save(weights(), step=2, wait=True)
        version = model.save(weights(), step=3, wait=True).result()
    assert torch.equal(restore(repository, version).state["w"], weights()["w"])


def test_an_ingest_a_delete_and_a_merge_whose_object_vanished_commit_nothing(repository, folder, monkeypatch):
    texts = [{"key": name, "text": name} for name in ("a", "b")]
    write_version(repository, "pets", {"train": [texts]})
    write_version(repository, "cars", {"train": [[{"key": "c", "text": "c"}]]})
    removing_before_commit(monkeypatch, repository, "datasvc.shards.versions.version_entry", max)
    for change in (
        lambda: ingest(repository, str(folder), "photos"),
        lambda: delete(repository, "pets", keys=["a"]),
        lambda: merge(repository, ["pets", "cars"], "both"),
    ):
        with pytest.raises(NotFoundError, match=r"a version with the splits .*train.* is not committed"):
            change()
    assert repository.names("datasets") == ["cars", "pets"]
    assert repository.versions("datasets", "pets").head() == 1


def test_samples_are_deleted_although_the_version_before_has_lost_an_object(repository):
    samples = [[{"key": name, "text": name}] for name in ("a", "b")]
    write_version(repository, "pets", {"train": samples})
    remove(repository, open_dataset(repository, "pets")["train"].table.shard(0).digest)
    assert delete(repository, "pets", keys=["a"]).version.version == 2


def test_a_pushed_version_whose_object_vanished_at_the_target_is_not_committed_there(
    repository, tmp_path, monkeypatch
):
    save(repository, "cnn", weights(), step=1)
    target = Repository.create(str(tmp_path / "target"))
    removing_before_commit(monkeypatch, target, "datasvc.models.transfer.copy_in_order", max)
    with pytest.raises(NotFoundError, match="cnn@1 is not committed"):
        transfer(repository, target, ["cnn"])
    assert target.names("models") == []
