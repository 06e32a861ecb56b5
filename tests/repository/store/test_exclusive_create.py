"""Which stores may be written: those whose driver creates a file in one step, only if nothing is there."""

import importlib
import pkgutil
import secrets
import threading
from contextlib import suppress

import fsspec
import pytest
import torch
from fsspec import AbstractFileSystem, implementations
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from datasvc.errors import ConfigError, ConflictError
from datasvc.models import CheckpointManager, restore, save
from datasvc.repository import Repository, Storage
from datasvc.repository.store import exclusive_create
from datasvc.repository.store.exclusive_create import creates_exclusively, inherits_exclusive_create
from tests.support.threads import waits_in


class LookThenWrite(MemoryFileSystem):
    """Keeps its files as memory does, and creates as fsspec's base class has it: it looks, then it writes."""

    protocol = "lookthenwrite"
    pipe_file = AbstractFileSystem.pipe_file
    has_looked = None

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("lookthenwrite://", "memory://"))

    def exists(self, path, **options):
        found = super().exists(path, **options)
        if self.has_looked is not None:
            with suppress(threading.BrokenBarrierError):
                self.has_looked.wait(timeout=10)
        return found


@pytest.fixture
def place():
    """The path of a repository with a version, whose store is written by one driver and reached by another."""
    fsspec.register_implementation("lookthenwrite", LookThenWrite, clobber=True)
    place = secrets.token_hex(8)
    save(Repository.create(f"memory://{place}"), "cnn", {"w": torch.ones(3)}, step=1)
    return place


def installed_drivers():
    """Every driver that fsspec comes with and that can be imported here, and s3fs."""
    for module in pkgutil.iter_modules(implementations.__path__):
        with suppress(ImportError):
            if module.name == "http_sync":  # for browsers; its import replaces the driver of all others
                continue
            importlib.import_module(f"fsspec.implementations.{module.name}")
    importlib.import_module("fsspec.generic")
    importlib.import_module("s3fs")

    def below(kind):
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    packages = ("fsspec", "s3fs")
    return sorted({kind for kind in below(AbstractFileSystem) if kind.__module__.split(".")[0] in packages}, key=repr)


def test_two_writers_on_a_driver_that_looks_and_then_writes_both_succeed():
    """Why such drivers are refused."""
    driver, path = LookThenWrite(), f"/{secrets.token_hex(8)}"
    driver.has_looked = threading.Barrier(2)
    done = []

    def create(number):
        driver.pipe_file(path, b"%d" % number, mode="create")
        done.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(done) == [0, 1]


def test_of_all_drivers_that_fsspec_comes_with_memory_alone_may_be_written_and_s3():
    kinds = installed_drivers()
    assert len(kinds) >= 20
    accepted = {kind.__name__ for kind in kinds if inherits_exclusive_create(kind)}
    assert accepted == {"MemoryFileSystem", "S3FileSystem"}


def test_what_inherits_from_a_driver_that_may_be_written_may_too_unless_it_writes_by_itself():
    class Same(MemoryFileSystem):
        pass

    class Own(MemoryFileSystem):
        def pipe_file(self, path, value, mode="overwrite", **_options):
            if mode == "create" and self.exists(path):
                raise FileExistsError(path)
            super().pipe_file(path, value)

    assert creates_exclusively(Same())
    assert not creates_exclusively(Own())


def test_a_folder_of_a_store_may_be_written_if_the_store_may():
    assert creates_exclusively(DirFileSystem("/x", fs=MemoryFileSystem()))
    assert not creates_exclusively(DirFileSystem("/x", fs=LookThenWrite()))
    assert not creates_exclusively(DirFileSystem("/x", fs=LocalFileSystem())), "by fsspec's own pipe_file"


@pytest.mark.parametrize("url", ["simplecache::memory://{}", "filecache::memory://{}", "dir::file://{}/x"])
def test_a_chain_of_drivers_is_refused_unless_each_hands_the_condition_on(url, tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        Repository.create(url.format(tmp_path))


def test_a_repository_on_such_a_store_cannot_be_made_and_the_error_lists_what_can(place):
    with pytest.raises(ConfigError, match=r"LookThenWrite.*s3://.*gs://.*abfs://"):
        Repository.create(f"lookthenwrite://{place}-new")
    assert MemoryFileSystem().find(f"/{place}-new") == []


def test_a_repository_on_such_a_store_is_read_and_nothing_of_a_write_is_stored(place):
    repository = Repository.open(f"lookthenwrite://{place}")
    before = MemoryFileSystem().find(f"/{place}")
    assert torch.equal(restore(repository, "cnn").state["w"], torch.ones(3))
    for write in (
        lambda: save(repository, "cnn", {"w": torch.zeros(70_000)}, step=2),
        lambda: CheckpointManager(repository, "cnn"),
        lambda: repository.tag("models", "cnn@1", "prod"),
        lambda: repository.objects.put(b"new"),
        repository.objects.begin,
        lambda: repository.journal("work", "1").begin(),
    ):
        with pytest.raises(ConfigError, match=r"cannot be written.*Reading it is possible"):
            write()
    assert MemoryFileSystem().find(f"/{place}") == before


def test_an_export_to_such_a_store_needs_no_exclusive_create(place, tmp_path):
    storage = Storage(f"lookthenwrite://{place}-export")
    storage.put_bytes("a", b"x")
    (tmp_path / "b").write_bytes(b"y")
    storage.adopt("b", tmp_path / "b")
    assert storage.list("") == ["a", "b"]


def test_of_threads_that_create_in_memory_one_wins_though_its_driver_looks_before_it_writes(monkeypatch):
    storage, winners = Storage(f"memory://{secrets.token_hex(8)}"), []

    def create(content):
        with suppress(ConflictError):
            storage.create("log/1", content)
            winners.append(content)

    other = threading.Thread(target=create, args=(b"other",))

    def exists(self, path, **options):
        monkeypatch.undo()
        found = self.exists(path, **options)
        other.start()
        waits_in(other, exclusive_create.create)  # or ends, if nothing keeps it from creating meanwhile
        return found

    monkeypatch.setattr(MemoryFileSystem, "exists", exists)
    create(b"first")
    other.join()
    assert winners == [storage.read("log/1")]
