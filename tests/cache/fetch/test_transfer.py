"""An incoming file and its sources: whatever goes wrong, the file is the object or an error says why it is not."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.fetch.transfer import transfer
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.cache.sources.origin_source import PART_BYTES, OriginSource, ReceivedParts, RequestPool
from datasvc.errors import CorruptDataError, NotFoundError, SourceChangedError, UnavailableError
from datasvc.progress import NO_PROGRESS
from datasvc.repository import ObjectInfo, Repository
from datasvc.repository.objects.objects import digest_of
from tests.cache.peer_server import PeerServer, Strangers
from tests.examples import examples
from tests.progress import RecordedProgress

ROOT = Path(__file__).parents[3]
CONTENT = os.urandom(1 << 16) * (3 * PART_BYTES >> 16) + b"tail"
INFO = ObjectInfo(digest_of(CONTENT), len(CONTENT))
HASTY = PeerSettings(stall_timeout_s=0.5, connect_timeout_s=0.5, rate_window_s=0.2, min_bytes_s=1000)
# What a peer can do that the others must make good.
FAULTS = [401, 404, 416, 500, 503, 507, "lie", "hang up", "stall", "dead", "short", "garbage"]


class Origin:
    """Counts what is read; `flips` reads get a bit that is not the object's; `answer` may raise."""

    can_stream = False

    def __init__(self, content=CONTENT, *, flips=0, answer=None):
        self.content = content
        self.flips = flips
        self.answer = answer
        self.num_bytes = 0
        self._lock = threading.Lock()

    def read_range(self, _digest, offset, length):
        if self.answer is not None:
            self.answer(offset)
        content = bytearray(self.content[offset : offset + length])
        with self._lock:
            self.num_bytes += len(content)
            if self.flips:
                self.flips -= 1
                content[-1] ^= 1
        return bytes(content)

    def location(self, _digest):
        return "s3://bucket/object"


@contextmanager
def peers_with(*faults, contents=None):
    """Yield running peers, one per fault, and what asks them."""
    contents = contents or [CONTENT] * len(faults)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(PeerServer({INFO.digest: content}, fault))
            for content, fault in zip(contents, faults, strict=True)
        ]
        settings = HASTY if {"stall", "dead"}.intersection(faults) else PeerSettings()
        yield servers, Peers(Strangers(*(server.url for server in servers)), settings)


def in_order(peers, servers):
    """Return the peers as sources, in the order of `servers` whatever their rank."""
    found = {source.name: source for source in peers.sources(INFO, "/repo")}
    return [found[server.url] for server in servers]


@pytest.fixture
def requests():
    pool = RequestPool(4)
    yield pool
    pool.close()


@pytest.fixture
def incoming(tmp_path):
    return tmp_path / "incoming"


def fetch(incoming, sources, progress=NO_PROGRESS, info=INFO):
    """Transfer into a file that may be there already; returns the report."""
    descriptor = os.open(incoming, os.O_CREAT | os.O_RDWR)
    try:
        os.truncate(descriptor, info.size_bytes)
        with ReceivedParts(incoming.with_suffix(".parts"), info.size_bytes) as parts:
            return transfer(info, descriptor, parts, sources, progress)
    finally:
        os.close(descriptor)


def test_an_object_comes_from_its_origin(incoming, requests):
    origin, progress = Origin(), RecordedProgress()
    done = fetch(incoming, [OriginSource(origin, INFO.digest, requests)], progress)
    assert incoming.read_bytes() == CONTENT
    assert (done.kind, done.num_corrupt, done.bytes_by_kind) == ("origin", 0, {"origin": len(CONTENT)})
    assert progress.by_source == {"origin": len(CONTENT)}


def test_an_object_comes_from_a_peer_and_the_origin_is_left_alone(incoming, requests):
    origin = Origin()
    with peers_with(None) as (servers, peers):
        done = fetch(incoming, [*in_order(peers, servers), OriginSource(origin, INFO.digest, requests)])
        assert peers.report()[servers[0].url].num_ok == 1
    assert incoming.read_bytes() == CONTENT
    assert (done.kind, done.bytes_by_kind, origin.num_bytes) == ("peer", {"peer": len(CONTENT)}, 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_peer_does_the_next_one_makes_it_good(incoming, requests, fault):
    origin = Origin()
    with peers_with(fault, None) as (servers, peers):
        done = fetch(incoming, [*in_order(peers, servers), OriginSource(origin, INFO.digest, requests)])
        assert peers.report()[servers[1].url].num_ok == 1
    assert incoming.read_bytes() == CONTENT
    assert (done.kind, origin.num_bytes, done.num_corrupt) == ("peer", 0, fault == "lie")


def test_the_next_source_continues_where_the_first_stopped(incoming, requests):
    origin = Origin()
    with peers_with("hang up") as (servers, peers):
        done = fetch(incoming, [*in_order(peers, servers), OriginSource(origin, INFO.digest, requests)])
    assert incoming.read_bytes() == CONTENT
    half = len(CONTENT) // 2
    assert done.bytes_by_kind == {"peer": half, "origin": len(CONTENT) - half}


def test_a_peer_continues_what_the_origin_began(incoming):
    written = threading.Event()

    def answer(offset):
        if offset:
            written.wait()
            raise NotFoundError("gone")

    origin = Origin(answer=answer)
    with peers_with(None) as (servers, peers):
        sources = [OriginSource(origin, INFO.digest, RequestPool(2)), *in_order(peers, servers)]
        fetch(incoming, sources, RecordedProgress(on_advance=written.set))
        assert servers[0].requests[0][1] == f"bytes={origin.num_bytes}-"
    assert 0 < origin.num_bytes < len(CONTENT)
    assert incoming.read_bytes() == CONTENT


def test_a_peer_makes_good_what_a_changed_file_gave_and_is_not_blamed(incoming):
    class Changed:
        kind = name = "origin"

        def stream(self, _info, _offset, _length, sink):
            sink(0, memoryview(bytes(PART_BYTES)))
            raise SourceChangedError("the file has changed")

    with peers_with(None) as (servers, peers):
        done = fetch(incoming, [Changed(), *in_order(peers, servers)])
        assert peers.report()[servers[0].url].num_ok == 1
    assert incoming.read_bytes() == CONTENT
    assert (done.kind, done.num_corrupt) == ("peer", 0)


def test_who_lies_is_marked_and_nothing_of_it_is_kept(incoming, requests):
    origin = Origin()
    with peers_with("lie") as (servers, peers):
        sources = [*in_order(peers, servers), OriginSource(origin, INFO.digest, requests)]
        done = fetch(incoming, sources)
        assert peers.report()[servers[0].url].num_lying == 1
        assert peers.sources(INFO, "/repo") == []
    assert incoming.read_bytes() == CONTENT
    assert (done.num_corrupt, done.kind, origin.num_bytes) == (1, "origin", len(CONTENT))


def test_a_liar_that_hung_up_is_found_out_though_another_completed_its_bytes(incoming, requests):
    wrong = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    with peers_with("hang up", None, contents=[wrong, CONTENT]) as (servers, peers):
        done = fetch(incoming, [*in_order(peers, servers), OriginSource(Origin(), INFO.digest, requests)])
    assert incoming.read_bytes() == CONTENT
    assert (done.num_corrupt, done.kind) == (1, "origin")


def test_a_bit_that_flips_on_the_way_from_the_origin_is_gone_at_the_second_try(incoming, requests):
    done = fetch(incoming, [OriginSource(Origin(flips=1), INFO.digest, requests)])
    assert incoming.read_bytes() == CONTENT
    assert done.num_corrupt == 1


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT[:-1], b""])
def test_an_origin_that_is_wrong_twice_is_corrupt(incoming, requests, content):
    origin = Origin(content)
    with pytest.raises(CorruptDataError, match=r"s3://bucket/object"):
        fetch(incoming, [OriginSource(origin, INFO.digest, requests)])
    assert origin.num_bytes <= 2 * len(CONTENT)


def test_wrong_bytes_are_not_continued_by_a_later_fetch(incoming, requests):
    with pytest.raises(CorruptDataError):
        fetch(incoming, [OriginSource(Origin(CONTENT[:-1] + b"x"), INFO.digest, requests)])
    with ReceivedParts(incoming.with_suffix(".parts"), INFO.size_bytes) as parts:
        assert parts.arrived == frozenset()


@pytest.mark.parametrize("error", [NotFoundError, UnavailableError, CorruptDataError])
def test_when_all_fail_the_error_is_the_origins_and_names_every_source(incoming, requests, error):
    def answer(offset):
        raise error("the origin is not what it was")

    with peers_with(507, "lie") as (servers, peers):
        sources = [*in_order(peers, servers), OriginSource(Origin(answer=answer), INFO.digest, requests)]
        with pytest.raises(error) as raised:
            fetch(incoming, sources)
        for part in (
            INFO.digest[:12],
            servers[0].url,
            "no space for the object",
            servers[1].url,
            "sent bytes with the digest",
            "not what it was",
        ):
            assert part in str(raised.value)


def test_an_object_without_bytes_is_right_or_wrong_at_once(incoming, requests):
    empty = ObjectInfo(digest_of(b""), 0)
    origin = OriginSource(Origin(), empty.digest, requests)
    assert fetch(incoming, [origin], info=empty).kind is None
    with pytest.raises(CorruptDataError, match="cannot be empty"):
        fetch(incoming, [origin], info=ObjectInfo(INFO.digest, 0))


def test_a_file_that_is_complete_already_requests_nothing(incoming, requests):
    fetch(incoming, [OriginSource(Origin(), INFO.digest, requests)])
    origin = Origin()
    done = fetch(incoming, [OriginSource(origin, INFO.digest, requests)])
    assert (done.kind, origin.num_bytes, dict(done.bytes_by_kind)) == (None, 0, {})


@pytest.mark.parametrize("complete", [True, False])
def test_bytes_that_were_lost_behind_their_note_count_against_no_source(incoming, complete):
    incoming.write_bytes(CONTENT)
    with ReceivedParts(incoming.with_suffix(".parts"), len(CONTENT)) as parts:
        for number in range(parts.num_parts if complete else 2):
            parts.add(number)
    with incoming.open("r+b") as file:
        file.write(b"\0" * 4096)
    with peers_with(None) as (servers, peers):
        done = fetch(incoming, in_order(peers, servers))
        assert peers.report()[servers[0].url].num_lying == 0
    assert incoming.read_bytes() == CONTENT
    assert (done.num_corrupt, done.kind) == (1, "peer")


STALLING = """
import os, sys, threading
from pathlib import Path
from datasvc.cache.sources.origin_source import PART_BYTES, ReceivedParts
from datasvc.cache.sources.origin_source import OriginSource, RequestPool
from datasvc.cache.fetch.transfer import transfer
from datasvc.progress import Progress
from datasvc.repository import ObjectInfo, Repository

arrived, both = [], threading.Event()

class Arrivals(Progress):
    def advance(self, amount, **_):
        arrived.append(amount)
        if sum(arrived) >= 2 * PART_BYTES:
            both.set()

class Stalling:
    can_stream = False
    def __init__(self, objects):
        self.objects, self.location = objects, objects.location
    def read_range(self, digest, offset, length):
        if offset >= 2 * PART_BYTES:
            both.wait()
            sys.stdout.write("stalls\\n")  # in one piece: another thread may say so too
            sys.stdout.flush()
            threading.Event().wait()
        return self.objects.read_range(digest, offset, length)

incoming, parts, url, digest, size = sys.argv[1:]
info = ObjectInfo(digest, int(size))
origin = OriginSource(Stalling(Repository.open(url).objects), digest, RequestPool(2))
received = ReceivedParts(Path(parts), info.size_bytes)
transfer(info, os.open(incoming, os.O_CREAT | os.O_RDWR), received, [origin], Arrivals())
"""


def test_a_fetch_that_was_killed_continues_with_what_had_arrived(incoming, tmp_path, requests):
    repository = Repository.create(str(tmp_path / "repo"))
    info = repository.objects.put(CONTENT)
    arguments = [incoming, incoming.with_suffix(".parts"), repository.url, info.digest, info.size_bytes]
    process = subprocess.Popen(
        [sys.executable, "-c", STALLING, *map(str, arguments)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout.readline() == "stalls\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    origin = Origin()
    done = fetch(incoming, [OriginSource(origin, info.digest, requests)])
    assert incoming.read_bytes() == CONTENT
    assert origin.num_bytes == len(CONTENT) - 2 * PART_BYTES
    assert (done.num_corrupt, done.kind) == (0, "origin")


def test_a_full_disk_is_the_callers_business_and_what_has_arrived_stays(incoming, requests, monkeypatch):
    real, written = os.pwrite, threading.Event()

    def pwrite(descriptor, view, offset):
        if offset >= 2 * PART_BYTES:
            written.wait()
            raise OSError(28, "No space left on device")
        return real(descriptor, view, offset)

    monkeypatch.setattr("datasvc.cache.fetch.transfer.os.pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        fetch(
            incoming, [OriginSource(Origin(), INFO.digest, RequestPool(2))], RecordedProgress(on_advance=written.set)
        )
    monkeypatch.undo()
    origin = Origin()
    fetch(incoming, [OriginSource(origin, INFO.digest, requests)])
    assert incoming.read_bytes() == CONTENT
    assert origin.num_bytes <= len(CONTENT) - PART_BYTES


SMALL = os.urandom(PART_BYTES + 70_000)
SMALL_INFO = ObjectInfo(digest_of(SMALL), len(SMALL))


class Scripted:
    """A source in pieces, from several threads, that flips a bit, or stops half-way, or does all as it should."""

    def __init__(self, number, kind, faults, cuts):
        self.name = f"source {number}"
        self.kind = kind
        self.judged = []
        self._faults = list(faults)
        self._cuts = cuts

    def stream(self, _info, offset, length, sink):
        fault = self._faults.pop(0) if self._faults else None
        content = bytearray(SMALL[offset : offset + length])
        if fault == "flip":
            content[length // 3] ^= 16
        stop = offset + (length // 2 if fault == "stop" else length)
        spans = {}
        for part in range(offset // PART_BYTES, -(-stop // PART_BYTES)):
            spans[part] = max(offset, part * PART_BYTES), min(stop, (part + 1) * PART_BYTES)
        threads = [
            threading.Thread(target=self._deliver, args=(content, offset, start, end, sink))
            for start, end in reversed(spans.values())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if fault == "stop":
            raise UnavailableError(f"{self.name} stopped")

    def _deliver(self, content, offset, start, end, sink):
        while start < end:
            stop = min(end, start + self._cuts)
            sink(start, memoryview(content)[start - offset : stop - offset])
            start = stop

    def record_integrity(self, *, intact):
        self.judged.append(intact)


@examples(60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["peer", "origin"]), st.lists(st.sampled_from(["flip", "stop", None]), max_size=2)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([1 << 16, 100_001, 1 << 22]),
)
def test_whatever_sources_do_the_file_is_the_object_or_there_is_an_error(tmp_path_factory, script, cuts):
    sources = [Scripted(number, kind, faults, cuts) for number, (kind, faults) in enumerate(script)]
    incoming = tmp_path_factory.mktemp("transfer") / "incoming"
    try:
        done = fetch(incoming, sources, info=SMALL_INFO)
    except (CorruptDataError, UnavailableError) as error:
        missing = [source.name for source in sources if source.name not in str(error)]
        assert missing == []
        return
    assert incoming.read_bytes() == SMALL
    assert any(source.judged[-1:] == [True] for source in sources)
    assert done.num_corrupt >= any(False in source.judged for source in sources)
