"""Requests of obstore to S3: over a slow link, and to a bucket of another region."""

import os
import secrets

import pytest

from datasvc.errors import ConfigError
from datasvc.repository import Storage
from datasvc.repository.store import object_store_files
from datasvc.repository.store.obstore_loop import CancellationToken
from tests.repository.regional_server import OTHER_REGION, RegionalServer

CONTENT = b"some content"


@pytest.fixture
def url(s3_bucket):
    return f"{s3_bucket}/{secrets.token_hex(8)}"


def storage_behind(server, url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    storage = Storage(url)
    assert storage.client == "obstore"
    return storage


@pytest.mark.slow
@pytest.mark.parametrize("size_bytes", [2 << 20, 9 << 20])
def test_an_upload_may_take_longer_than_a_server_may_be_silent(size_bytes, url, monkeypatch):
    plain, content = Storage(url), secrets.token_bytes(size_bytes)
    assert plain.size("file") is None
    monkeypatch.setattr(object_store_files, "_REQUEST_SILENCE_S", 1.0)
    with RegionalServer(os.environ["AWS_ENDPOINT_URL"], upload_s=1.5) as server:
        storage_behind(server, url, monkeypatch).put_bytes("file", content)
    assert plain.read("file") == content


REQUESTS = {
    "read": lambda storage: storage.read("file") == CONTENT,
    "range": lambda storage: storage.read_range("file", 1, 2) == CONTENT[1:3],
    "stream": lambda storage: streamed(storage, "file", 1, 5) == CONTENT[1:6],
    "size": lambda storage: storage.size("file") == len(CONTENT),
    "list": lambda storage: storage.list("") == ["file"],
    "find": lambda storage: storage.find("") == ["file"],
    "put": lambda storage: storage.put_bytes("new", CONTENT) or storage.read("new") == CONTENT,
    "create": lambda storage: storage.create("new", CONTENT) or storage.read("new") == CONTENT,
    "delete": lambda storage: storage.delete_folder("") or storage.size("file") is None,
    "remove": lambda storage: storage.remove_temporary("file") or storage.size("file") is None,
}


def streamed(storage, path, offset, length):
    pieces = bytearray()
    storage.stream_range(path, offset, length, pieces.extend, CancellationToken())
    return pieces


@pytest.mark.parametrize("request_name", REQUESTS)
def test_a_bucket_of_another_region_is_reached_there_whatever_is_requested_first(request_name, url, monkeypatch):
    Storage(url).put_bytes("file", CONTENT)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with RegionalServer(os.environ["AWS_ENDPOINT_URL"], "eu-west-1") as server:
        assert REQUESTS[request_name](storage_behind(server, url, monkeypatch))
        first, unsigned, *others = server.regions
        assert (first, unsigned, set(others)) == ("us-east-1", None, {"eu-west-1"})


@pytest.mark.parametrize("answer", [(301, b""), (400, OTHER_REGION)])
def test_other_answers_mean_another_region_too(answer, url, monkeypatch):
    Storage(url).put_bytes("file", CONTENT)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with RegionalServer(os.environ["AWS_ENDPOINT_URL"], "eu-west-1", answer=answer) as server:
        assert storage_behind(server, url, monkeypatch).read("file") == CONTENT


def test_the_error_of_a_server_that_does_not_name_the_region_has_advice(url, monkeypatch):
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with RegionalServer(os.environ["AWS_ENDPOINT_URL"], "") as server:
        storage = storage_behind(server, url, monkeypatch)
        for act in (lambda: storage.read("file"), lambda: streamed(storage, "file", 0, 1)):
            with pytest.raises(ConfigError, match=r"in another region than us-east-1.*set AWS_REGION"):
                act()
