"""An origin behind a web server, whose bytes are handed on as they arrive: all of it once, verified, or an error."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from datasvc.cache import Cache
from datasvc.cache.fetch.transfer import transfer
from datasvc.cache.sources.origin_source import GATHERED_PARTS, PART_BYTES, OriginSource, ReceivedParts, RequestPool
from datasvc.cache.sources.remote_file import RemoteFile
from datasvc.errors import CorruptDataError, DatasvcError, NotFoundError, UnavailableError
from datasvc.repository import ObjectInfo, Objects, Storage
from datasvc.repository.objects.objects import digest_of
from tests.cache.processes import disk_bytes
from tests.cluster.store import FileStore
from tests.progress import RecordedProgress
from tests.repository.faulty_server import FaultyServer
from tests.support.threads import in_thread

CONTENT = os.urandom(1 << 16) * (5 * PART_BYTES >> 16) + b"tail"
INFO = ObjectInfo(digest_of(CONTENT), len(CONTENT))


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr("datasvc.repository.store.retries.FIRST_PAUSE_S", 0.001)


@pytest.fixture
def cache(tmp_path):
    with Cache(tmp_path / "cache", budget=8 * PART_BYTES) as opened:
        yield opened


class Behind:
    """What `Cache` needs of a repository, behind a server that has the bytes of every object."""

    def __init__(self, server):
        self.url = server.url
        self.objects = Objects(Storage(server.url))


class Arriving:
    """A sink that says when the first bytes have come."""

    def __init__(self):
        self.begun = threading.Event()

    def __call__(self, _offset, _view):
        self.begun.set()


def test_an_object_comes_in_few_requests_each_byte_once(cache):
    with FaultyServer(CONTENT) as server:
        assert cache.acquire(INFO, Behind(server)).path.read_bytes() == CONTENT
        assert sum(stop - start for start, stop in server.ranges) == len(CONTENT)
        assert server.num_connections <= len(server.ranges) <= 6


def test_an_object_that_shares_the_requests_comes_in_one():
    pool = RequestPool(1)
    with FaultyServer(CONTENT) as server:
        OriginSource(Behind(server).objects, INFO.digest, pool).stream(INFO, 0, len(CONTENT), lambda *_: None)
        assert server.ranges == [(0, len(CONTENT))]
    pool.close()


@pytest.mark.parametrize("fault", ["hang up", "refuse", "short", "long", "shifted", "garbage", 503])
def test_a_fault_that_passes_is_not_seen(cache, fault):
    with FaultyServer(CONTENT, faults=[fault] * 3) as server:
        assert cache.acquire(INFO, Behind(server)).path.read_bytes() == CONTENT
    assert cache.status().num_corrupt == 0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("refuse", UnavailableError),
        ("shifted", UnavailableError),
        ("garbage", UnavailableError),
        (404, NotFoundError),
    ],
)
def test_a_fault_that_stays_is_an_error_and_leaves_nothing_reserved(cache, fault, error):
    with FaultyServer(CONTENT, fault) as server, pytest.raises(error, match="cannot fetch object"):
        cache.acquire(INFO, Behind(server))
    assert (cache.status().reserved_bytes, cache.status().held_bytes) == (0, 0)


def test_a_server_that_lies_is_found_out(cache):
    wrong = CONTENT[: PART_BYTES + 5] + bytes([CONTENT[PART_BYTES + 5] ^ 1]) + CONTENT[PART_BYTES + 6 :]
    with FaultyServer(wrong) as server, pytest.raises(CorruptDataError, match="sent bytes with the digest"):
        cache.acquire(INFO, Behind(server))
    assert cache.status().num_corrupt > 0
    assert disk_bytes(cache.folder) == 0


@pytest.mark.parametrize("fault", ["no length", "chunked", "gzip"])
def test_an_object_that_cannot_be_streamed_comes_by_the_stores_own_client(cache, fault):
    with FaultyServer(CONTENT, fault) as server:
        assert cache.acquire(INFO, Behind(server)).path.read_bytes() == CONTENT


def test_what_turns_out_not_to_stream_is_gathered_in_pieces():
    pool = RequestPool(1)
    with FaultyServer(CONTENT, "chunked") as server:
        OriginSource(Behind(server).objects, INFO.digest, pool).stream(INFO, 0, len(CONTENT), lambda *_: None)
        longest = GATHERED_PARTS * PART_BYTES
        pieces = [(0, longest), (longest, len(CONTENT))]
        assert server.ranges == [(0, len(CONTENT)), *pieces]
    pool.close()


@pytest.mark.parametrize("fault", ["stall", "silent"])
def test_closing_the_pool_ends_the_requests_under_way(fault):
    pool, sink = RequestPool(4), Arriving()
    with FaultyServer(CONTENT, fault) as server:
        source = OriginSource(Behind(server).objects, INFO.digest, pool)
        thread, errors = in_thread(lambda: source.stream(INFO, 0, len(CONTENT), sink))
        if fault == "stall":
            assert sink.begun.wait(30)
        pool.close()
        thread.join(30)
        for worker in pool._threads._threads:
            worker.join(30)
            assert not worker.is_alive()
    assert isinstance(errors[0], UnavailableError)
    assert "the cache was closed" in str(errors[0])


def test_a_sink_that_fails_ends_the_other_requests():
    pool = RequestPool(4)

    def full(offset, _view):
        if offset == 0:
            raise OSError(28, "No space left on device")

    with FaultyServer(CONTENT, "stall") as server:
        server.faults = [None]
        with pytest.raises(OSError, match="No space left"):
            OriginSource(Behind(server).objects, INFO.digest, pool).stream(INFO, 0, len(CONTENT), full)
        pool.close()
        for worker in pool._threads._threads:
            worker.join(30)
            assert not worker.is_alive()


def test_what_had_arrived_before_a_server_failed_is_not_asked_for_again(tmp_path):
    pool = RequestPool(1)

    def fetch(server):
        descriptor = os.open(tmp_path / "incoming", os.O_CREAT | os.O_RDWR)
        with ReceivedParts(tmp_path / "parts", len(CONTENT)) as parts, os.fdopen(descriptor):
            source = OriginSource(Behind(server).objects, INFO.digest, pool)
            return transfer(INFO, descriptor, parts, [source])

    with FaultyServer(CONTENT, "refuse", faults=["hang up"]) as server, pytest.raises(UnavailableError):
        fetch(server)
    with FaultyServer(CONTENT) as server:
        done = fetch(server)
        assert server.ranges == [(2 * PART_BYTES, len(CONTENT))]
    assert (done.num_corrupt, (tmp_path / "incoming").read_bytes()) == (0, CONTENT)
    pool.close()


def test_a_cache_that_is_closed_ends_what_is_on_its_way(tmp_path):
    with FaultyServer(CONTENT, "stall") as server:
        cache, begun = Cache(tmp_path / "cache", budget=8 * PART_BYTES), threading.Event()
        thread, errors = in_thread(
            lambda: cache.acquire(INFO, Behind(server), RecordedProgress(on_advance=begun.set))
        )
        assert begun.wait(30)
        cache.close()
        thread.join(30)
        assert not thread.is_alive()
    assert isinstance(errors[0], DatasvcError)


def test_a_file_behind_a_web_server_is_staged(tmp_path, cache):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.bin").write_bytes(CONTENT)
    with FileStore(tmp_path / "files") as store:
        file = RemoteFile(f"{store.url}/model.bin")
        assert file.can_stream
        assert cache.acquire(file.info, file).path.read_bytes() == CONTENT


ENDING = """
import sys, threading
import fsspec
from datasvc.cache.sources.origin_source import RequestPool
from datasvc.repository.store.ranges import HttpRanges
from datasvc.repository.store.obstore_loop import CancellationToken

pool, interrupt = RequestPool(), CancellationToken()

def read():
    with pool.sharing(interrupt):
        HttpRanges(fsspec.filesystem("http")).read(sys.argv[1], 0, 10, print, location="it", interrupt=interrupt)

pool.submit(read)
sys.stdin.readline()
"""


def test_a_program_that_ends_does_not_wait_for_a_silent_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/file"
        with subprocess.Popen([sys.executable, "-c", ENDING, url], stdin=subprocess.PIPE) as program:
            connection, _ = server.accept()
            assert connection.recv(4) == b"GET "
            program.stdin.close()
            assert program.wait(30) == 0
            connection.close()
