"""What is old may be removed, what a writer is about to name never: one behaviour on every kind of store."""

import fcntl
import os
import secrets
import time
from datetime import UTC, datetime

import pytest

from datasvc.errors import ConfigError
from datasvc.repository import ObjectInfo, Objects, Storage
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.file_age import REWRITE_S, delete_local_if_older, modified_s, refresh_local

HOUR = 3600


@pytest.fixture
def storage(url):
    return Storage(url)


def make_old(storage, path, age_s):
    """Set the time of a file's last change back; on S3, whose clock is its own, skip."""
    then = time.time() - age_s
    local = storage.local_path(path)
    if local is not None:
        os.utime(local, (then, then))
    elif storage.url.startswith("memory"):
        storage._fs.store[storage._full(path)].created = datetime.fromtimestamp(then, UTC)
    else:
        pytest.skip("nobody can set the clock of an S3 server")


def test_a_walk_finds_every_file_with_its_size_and_age_and_unfinished_ones_too(storage):
    for path in ("a", "b/c", "b/d/e", "b/.tmp-1"):
        storage.put_bytes(path, path.encode())
    found = {file.path: file for file in storage.walk("")}
    assert sorted(found) == ["a", "b/.tmp-1", "b/c", "b/d/e"]
    assert {file.path for file in storage.walk("b")} == {"b/.tmp-1", "b/c", "b/d/e"}
    assert list(storage.walk("missing")) == []
    assert found["b/d/e"].size_bytes == 5
    assert abs(found["a"].modified_s - time.time()) < HOUR


def test_a_walk_sees_what_another_client_wrote_since_the_last(storage):
    storage.put_bytes("a/1", b"x")
    assert len(list(storage.walk("a"))) == 1
    other = Storage(storage.url)
    other._fs = type(storage._fs)(skip_instance_cache=True)
    other.put_bytes("a/2", b"x")
    assert len(list(storage.walk("a"))) == 2


def test_only_what_is_older_is_deleted(storage):
    storage.put_bytes("a", b"x")
    assert not storage.delete_if_older("a", time.time() - HOUR)
    assert storage.read("a") == b"x"
    assert storage.delete_if_older("a", time.time() + HOUR)
    assert storage.size("a") is None
    assert not storage.delete_if_older("a", time.time() + HOUR)


def test_refreshing_tells_what_must_be_written_again(storage):
    storage.put_bytes("a", b"123")
    assert storage.refresh("a", 3)
    assert not storage.refresh("a", 4)
    assert not storage.refresh("missing", 3)


def test_an_old_object_that_a_writer_finds_is_young_afterwards(storage):
    objects = Objects(storage)
    info = objects.put(b"content")
    make_old(storage, objects.path(info.digest), REWRITE_S + HOUR)
    assert objects.put(b"content") == info
    assert not storage.delete_if_older(objects.path(info.digest), time.time() - HOUR)
    make_old(storage, objects.path(info.digest), REWRITE_S + HOUR)
    with objects.writing() as sink:
        sink.write(b"content")
    assert not storage.delete_if_older(objects.path(info.digest), time.time() - HOUR)
    assert objects.read(info.digest) == b"content"


def test_a_reusable_object_is_whole(storage):
    objects = Objects(storage)
    info = objects.put(b"content")
    assert objects.reuse(info)
    assert not objects.reuse(ObjectInfo(info.digest, info.size_bytes + 1))
    assert not objects.reuse(ObjectInfo(digest_of(b"missing"), 7))


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
def test_the_age_is_read_from_whatever_a_store_says(info, expected):
    assert modified_s(info, "x") == expected


def test_a_store_that_tells_no_age_is_refused():
    with pytest.raises(ConfigError, match="reports no modification time of s3://b/x"):
        modified_s({"size": 3}, "s3://b/x")


@pytest.mark.parametrize("ahead_s", [-3 * REWRITE_S, 3 * REWRITE_S])
def test_whether_a_remote_object_is_old_is_told_by_the_stores_clock_alone(monkeypatch, ahead_s):
    storage = Storage(f"memory://{secrets.token_hex(8)}")
    for path, age_s in (("young", HOUR), ("old", REWRITE_S + HOUR)):
        storage.put_bytes(path, b"123")
        make_old(storage, path, age_s)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    assert storage.refresh("young", 3)
    assert not storage.refresh("old", 3)


def test_the_time_of_a_store_is_that_of_a_file_which_is_gone_afterwards(storage):
    storage.put_bytes("a", b"x")
    assert abs(storage.now_s() - time.time()) < HOUR
    assert [file.path for file in storage.walk("")] == ["a"]
