"""A commit looks once more whether what it names is there: a gc with a wrong clock may have removed it."""

import sys

import pytest
import torch

from datasvc.errors import NotFoundError
from datasvc.models import Model, restore, save
from datasvc.models.transfer import transfer
from datasvc.repository import Repository
from datasvc.repository.objects import digest_of
from datasvc.repository.presence import check_present, find_missing
from datasvc.shards import ingest, open_dataset
from datasvc.shards.delete import delete
from datasvc.shards.merge import merge
from tests.models.as_ranks import rows, save_as_ranks
from tests.repository.conftest import url  # noqa: F401 - the fixture: each kind of store
from tests.shards.versions import write_version


def weights(step=0.0):
    torch.manual_seed(0)
    return {"w": torch.randn(60_000) * 0.02 + step, "v": torch.randn(60_000)}


def remove(repository, digest):
    repository.storage._fs.rm_file(repository.storage._full(repository.objects.path(digest)))


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


@pytest.mark.parametrize("num_objects", [1, 40])
def test_on_every_store_just_those_that_are_gone_are_missing(url, num_objects):  # noqa: F811
    repository = Repository.create(url)
    there = [repository.objects.put(b"%d" % number).digest for number in range(num_objects)]
    lost = {there[0], digest_of(b"never there")}
    remove(repository, there[0])
    assert find_missing(repository.objects, [*there, *lost]) == lost
    assert find_missing(repository.objects, there[1:]) == find_missing(repository.objects, []) == set()


def test_a_remote_store_is_asked_less_often_than_there_are_objects_however_many_others_it_has(monkeypatch):
    repository = Repository.create("memory://few-requests")
    there = [repository.objects.put(b"%d" % number).digest for number in range(2000)]
    asked, driver = [], type(repository.storage._fs)
    for name in ("ls", "info"):
        real = getattr(driver, name)
        monkeypatch.setattr(
            driver,
            name,
            lambda self, *words, real=real, **options: (asked.append(1), real(self, *words, **options))[1],
        )
    assert find_missing(repository.objects, there) == set()
    assert len(asked) <= 257
    asked.clear()
    assert find_missing(repository.objects, there[:100]) == set()
    assert len(asked) <= 101


@pytest.mark.parametrize("codec", ["none", "delta"])
def test_a_save_whose_object_vanished_is_an_error_and_no_version(url, monkeypatch, codec):  # noqa: F811
    repository = Repository.create(url)
    removing_before_commit(monkeypatch, repository, "datasvc.models.commit", max)
    with pytest.raises(NotFoundError, match=r"'cnn' is not committed: object .* is not there any more"):
        save(repository, "cnn", weights(), step=1, codec=codec)
    assert repository.names("models") == []


def test_a_sharded_save_whose_object_vanished_is_an_error_and_no_version(repository, monkeypatch):
    removing_before_commit(monkeypatch, repository, "datasvc.models.commit", max)
    whole = torch.arange(400_000.0).view(4, -1)
    with pytest.raises(NotFoundError, match="is not committed"):
        save_as_ranks(repository.url, [{"w": rows(whole, rank, 2)} for rank in range(2)])
    assert repository.names("models") == []


def test_a_run_whose_version_before_lost_an_object_saves_in_full_after_one_failure(monkeypatch):
    """A remote version before is not looked at while its pieces are named again, only at the commit."""
    repository = Repository.create("memory://lost-base")
    with Model(repository, "cnn", failures="log") as model:
        model.save(weights(), step=1, wait=True)
        remove(repository, max(objects_of(repository), key=repository.objects.size))
        with pytest.raises(NotFoundError, match="is not committed"):
            model.save(weights(), step=2, wait=True)
        version = model.save(weights(), step=3, wait=True).result()
    assert torch.equal(restore(repository, version).state["w"], weights()["w"])


def test_an_ingest_a_delete_and_a_merge_whose_object_vanished_commit_nothing(repository, folder, monkeypatch):
    texts = [{"key": name, "text": name} for name in ("a", "b")]
    write_version(repository, "pets", {"train": [texts]})
    write_version(repository, "cars", {"train": [[{"key": "c", "text": "c"}]]})
    removing_before_commit(monkeypatch, repository, "datasvc.shards.versions", max)
    for change in (
        lambda: ingest(repository, str(folder), "photos"),
        lambda: delete(repository, "pets", keys=["a"]),
        lambda: merge(repository, ["pets", "cars"], "both"),
    ):
        with pytest.raises(NotFoundError, match=r"a version with the splits .*train.* is not committed"):
            change()
    assert repository.names("datasets") == ["cars", "pets"]
    assert repository.versions("datasets", "pets").head() == 1


def test_what_a_version_before_has_lost_does_not_keep_anybody_from_deleting_from_it(repository):
    samples = [[{"key": name, "text": name}] for name in ("a", "b")]
    write_version(repository, "pets", {"train": samples})
    remove(repository, open_dataset(repository, "pets")["train"].table.shard(0).digest)
    assert delete(repository, "pets", keys=["a"]).version.version == 2


def test_a_pushed_version_whose_object_vanished_at_the_target_is_not_committed_there(
    repository, tmp_path, monkeypatch
):
    save(repository, "cnn", weights(), step=1)
    target = Repository.create(str(tmp_path / "target"))
    removing_before_commit(monkeypatch, target, "datasvc.models.transfer.transfer", max)
    with pytest.raises(NotFoundError, match="cnn@1 is not committed"):
        transfer(repository, target, ["cnn"])
    assert target.names("models") == []
