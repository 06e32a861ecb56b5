"""Secrets of URLs are in no message, no traceback, no `repr`, and in no pickle."""

import os
import pickle
import subprocess
import sys
import traceback

import fsspec
import pytest
from fsspec.config import conf
from fsspec.implementations.memory import MemoryFileSystem

from datasvc.cache.sources.remote_file import RemoteFile
from datasvc.child_process import KEY_VARIABLE
from datasvc.errors import ConfigError, DatasvcError
from datasvc.repository import Repository, Storage
from datasvc.repository.store.ranges import RangeReader
from datasvc.repository.store.redaction import redact_text, redact_url
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.storage import resolve_url
from datasvc.shards import open_dataset
from tests.repository.faulty_server import FaultyServer
from tests.shards.written_versions import write_version

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"403, url='https://host/a?X-Amz-Signature={SECRET}&x=1'", "403, url='https://host/a'"),
        (f"URL(https://user:{SECRET}@host/a), and so on", "URL(https://host/a), and so on"),
        (f"GET /a?X-Amz-Signature={SECRET}&part=1 failed", "GET /a?X-Amz-Signature=...&part=1 failed"),
        (f"ftp://u:{SECRET}@[::1 is not valid", "[::1 is not valid"),
        ("no secret: s3://bucket/a, /folder/b", "no secret: s3://bucket/a, /folder/b"),
    ],
)
def test_secrets_in_a_message_are_removed(text, shown):
    assert redact_text(text) == shown


@pytest.mark.parametrize("status", [403, 404, 500])
@pytest.mark.parametrize("use", ["metadata", "content"])
def test_no_message_or_traceback_about_a_signed_url_has_its_query(status, use, monkeypatch):
    monkeypatch.setattr("datasvc.repository.store.retries.FIRST_PAUSE_S", 0.0)
    with FaultyServer(b"x" * 100, status) as server:
        url = f"{server.url}/a.bin?X-Amz-Signature={SECRET}"
        file_system, path = resolve_url(url)
        with pytest.raises(DatasvcError, match=r"a\.bin: ") as caught:
            RemoteFile(url) if use == "metadata" else RangeReader(file_system).read(
                path, 0, 10, location=redact_url(url)
            )
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    if use == "content":
        assert ("it does not exist" if status == 404 else str(status)) in str(caught.value)


class VaultFileSystem(MemoryFileSystem):
    """Files in memory, with a user and a password in the URL or in the configuration."""

    protocol = "vault"
    store, pseudo_dirs = {}, [""]

    def __init__(self, **options):
        super().__init__(**options)
        assert options["password"] == SECRET, options

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("vault://").rpartition("@")[2].strip("/")

    @staticmethod
    def _get_kwargs_from_urls(url):
        user, at, _ = url.removeprefix("vault://").rpartition("@")
        return dict(zip(("username", "password"), user.split(":"), strict=True)) if at else {}


@pytest.fixture
def vault(monkeypatch):
    fsspec.register_implementation("vault", VaultFileSystem, clobber=True)
    monkeypatch.setattr("datasvc.repository.store.exclusive_create.creates_exclusively", lambda _fs: True)
    VaultFileSystem.store.clear()
    yield f"vault://me:{SECRET}@host/repo"
    conf.pop("vault", None)


def test_a_pickle_has_no_password_and_opens_in_this_process_and_its_children(vault, monkeypatch):
    """fsspec/s3fs#35, fsspec/filesystem_spec#1625: credentials travel in the clear with a pickled file system."""
    storage = Storage(vault)
    storage._fs.pipe_file("/host/repo/a", b"content")
    content = pickle.dumps(storage)
    assert SECRET.encode() not in content
    assert SECRET not in repr(storage)
    assert pickle.loads(content).read("a") == b"content"
    assert pickle.loads(content).url == vault
    # Another process has another key; fsspec's configuration may give it the password.
    monkeypatch.setenv(KEY_VARIABLE, "00" * 32)
    conf["vault"] = {"username": "me", "password": SECRET}
    assert pickle.loads(content).url == "vault://host/repo"
    assert pickle.loads(content).read("a") == b"content"


def test_a_pickled_split_opens_in_another_process(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    write_version(repository, "pets", {"train": [[{"key": "a", "text": "b"}]]})
    (tmp_path / "split").write_bytes(pickle.dumps(open_dataset(repository, "pets")["train"]))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))[0]['text'])"
    command = [sys.executable, "-c", program, str(tmp_path / "split")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "b\n"


def test_access_denied_on_this_machine_names_the_folder_and_no_credentials(tmp_path):
    folder = tmp_path / "repo" / "objects"
    folder.mkdir(parents=True)
    for target in (folder / "a", folder / "gone" / "a"):
        with (
            pytest.raises(ConfigError, match=rf"access denied .*; check the permissions of {target.parent}$"),
            map_exceptions("write", str(target)),
        ):
            raise PermissionError(13, "Permission denied", str(target))
    with pytest.raises(ConfigError, match="check the credentials"), map_exceptions("write", "s3://bucket/a"):
        raise PermissionError("Access Denied")


@pytest.mark.skipif(os.geteuid() == 0, reason="root has access to every folder")
def test_the_folder_that_is_closed_is_named_and_not_one_below_it(tmp_path):
    repository = Repository.create(str(tmp_path / "closed" / "repo"))
    (tmp_path / "closed").chmod(0)
    try:
        with pytest.raises(ConfigError, match=rf"check the permissions of {tmp_path / 'closed'}$"):
            repository.storage.read("datasvc.json")
    finally:
        (tmp_path / "closed").chmod(0o700)
