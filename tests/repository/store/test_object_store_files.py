"""Requests of obstore to S3: over a slow link."""

import os
import secrets

import pytest

from datasvc.repository import Storage
from datasvc.repository.store import object_store_files
from tests.repository.regional_server import RegionalServer


@pytest.fixture
def url(s3_bucket):
    return f"{s3_bucket}/{secrets.token_hex(8)}"


def storage_behind(server, url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    storage = Storage(url)
    assert storage.client == "obstore"
    return storage


@pytest.mark.parametrize("size_bytes", [2 << 20, 9 << 20])
def test_an_upload_may_take_longer_than_a_server_may_be_silent(size_bytes, url, monkeypatch):
    plain, content = Storage(url), secrets.token_bytes(size_bytes)
    assert plain.size("file") is None
    monkeypatch.setattr(object_store_files, "_REQUEST_SILENCE_S", 0.3)
    with RegionalServer(os.environ["AWS_ENDPOINT_URL"], upload_s=0.6) as server:
        storage_behind(server, url, monkeypatch).put_bytes("file", content)
    assert plain.read("file") == content
