"""The origin as a source: many ranges at once, bounded, tried again, and quiet once it has returned."""

import threading
from collections import Counter

import pytest

from datasvc.cache.sources.origin_source import OriginSource, RequestPool
from datasvc.cache.sources.range_requests import PART_BYTES
from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError
from datasvc.repository import ObjectInfo, Objects, Storage
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.obstore_loop import CancellationToken
from datasvc.testing import FaultyStore
from tests.cache.sources import object_source_laws
from tests.cache.sources.object_source_laws import ObjectSourceLaws
from tests.cluster.store import FileStore
from tests.support.gate import Gate
from tests.support.threads import in_thread

CONTENT = bytes(range(251)) * (10 * PART_BYTES // 251)
INFO = ObjectInfo(digest_of(CONTENT), len(CONTENT))


class MemoryOrigin:
    """`before(offset, attempt)` is called before each read answers; what it returns replaces the answer."""

    can_stream = False

    def __init__(self, content=CONTENT, before=None):
        self._content = content
        self._before = before
        self._lock = threading.Lock()
        self.ranges = []

    def read_range(self, _digest, offset, length):
        with self._lock:
            self.ranges.append((offset, length))
            attempt = sum(offset == other for other, _ in self.ranges)
        answer = self._before(offset, attempt) if self._before else None
        return self._content[offset : offset + length] if answer is None else answer

    def location(self, digest):
        return f"memory://{digest[:8]}"


class Written:
    def __init__(self):
        self.content = bytearray(len(CONTENT))
        self.counts = Counter()
        self._lock = threading.Lock()

    def __call__(self, offset, view):
        with self._lock:
            self.content[offset : offset + len(view)] = view
            self.counts.update(range(offset // PART_BYTES, -(-(offset + len(view)) // PART_BYTES)))


@pytest.fixture
def requests():
    pool = RequestPool(16)
    yield pool
    pool.close()


def source(origin, requests):
    return OriginSource(origin, INFO.digest, requests)


class TestOriginSource(ObjectSourceLaws):
    """An origin that gathers answers: a store in memory."""

    @pytest.fixture
    def objects(self):
        with FaultyStore() as store:
            objects = Objects(Storage(store.url))
            objects.put(object_source_laws.CONTENT)
            yield objects

    @pytest.fixture
    def open_source(self, objects, requests):
        return lambda info: OriginSource(objects, info.digest, requests)


class TestStreamedOriginSource(TestOriginSource):
    """An origin that streams: a web server."""

    @pytest.fixture
    def objects(self, tmp_path):
        Objects(Storage(str(tmp_path))).put(object_source_laws.CONTENT)
        with FileStore(tmp_path) as store:
            objects = Objects(Storage(store.url))
            assert objects.can_stream
            yield objects


def test_a_range_is_cut_at_parts(requests):
    origin = MemoryOrigin()
    start, length = PART_BYTES + 10, 3 * PART_BYTES
    source(origin, requests).stream(INFO, start, length, Written())
    assert all(offset == start or offset % PART_BYTES == 0 for offset, _ in origin.ranges)
    assert sum(length for _, length in origin.ranges) == length


def test_one_object_uses_all_requests_there_are_and_many_use_no_more():
    pool = RequestPool(4)
    info = ObjectInfo(INFO.digest, 8 * PART_BYTES)
    under_way, lock, four = set(), threading.Lock(), threading.Event()

    def before(offset, attempt):
        this = object()
        with lock:
            under_way.add(this)
            assert len(under_way) <= 4
            if len(under_way) == 4:
                assert not pool._slots.acquire(blocking=False)
                four.set()
        assert four.wait(30)
        with lock:
            under_way.remove(this)

    def stream():
        source(MemoryOrigin(before=before), pool).stream(info, 0, info.size_bytes, Written())

    stream()
    threads = [threading.Thread(target=stream) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()


def test_the_requests_are_shared_among_the_objects_that_are_on_their_way(requests):
    with requests.sharing(CancellationToken()):
        with requests.slot() as share:
            assert share == 16
        with requests.sharing(CancellationToken()), requests.sharing(CancellationToken()), requests.slot() as share:
            assert share == 5
        with requests.slot() as share:
            assert share == 16


@pytest.mark.parametrize("error", [NotFoundError, CorruptDataError, UnavailableError])
def test_what_an_origin_says_is_not_asked_again_here(requests, error):
    def before(offset, attempt):
        raise error("gone")

    origin = MemoryOrigin(before=before)
    with pytest.raises(error):
        source(origin, requests).stream(INFO, 0, PART_BYTES, Written())
    assert len(origin.ranges) == 1


def test_an_origin_that_gives_less_than_it_should_is_corrupt(requests):
    with pytest.raises(CorruptDataError, match="memory://"):
        source(MemoryOrigin(CONTENT[:-1]), requests).stream(INFO, 0, len(CONTENT), Written())


def test_a_request_that_ends_late_finds_the_sink_closed(requests):
    late, ended = threading.Event(), threading.Semaphore(0)

    def before(offset, attempt):
        if offset == 0:
            raise NotFoundError("gone")
        late.wait()

    class Origin(MemoryOrigin):
        def read_range(self, digest, offset, length):
            try:
                return super().read_range(digest, offset, length)
            finally:
                ended.release()

    written = Written()
    origin = Origin(before=before)
    with pytest.raises(NotFoundError):
        source(origin, requests).stream(INFO, 0, len(CONTENT), written)
    late.set()
    for _ in origin.ranges:
        ended.acquire()
    requests.close()
    for thread in requests._threads._threads:
        thread.join()
    assert not written.counts


def test_closing_the_pool_ends_who_waits(requests):
    gate, pool = Gate(), RequestPool(1)
    waiting = source(MemoryOrigin(before=gate.wait), pool)
    thread, raised = in_thread(lambda: waiting.stream(INFO, 0, len(CONTENT), Written()))
    gate.begun.wait()
    pool.close()
    gate.open()
    thread.join()
    assert isinstance(raised[0], UnavailableError)
    assert "closed" in str(raised[0])
    with pytest.raises(UnavailableError, match="closed"):
        source(MemoryOrigin(), pool).stream(INFO, 0, len(CONTENT), Written())
