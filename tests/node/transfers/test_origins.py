"""The repositories of a node: which it reads, and how fast."""

import pickle
import secrets
import threading

import pytest

from datasvc.errors import NotFoundError, UnavailableError
from datasvc.node.transfers.origins import Origins, RateLimitedStorage, TokenBucket
from datasvc.repository import Repository
from datasvc.repository.store.obstore_loop import CancellationToken


@pytest.fixture
def urls(tmp_path):
    return [Repository.create(str(tmp_path / name)).url for name in ("a", "b")]


def test_a_repository_is_found_by_any_spelling_of_its_url(urls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    origins = Origins(["a", *urls[1:]])
    assert origins.find("a").url == origins.find(urls[0]).url == origins.find(f"{urls[0]}/").url == urls[0]


def test_credentials_in_a_url_do_not_make_another_repository():
    name = secrets.token_hex(8)
    Repository.create(f"memory://key:hidden@{name}/repo")
    origins = Origins([f"memory://key:hidden@{name}/repo"])
    assert origins.find(f"memory://{name}/repo") is origins.find(f"memory://other:one@{name}/repo/")
    assert "hidden" not in str(origins.urls())
    with pytest.raises(NotFoundError) as raised:
        origins.find("s3://key:hidden@bucket/x")
    assert "hidden" not in str(raised.value)


def test_a_repository_that_the_node_was_not_started_with_is_refused(urls):
    origins = Origins(urls[:1])
    for url in (urls[1], "", "/", f"{urls[0]}/..", "http://169.254.169.254/"):
        with pytest.raises(NotFoundError, match="--repo"):
            origins.find(url)


def test_the_only_repository_needs_no_name(urls):
    assert Origins(urls[:1]).find(None).url == urls[0]
    with pytest.raises(NotFoundError, match="the request names no repository"):
        Origins(urls).find(None)


def test_what_is_read_waits_for_its_turn_in_one_bucket(urls):
    bucket = TokenBucket(1000, clock=lambda: 0.0)
    objects = Repository.open(urls[0]).objects
    info = objects.put(bytes(90))
    closing = threading.Event()
    storage = RateLimitedStorage(urls[0], bucket, closing)
    assert storage.read_range(objects.path(info.digest), 0, 90) == bytes(90)
    assert bucket.reserve(0) == 0
    storage.read(objects.path(info.digest))
    assert bucket.reserve(0) == pytest.approx(0.08)


def test_what_streams_waits_for_its_turn_piece_by_piece(urls):
    bucket = TokenBucket(1000, clock=lambda: 0.0)
    objects = Repository.open(urls[0]).objects
    info, pieces = objects.put(bytes(90)), bytearray()
    closing = threading.Event()
    storage = RateLimitedStorage(urls[0], bucket, closing)
    storage.stream_range(objects.path(info.digest), 0, 90, pieces.extend, CancellationToken())
    assert pieces == bytes(90)
    assert bucket.reserve(0) == 0
    closing.set()
    with pytest.raises(UnavailableError, match="stopping"):
        storage.stream_range(objects.path(info.digest), 0, 90, pieces.extend, CancellationToken())
    assert pieces == bytes(90)


def test_a_read_that_waits_gives_up_when_the_node_stops(urls):
    bucket = TokenBucket(1, clock=lambda: 0.0)
    bucket.reserve(10**9)
    closing = threading.Event()
    storage = RateLimitedStorage(urls[0], bucket, closing)
    closing.set()
    with pytest.raises(UnavailableError, match="stopping"):
        storage.read_range("datasvc.json", 0, 1)


def test_a_capped_storage_stays_in_its_process(urls):
    storage = RateLimitedStorage(urls[0], TokenBucket(1), threading.Event())
    with pytest.raises(TypeError, match="URL"):
        pickle.dumps(storage)
