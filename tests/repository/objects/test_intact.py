"""An object that rotted at the same size is not named again by those who have the right bytes in hand."""

import errno
import logging
import os
import subprocess
from pathlib import Path

import pytest
import torch

from datasvc.errors import ConfigError, UnavailableError
from datasvc.models import restore, save
from datasvc.repository import ObjectInfo, Repository
from datasvc.repository.objects import objects
from datasvc.repository.objects.intact import QUARANTINE
from datasvc.repository.objects.objects import digest_of
from datasvc.shards import ingest
from datasvc.shards.versions.verify import verify
from tests.support import warm_python

ROOT = Path(__file__).parents[3]
CONTENT = b"the right bytes" * 100


def rot(path, *, age_s=7200):
    """Flip a byte of a file in place, as a disk does; and let it be older than this process."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, (before.st_atime - age_s, before.st_mtime - age_s))


def put(repository):
    return repository.objects.put(CONTENT)


def write(repository):
    with repository.objects.writing() as sink:
        sink.write(CONTENT)
    return sink.info


@pytest.mark.parametrize("store", [put, write])
def test_a_rotted_object_is_replaced_and_kept_aside_with_a_warning(repository, store, caplog):
    info = store(repository)
    path = repository.objects.local_path(info.digest)
    rot(path)
    bad = path.read_bytes()
    with caplog.at_level(logging.WARNING), path.open("rb") as reader:
        assert store(repository) == info
        assert reader.read() == bad, "whoever has the file open keeps what it has"
    assert repository.objects.read(info.digest) == CONTENT
    (kept,) = Path(repository.url, QUARANTINE).iterdir()
    assert kept.read_bytes() == bad
    assert f"{path} does not match its digest, although its size is right" in caplog.text
    assert str(kept) in caplog.text


def test_a_rotted_object_is_replaced_though_its_bytes_cannot_be_kept(repository, caplog):
    info = put(repository)
    rot(repository.objects.local_path(info.digest))
    Path(repository.url, QUARANTINE).write_text("no folder")
    put(repository)
    assert repository.objects.read(info.digest) == CONTENT
    assert "the bad bytes are not kept" in caplog.text


@pytest.fixture
def unreadable(monkeypatch):
    """Lets the file that a path names now fail to be read, as by a failing sector; one put there later does not."""
    real = objects.digest_of_file

    def make(path, error):
        bad = path.stat().st_ino

        def read(path):
            if path.stat().st_ino == bad:
                raise OSError(error, os.strerror(error), str(path))
            return real(path)

        monkeypatch.setattr(objects, "digest_of_file", read)
        age = path.stat().st_mtime - 7200
        os.utime(path, (age, age))

    return make


@pytest.mark.parametrize("store", [put, write])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENODATA, errno.EUCLEAN])
def test_an_object_that_the_disk_cannot_read_is_replaced_and_kept_aside_with_a_warning(
    repository, store, error, unreadable, caplog
):
    info = store(repository)
    path = repository.objects.local_path(info.digest)
    bad = path.stat().st_ino
    unreadable(path, error)
    with caplog.at_level(logging.WARNING):
        assert store(repository) == store(repository) == info
    assert repository.objects.read(info.digest) == CONTENT
    (kept,) = Path(repository.url, QUARANTINE).iterdir()
    assert kept.stat().st_ino == bad != path.stat().st_ino
    (message,) = caplog.messages
    assert f"{path} cannot be read ([Errno {error}] {os.strerror(error)}" in message
    assert str(kept) in message


@pytest.mark.parametrize("store", [put, write])
@pytest.mark.parametrize(("error", "kind"), [(errno.EMFILE, UnavailableError), (errno.EACCES, ConfigError)])
def test_an_object_that_this_process_may_not_or_cannot_open_is_left_alone(repository, store, error, kind, unreadable):
    info = store(repository)
    path = repository.objects.local_path(info.digest)
    unreadable(path, error)
    with pytest.raises(kind, match=f"cannot read {path}"):
        store(repository)
    assert repository.objects.read(info.digest) == CONTENT
    assert not Path(repository.url, QUARANTINE).exists()


@pytest.mark.parametrize("codec", ["none", "planes", "delta"])
def test_a_save_of_the_same_tensors_makes_whole_what_rotted_in_the_version_before(repository, codec):
    torch.manual_seed(0)
    state = {"w": torch.randn(300_000) * 0.02, "small": torch.ones(50)}
    save(repository, "cnn", state, step=1, codec=codec)
    for file in list(repository.storage.walk("objects")):
        rot(Path(repository.url, file.path))
    save(repository, "cnn", state, step=2, codec=codec)
    assert torch.equal(restore(repository, "cnn@2").state["w"], state["w"])
    assert torch.equal(restore(repository, "cnn@2").state["small"], state["small"])


def test_an_ingest_of_the_same_images_makes_whole_what_rotted(repository, folder):
    ingest(repository, str(folder), "pets")
    for file in list(repository.storage.walk("objects")):
        rot(Path(repository.url, file.path))
    ingest(repository, str(folder), "pets-again")
    assert verify(repository, "pets-again", deep=True).problems == ()
    assert verify(repository, "pets", deep=True).problems == ()


@pytest.fixture
def hashed(monkeypatch):
    """The files that are read to be hashed."""
    found, real = [], objects.digest_of_file
    monkeypatch.setattr(objects, "digest_of_file", lambda path: found.append(path.name) or real(path))
    return found


def test_what_this_process_wrote_is_never_read_again(repository, hashed):
    state = {"w": torch.randn(300_000)}
    for step in range(3):
        save(repository, "cnn", state, step=step)
        put(repository), write(repository)
    assert hashed == []


def test_what_another_process_wrote_is_hashed_once_per_process(repository, hashed):
    code = "import sys; from datasvc.repository import Repository; Repository.open(sys.argv[1]).objects.put(b'other')"
    subprocess.run([warm_python.command(), "-c", code, repository.url], cwd=ROOT, check=True)
    for _ in range(3):
        info = Repository.open(repository.url).objects.put(b"other")
    assert hashed == [info.digest]


def test_a_remote_object_is_compared_by_its_size_and_not_downloaded(monkeypatch):
    remote = Repository.create("memory://believed").objects
    info = remote.put(CONTENT)
    monkeypatch.setattr(remote.storage, "read_range", None)
    monkeypatch.setattr(remote.storage, "read", None)
    assert remote.reuse(info)
    assert not remote.reuse(ObjectInfo(digest_of(b"x"), 1))


@pytest.mark.parametrize("store", [put, write])
def test_the_name_of_an_object_that_another_writer_renamed_a_moment_ago_is_synced(repository, store, monkeypatch):
    info = put(repository)
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), real(file)))
    assert store(repository) == info
    folder = repository.objects.local_path(info.digest).parent
    assert {str(folder), str(folder.parent)} <= set(synced)
