"""Files staged from a bucket: all of them with one client, and with credentials that are asked for once."""

import json
import os
import secrets
import sys

import pytest

from datasvc.cache import Cache
from datasvc.cache.staged_files import stage_files
from datasvc.repository import Storage


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


def test_credentials_are_asked_for_once_for_all_files(s3_bucket, log, tmp_path, monkeypatch):
    root = f"{s3_bucket}/{secrets.token_hex(8)}"
    storage, contents = Storage(root), {f"{number}.bin": secrets.token_bytes(5000) for number in range(12)}
    assert storage.client == "obstore"
    for name, content in contents.items():
        storage.put_bytes(name, content)
    with Cache(tmp_path / "cache", budget="64MB") as cache:
        for names in ([*contents][:3], [*contents]):
            monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", str(len(names)))  # packages set such at their import
            staged = stage_files(cache, [f"{root}/{name}" for name in names])
            assert [file.path.read_bytes() for file in staged] == [contents[name] for name in names]
    assert log.read_text() == "asked\n"


def test_other_settings_are_other_credentials(s3_bucket, log):
    for name in ("first", "second"):
        assert Storage(f"{s3_bucket}/{name}").client == "obstore"
    assert log.read_text() == "asked\n"
    config = log.parent / "config"
    config.write_text(f"{config.read_text()}\n# changed\n")
    Storage(f"{s3_bucket}/third")
    assert log.read_text() == "asked\nasked\n"
