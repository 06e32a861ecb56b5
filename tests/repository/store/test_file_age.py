"""What is old may be removed, what a writer is about to name never: one behaviour on every kind of store."""

import fcntl
import os
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from datasvc.errors import ConfigError
from datasvc.repository import Repository, Storage
from datasvc.repository.store.file_age import REWRITE_S, delete_local_if_older, modified_s, refresh_local
from tests.repository.store.store_laws import make_memory_file_old

HOUR = 3600


def test_a_local_file_that_a_writer_makes_young_now_is_not_deleted(tmp_path):
    path = tmp_path / "object"
    path.write_bytes(b"x")
    os.utime(path, (0, 0))
    with path.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_SH)
        assert not delete_local_if_older(path, time.time())
    assert path.exists()
    assert delete_local_if_older(path, time.time())


def test_a_writer_whose_file_was_removed_while_it_waited_writes_it_again(tmp_path, monkeypatch):
    path = tmp_path / "object"
    path.write_bytes(b"x")
    real = fcntl.flock

    def removed_meanwhile(file, operation):
        path.unlink()
        real(file, operation)

    monkeypatch.setattr("datasvc.repository.store.file_age.fcntl.flock", removed_meanwhile)
    assert not refresh_local(path, 1)


def test_a_file_that_was_replaced_since_it_was_opened_is_not_deleted(tmp_path, monkeypatch):
    path = tmp_path / "object"
    path.write_bytes(b"old")
    os.utime(path, (0, 0))
    real = fcntl.flock

    def replaced_meanwhile(file, operation):
        (tmp_path / "new").write_bytes(b"new")
        os.utime(tmp_path / "new", (0, 0))
        (tmp_path / "new").rename(path)
        real(file, operation)

    monkeypatch.setattr("datasvc.repository.store.file_age.fcntl.flock", replaced_meanwhile)
    assert not delete_local_if_older(path, time.time())
    assert path.read_bytes() == b"new"


def test_a_file_that_is_locked_is_not_waited_for_and_the_caller_writes_it_again(tmp_path):
    path = tmp_path / "object"
    path.write_bytes(b"x")
    with path.open("rb") as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        assert not refresh_local(path, 1)
    assert refresh_local(path, 1)


def test_an_object_that_a_stranger_has_locked_is_saved_again(tmp_path):
    objects = Repository.create(str(tmp_path / "repository")).objects
    info = objects.put(b"content")
    path = objects.local_path(info.digest)
    with path.open("rb") as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        inode = path.stat().st_ino
        assert objects.put(b"content") == info
        assert path.stat().st_ino != inode
    assert objects.read(info.digest) == b"content"


def test_a_file_that_is_written_again_while_it_is_deleted_stays(tmp_path, monkeypatch):
    path = tmp_path / "object"
    path.write_bytes(b"old")
    os.utime(path, (0, 0))
    real = Path.rename

    def replaced_before(file, target):
        monkeypatch.setattr(Path, "rename", real)
        (tmp_path / "new").write_bytes(b"new")
        (tmp_path / "new").rename(path)
        return real(file, target)

    monkeypatch.setattr(Path, "rename", replaced_before)
    assert not delete_local_if_older(path, time.time())
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"mtime": 5.5}, 5.5),
        ({"mtime": 0.0}, 0.0),
        ({"LastModified": datetime(1970, 1, 1, 0, 0, 7, tzinfo=UTC)}, 7.0),
        ({"updated": "1970-01-01T00:00:09Z"}, 9.0),
        ({"LastModified": "", "created": 3.0}, 3.0),
    ],
)
def test_the_age_is_read_from_the_field_that_a_store_has(info, expected):
    assert modified_s(info, "x") == expected


def test_a_store_without_modification_times_is_refused():
    with pytest.raises(ConfigError, match="reports no modification time of s3://b/x"):
        modified_s({"size": 3}, "s3://b/x")


@pytest.mark.parametrize("ahead_s", [-3 * REWRITE_S, 3 * REWRITE_S])
def test_the_age_of_a_remote_object_is_measured_by_the_clock_of_the_store(monkeypatch, ahead_s):
    storage = Storage(f"memory://{secrets.token_hex(8)}")
    for path, age_s in (("young", HOUR), ("old", REWRITE_S + HOUR)):
        storage.put_bytes(path, b"123")
        make_memory_file_old(storage, path, age_s)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    assert storage.refresh("young", 3)
    assert not storage.refresh("old", 3)


@pytest.mark.parametrize("own_moves_s", [2 * HOUR, 3 * REWRITE_S, -3 * REWRITE_S])
def test_the_clock_of_a_remote_store_is_read_again_after_an_hour_or_a_jump(monkeypatch, own_moves_s):
    storage = Storage(f"memory://{secrets.token_hex(8)}")
    storage.put_bytes("file", b"123")
    assert storage.refresh("file", 3)
    # The clock of the store was corrected: all its files are older by it.
    make_memory_file_old(storage, "file", REWRITE_S + HOUR)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + own_moves_s)
    reads = []
    now_s = Storage.now_s
    monkeypatch.setattr(Storage, "now_s", lambda self: reads.append(1) or now_s(self))
    assert not storage.refresh("file", 3)
    assert not storage.refresh("file", 3)
    assert len(reads) == 1
