"""The origin as a source: many ranges at once, bounded, tried again, and quiet once it has returned."""

import os
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.sources.origin_source import (
    GATHERED_PARTS,
    PART_BYTES,
    STREAMED_PARTS,
    OriginSource,
    RangeRequests,
    ReceivedParts,
    RequestPool,
)
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


def parts_of(spans, share):
    """The lengths in parts of all ranges that are left."""
    found = []
    while (span := spans.take(share)) is not None:
        assert not found or span[0] == found[-1][1]
        found.append(span)
    return [-(-(stop - start) // PART_BYTES) for start, stop in found]


def spans(num_bytes, most_parts=GATHERED_PARTS):
    return RangeRequests(0, num_bytes, most_parts)


def test_requests_are_long_where_objects_share_them_and_short_where_one_has_them_all():
    assert parts_of(spans(17 * PART_BYTES - 1), 16) == [1] * 17
    long = parts_of(spans(200 * PART_BYTES), 16)
    assert long == sorted(long, reverse=True)
    assert (long[0], long[-16:]) == (4, [1] * 16)
    assert parts_of(spans(16 * PART_BYTES), 1) == [4] * 4
    assert parts_of(spans(5 * PART_BYTES), 1) == [3, 2]
    assert parts_of(spans(1), 1) == [1]
    assert parts_of(RangeRequests(7, 7, GATHERED_PARTS), 1) == []


def test_a_stream_that_is_the_only_one_of_its_object_is_longer():
    assert parts_of(spans(16 * PART_BYTES, STREAMED_PARTS), 1) == [16]
    assert parts_of(spans(20 * PART_BYTES, STREAMED_PARTS), 1) == [10, 10]
    assert parts_of(spans(200 * PART_BYTES, STREAMED_PARTS), 16) == parts_of(spans(200 * PART_BYTES), 16)


@given(
    st.integers(0, 40 * PART_BYTES),
    st.integers(0, 40 * PART_BYTES),
    st.sampled_from([GATHERED_PARTS, STREAMED_PARTS]),
    st.lists(st.integers(1, 16), min_size=1),
)
def test_each_byte_of_a_range_is_requested_once_by_several_threads(start, length, most_parts, shares):
    spans, stop, found = RangeRequests(start, start + length, most_parts), start + length, []
    while (span := spans.take(shares[len(found) % len(shares)])) is not None:
        found.append(span)
    edges = [start, *(end for _, end in found)]
    assert [begin for begin, _ in found] == edges[:-1]
    assert edges[-1] == stop
    assert all(begin < end and (end % PART_BYTES == 0 or end == stop) for begin, end in found)
    assert all(end - begin <= most_parts * PART_BYTES for begin, end in found)


SIZE = 9 * PART_BYTES + 1


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.parts"


def test_what_was_noted_is_there_after_a_restart(path):
    with ReceivedParts(path, SIZE) as parts:
        assert (parts.num_parts, parts.arrived) == (10, frozenset())
        for number in (3, 0, 9):
            parts.add(number)
    with ReceivedParts(path, SIZE) as parts:
        assert parts.arrived == {0, 3, 9}
        parts.clear()
        parts.add(1)
    with ReceivedParts(path, SIZE) as parts:
        assert parts.arrived == {1}


def test_the_note_of_an_object_of_another_size_is_dropped(path):
    with ReceivedParts(path, SIZE) as parts:
        parts.add(0)
    with ReceivedParts(path, SIZE + 1) as parts:
        assert parts.arrived == frozenset()
    with ReceivedParts(path, SIZE) as parts:
        assert parts.arrived == frozenset()


@given(st.data())
def test_a_damaged_note_is_dropped_whole(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("parts") / "x.parts"
    with ReceivedParts(path, SIZE) as parts:
        for number in range(4):
            parts.add(number)
    content = bytearray(path.read_bytes())
    damage = data.draw(st.sampled_from(["flip", "cut", "zeros"]))
    if damage == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "cut":
        del content[-data.draw(st.integers(1, 7)) :]
    else:
        content += bytes(data.draw(st.integers(1, 40)))
    path.write_bytes(content)
    with ReceivedParts(path, SIZE) as parts:
        assert parts.arrived == frozenset()
        parts.add(5)
    with ReceivedParts(path, SIZE) as parts:
        assert parts.arrived == {5}


def test_an_object_without_bytes_has_no_parts(path):
    with ReceivedParts(path, 0) as parts:
        assert parts.num_parts == 0


def test_closing_leaves_no_descriptor_open(path):
    before = len(os.listdir("/proc/self/fd"))
    ReceivedParts(path, SIZE).close()
    assert len(os.listdir("/proc/self/fd")) == before
