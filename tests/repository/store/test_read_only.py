"""A storage that refuses every write."""

import pickle

import pytest

from datasvc.errors import ConfigError
from datasvc.repository import Repository
from datasvc.repository.store.storage import ReadOnlyStorage, Storage

WRITES = {
    "create": ("new", b"x"),
    "create_temporary": (b"x",),
    "remove_temporary": ("kept",),
    "put_bytes": ("kept", b"x"),
    "refresh": ("kept", 4),
    "now_s": (),
    "delete_if_older": ("kept", 1e12),
    "delete_folder": ("",),
    "delete_if_empty": ("",),
}
READS = {
    "can_stream", "check_writable", "client", "find", "list", "local_path", "location", "old_folders", "read",
    "read_checked", "read_into", "read_range", "read_start", "size", "stream_range", "walk",
}  # fmt: skip


@pytest.mark.parametrize("method", WRITES)
def test_each_write_is_refused_and_changes_nothing(tmp_path, method):
    (tmp_path / "kept").write_bytes(b"here")
    storage = ReadOnlyStorage(str(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match="read-only"):
        getattr(storage, method)(*WRITES[method])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert storage.read("kept") == b"here"


def test_a_file_is_not_adopted(tmp_path):
    (tmp_path / "repo").mkdir()
    (tmp_path / "finished").write_bytes(b"x")
    with pytest.raises(ConfigError, match="read-only"):
        ReadOnlyStorage(str(tmp_path / "repo")).adopt("new", tmp_path / "finished")
    assert not (tmp_path / "repo" / "new").exists()


def test_a_new_method_of_a_storage_is_known_to_read_or_to_write():
    methods = {name for name in vars(Storage) if not name.startswith("_")}
    assert methods - READS == {*WRITES, "adopt"}


def test_it_is_read_only_in_another_process_too(tmp_path):
    copy = pickle.loads(pickle.dumps(ReadOnlyStorage(str(tmp_path))))
    with pytest.raises(ConfigError, match="read-only"):
        copy.put_bytes("new", b"x")


def test_a_repository_that_is_opened_read_only_is_read_and_not_written(tmp_path):
    Repository.create(str(tmp_path))
    repository = Repository.open(str(tmp_path), read_only=True)
    assert repository.names("datasets") == []
    with pytest.raises(ConfigError, match="without read_only=True"):
        repository.objects.put(b"x")
