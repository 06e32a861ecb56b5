"""Files staged from a bucket: all of them with one client, and with credentials that are asked for once."""

import json
import os
import secrets
import sys

import pytest
import s3fs

from datasvc.cache import Cache
from datasvc.cache.staged_files import stage_files
from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository import Storage
from datasvc.threads import map_in_threads


@pytest.fixture
def log(s3_bucket, tmp_path, monkeypatch):
    """Move the keys of the environment to a program that a profile runs; return the file to which it adds a line."""
    log, program, config = tmp_path / "log", tmp_path / "program.py", tmp_path / "config"
    keys = {"AccessKeyId": os.environ["AWS_ACCESS_KEY_ID"], "SecretAccessKey": os.environ["AWS_SECRET_ACCESS_KEY"]}
    answer = json.dumps({"Version": 1, "Expiration": "2999-01-01T00:00:00Z", **keys})
    program.write_text(f"open({str(log)!r}, 'a').write('asked\\n')\nprint({answer!r})\n")
    config.write_text(f"[profile work]\nregion = us-east-1\ncredential_process = {sys.executable} {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    return log


@pytest.fixture
def files(s3_bucket):
    """Return the URL of a folder in the bucket, and the contents of its files by name."""
    root = f"{s3_bucket}/{secrets.token_hex(8)}"
    storage, contents = Storage(root), {f"{number}.bin": secrets.token_bytes(5000) for number in range(12)}
    for name, content in contents.items():
        storage.put_bytes(name, content)
    return root, contents


def test_credentials_are_asked_for_once_for_all_files(files, log, tmp_path, monkeypatch):
    root, contents = files
    s3fs.S3FileSystem.clear_instance_cache()  # a client that another test has opened would not ask again
    with Cache(tmp_path / "cache", budget="64MB") as cache:
        for names in ([*contents][:3], [*contents]):
            monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", str(len(names)))  # packages set such at their import
            staged = stage_files(cache, [f"{root}/{name}" for name in names])
            assert [file.path.read_bytes() for file in staged] == [contents[name] for name in names]
    assert log.read_text() == "asked\n"


def test_a_folder_is_refused_and_a_missing_file_is_named(files, s3_bucket, tmp_path):
    root, _ = files
    with Cache(tmp_path / "cache", budget="64MB") as cache:
        for folder in (root, s3_bucket, f"{s3_bucket}/"):
            with pytest.raises(ConfigError, match="is a folder or has no known size"):
                stage_files(cache, [folder])
        with pytest.raises(NotFoundError, match=r"99\.bin"):
            stage_files(cache, [f"{root}/99.bin"])


def test_other_settings_are_other_credentials(s3_bucket, log):
    urls = [f"{s3_bucket}/{number}" for number in range(8)]
    assert {storage.client for storage in map_in_threads(Storage, urls, len(urls))} == {"obstore"}
    assert log.read_text() == "asked\n"
    config = log.parent / "config"
    config.write_text(f"{config.read_text()}\n# changed\n")
    Storage(f"{s3_bucket}/third")
    assert log.read_text() == "asked\nasked\n"
