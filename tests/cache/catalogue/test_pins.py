"""What is pinned stays: over evictions, restarts, reboots and damage, until it is unpinned."""

import signal
import threading

import pytest

from datasvc.cache import Cache
from datasvc.cache.catalogue import recovery
from datasvc.cache.catalogue.configuration import Pin, read_pins, remove_pin, write_pin
from datasvc.cache.catalogue.tables import CatalogueTables
from datasvc.errors import CacheFullError, CorruptDataError, NotFoundError
from datasvc.shards import ingest, open_dataset
from tests.cache.processes import run_python
from tests.support.gate import Gate


@pytest.fixture
def splits(repository, folder):
    ingest(repository, str(folder), "pets", shard_bytes=4000)
    return open_dataset(repository, "pets")


@pytest.fixture
def pinned(tmp_path, splits):
    """A cache of 20 blocks where the split `val` is pinned."""
    with Cache(tmp_path / "cache", budget=20 * 4096) as cache:
        cache.pin("pets@1", [splits["val"]])
        yield cache


def flood(cache, repository):
    """Fetch more than the cache has room for."""
    for number in range(25):
        info = repository.objects.put(b"%04d" % number * 1024)
        cache.acquire(info, repository)
        cache.release(info.digest)


def take_all(cache, repository):
    """Hold as much as the cache has room for, were nothing else there."""
    for number in range(20):
        cache.acquire(repository.objects.put(b"%04d" % number * 1024), repository)


def is_all_there(cache, split):
    return all((cache.folder / "objects" / each.digest[:2] / each.digest).exists() for each in split.table.shards())


def test_what_is_pinned_is_not_evicted(pinned, splits, repository):
    flood(pinned, repository)
    assert is_all_there(pinned, splits["val"])
    status = pinned.status()
    assert status.pins["pets@1"] == status.pinned_bytes > 0
    assert status.resident_bytes <= status.budget_bytes


def test_what_is_unpinned_is_evicted_again(pinned, splits, repository):
    with pytest.raises(CacheFullError):
        take_all(pinned, repository)
    assert pinned.unpin("pets@1").name == "pets@1"
    take_all(pinned, repository)
    assert (pinned.status().pins, pinned.status().pinned_bytes) == ({}, 0)


def test_two_pins_of_one_object_keep_it_until_both_are_gone(pinned, splits, repository):
    pinned.pin("again", [splits["val"]])
    pinned.unpin("pets@1")
    flood(pinned, repository)
    assert is_all_there(pinned, splits["val"])


@pytest.mark.parametrize("what", ["restart", "damage", "reboot"])
def test_a_pin_outlives(pinned, splits, repository, monkeypatch, what):
    pinned.close()
    if what == "damage":
        (pinned.folder / "catalogue" / "data.mdb").write_bytes(b"x" * 20_000)
    if what == "reboot":
        monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    with Cache(pinned.folder) as cache:
        flood(cache, repository)
        assert is_all_there(cache, splits["val"])
        cache.unpin("pets@1")
        take_all(cache, repository)


def test_what_a_dead_job_left_can_be_evicted_once_it_is_unpinned(tmp_path, splits, repository):
    """The job is long forgotten by then."""
    code = "import os, signal, sys; from datasvc.cache import Cache\n"
    code += "from datasvc.repository import Repository; from datasvc.shards import open_dataset\n"
    code += "cache = Cache(sys.argv[1], budget=20 * 4096)\n"
    code += "cache.pin('pets@1', [open_dataset(Repository.open(sys.argv[2]), 'pets')['val']])\n"
    code += "os.kill(os.getpid(), signal.SIGKILL)"
    assert run_python(code, tmp_path / "cache", repository.url) == -signal.SIGKILL
    with Cache(tmp_path / "cache") as cache:
        flood(cache, repository)
        assert is_all_there(cache, splits["val"])
        cache.unpin("pets@1")
        take_all(cache, repository)


def test_a_pin_that_does_not_fit_leaves_everything_as_it_was(tmp_path, splits):
    with Cache(tmp_path / "cache", budget=4096 * 3) as cache:
        with pytest.raises(CacheFullError):
            cache.pin("pets", list(splits.values()))
        assert (cache.status().pins, cache._opened.catalogue.read(CatalogueTables.pinned)) == ({}, set())
        assert read_pins(cache.folder / "pins") == {}


def test_pinning_something_else_under_a_name_replaces_it(pinned, splits):
    pinned.pin("pets@1", [splits["train"]])
    assert pinned._opened.catalogue.read(CatalogueTables.pinned) == {
        info.digest for info in splits["train"].table.shards()
    }
    assert set(read_pins(pinned.folder / "pins")["pets@1"].objects) == pinned._opened.catalogue.read(
        CatalogueTables.pinned
    )


@pytest.mark.parametrize("moment", ["stage", "pin"])
@pytest.mark.parametrize("before", [False, True])
def test_a_pin_cut_off_by_a_kill_can_be_undone(tmp_path, splits, repository, moment, before):
    code = "import os, signal, sys; from datasvc.cache import Cache\n"
    code += "from datasvc.repository import Repository; from datasvc.shards import open_dataset\n"
    code += "cache = Cache(sys.argv[1], budget=20 * 4096)\n"
    code += "found = open_dataset(Repository.open(sys.argv[2]), 'pets')\n"
    code += "if sys.argv[4] == 'True': cache.pin('pets', [found['train']])\n"
    code += "target = cache if sys.argv[3] == 'stage' else cache._opened.catalogue\n"
    code += "setattr(target, sys.argv[3], lambda *_: os.kill(os.getpid(), signal.SIGKILL))\n"
    code += "cache.pin('pets', [found['val']])"
    assert run_python(code, tmp_path / "cache", repository.url, moment, before) == -signal.SIGKILL
    with Cache(tmp_path / "cache") as cache:
        cache.unpin("pets")
        assert cache._opened.catalogue.read(CatalogueTables.pinned) == set()


def test_unpinning_what_is_not_pinned_says_what_is(pinned):
    with pytest.raises(NotFoundError, match="nothing is pinned as 'dogs'; existing pins: pets@1"):
        pinned.unpin("dogs")


def test_a_pin_survives_its_file_and_any_name_is_a_file(tmp_path):
    pins = {name: Pin(name, {"ab" * 32: 7}) for name in ("pets@3", "../../etc", "a/b", "with space", ".hidden")}
    for pin in pins.values():
        write_pin(tmp_path, pin)
    assert read_pins(tmp_path) == pins
    assert len(list(tmp_path.iterdir())) == len(pins)
    for name in pins:
        remove_pin(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"name": 1}',
        b'{"name": "x", "objects": {"ab": "x"}}',
        b"\xff",
        b'{"name": "x", "objects": {"../../x": 1}}',
    ],
)
def test_a_damaged_pin_says_what_to_do(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CorruptDataError, match="remove the file and pin again"):
        read_pins(tmp_path)


def test_a_pin_waits_for_another_of_its_name_and_is_not_undone_with_it(tmp_path, splits, monkeypatch):
    """Else the one that fails would let go of what the other, done meanwhile, was told is kept."""
    with Cache(tmp_path / "cache", budget="1MB") as cache:
        gate, real, done = Gate(), cache.stage, []
        gate.error = CacheFullError("no room")

        def stage(wanted, progress):
            if not gate.begun.is_set():
                gate.wait()
            return real(wanted, progress)

        monkeypatch.setattr(cache, "stage", stage)

        def fail():
            with pytest.raises(CacheFullError):
                cache.pin("x", [splits["train"]])

        first = threading.Thread(target=fail)
        first.start()
        gate.begun.wait()
        second = threading.Thread(target=lambda: done.append(cache.pin("x", [splits["train"]])))
        third = threading.Thread(target=lambda: cache.pin("other", [splits["train"]]))
        second.start(), third.start()
        third.join()  # of another name: it does not wait
        gate.open()
        first.join(), second.join()
        assert done
        digests = {info.digest for info in splits["train"].table.shards()}
        assert set(read_pins(cache.folder / "pins")) == {"x", "other"}
        cache.unpin("other")
        assert cache._opened.catalogue.read(CatalogueTables.pinned) == digests
