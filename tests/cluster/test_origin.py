"""The origin of the cluster tests: what it forwards, limits, counts and breaks. A real server stands behind it."""

import http.client
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.origin import CUT, FLIP, REFUSE, STALL, UNAVAILABLE, Fault, Limits, Origin, OriginProcess
from tools.bench.origin.pacing import Pacer

ROOT = Path(__file__).parents[2]
CONTENT = os.urandom(1 << 20)
CREDIT_S = 0.02  # what a pacer lends


class Store(BaseHTTPRequestHandler):
    """Answers GET and HEAD of /length, /chunked and /closed with CONTENT, and PUT and POST with what they bring."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        start, stop = 0, len(CONTENT)
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            start, stop = int(found[1]), int(found[2]) + 1
        self.send_response(206 if found else 200)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
        elif self.path != "/closed":
            self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.path == "/chunked":
            for chunk in _pieces(CONTENT[start:stop]):
                self.wfile.write(b"%x;note=1\r\n%b\r\n" % (len(chunk), chunk))
            self.wfile.write(b"0\r\nX-After: 1\r\n\r\n")
            return
        self.wfile.write(CONTENT[start:stop])
        self.close_connection = self.path == "/closed"

    do_HEAD = do_GET  # noqa: N815 - the name that `http.server` looks for

    def do_PUT(self):
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.stored.append(content)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Host", self.headers["Host"])
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments):
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """A server that expects its clients to go away."""

    daemon_threads = True

    def handle_error(self, _request, _client_address):
        """Say nothing."""


def _pieces(content, size=99_999):
    return [content[start : start + size] for start in range(0, len(content), size)]


@pytest.fixture(scope="module")
def store():
    server = Server(("127.0.0.1", 0), Store)
    server.stored = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def origin(store):
    with Origin(store.url) as origin:
        yield origin


def connect(origin):
    return http.client.HTTPConnection(urlsplit(origin.url).netloc)


def get(origin, path="/length", method="GET", **options):
    """Ask once on a connection of its own; returns status and body."""
    connection = connect(origin)
    try:
        connection.request(method, path, **options)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/length", "/chunked", "/closed"])
def test_bodies_pass_unchanged_whatever_says_where_they_end(origin, path):
    assert get(origin, path) == (200, CONTENT)
    assert [(each.method, each.path, each.status, each.num_bytes) for each in origin.exchanges()] == [
        ("GET", path, 200, len(CONTENT))
    ]


def test_an_answer_that_ends_with_its_connection_has_the_header_close(origin):
    connection = connect(origin)
    connection.request("GET", "/closed")
    answer = connection.getresponse()
    assert answer.headers["Connection"] == "close"
    assert answer.read() == CONTENT
    connection.close()


def test_many_requests_share_a_connection_and_ranges_and_heads_pass(origin):
    connection = connect(origin)
    connection.connect()
    port = connection.sock.getsockname()
    for start in (0, 5, 1000):
        connection.request("GET", "/length", headers={"Range": f"bytes={start}-{start + 9}"})
        assert connection.getresponse().read() == CONTENT[start : start + 10]
        connection.request("HEAD", "/length")
        answer = connection.getresponse()
        assert int(answer.headers["Content-Length"]) == len(CONTENT)
        assert answer.read() == b""
        assert connection.sock.getsockname() == port
    connection.close()
    assert [each.range for each in origin.exchanges()] == ["bytes=0-9", "", "bytes=5-14", "", "bytes=1000-1009", ""]
    assert origin.num_bytes() == 30


def test_the_host_that_a_client_signed_reaches_the_store(origin):
    connection = connect(origin)
    connection.request("PUT", "/", body=b"x", headers={"Host": "signed.example"})
    answer = connection.getresponse()
    assert answer.headers["X-Host"] == "signed.example"
    answer.read()
    connection.close()


def test_bytes_are_counted_by_path_and_anew_after_forget(origin):
    get(origin, "/a/objects/1")
    get(origin, "/a/journal/1")
    assert origin.num_bytes("/objects/") == len(CONTENT)
    origin.forget()
    assert origin.exchanges() == []
    get(origin, "/a/objects/1", headers={"Range": "bytes=0-99"})
    assert origin.num_bytes("/objects/") == 100


@pytest.mark.slow
def test_a_client_that_goes_away_is_not_counted_as_served(store):
    with Origin(store.url, Limits(connection_rate=1e6)) as origin:
        connection = connect(origin)
        connection.request("GET", "/length")
        connection.getresponse().read(1)
        connection.close()
        assert get(origin)[1] == CONTENT
        gone, served = origin.exchanges()
        assert gone.num_bytes < served.num_bytes == len(CONTENT)


def test_a_flipped_byte_is_the_only_one_that_differs(origin):
    origin.choose = lambda _exchange: Fault(FLIP, offset=700_001)
    status, body = get(origin)
    assert status == 200
    assert [index for index, pair in enumerate(zip(body, CONTENT, strict=True)) if len(set(pair)) == 2] == [700_001]


@pytest.mark.parametrize("path", ["/length", "/chunked"])
def test_an_answer_that_is_cut_short_has_just_the_bytes_before(origin, path):
    origin.choose = lambda _exchange: Fault(CUT, offset=300_000)
    with pytest.raises(http.client.IncompleteRead) as caught:
        get(origin, path)
    if path == "/length":
        assert caught.value.partial == CONTENT[:300_000]
    assert origin.num_bytes() == 300_000


def test_a_stalled_answer_continues_when_released(origin):
    origin.choose = lambda _exchange: Fault(STALL, offset=300_000)
    with socket.create_connection(urlsplit(origin.url).netloc.split(":"), 20) as client:
        client.sendall(b"GET /length HTTP/1.1\r\nConnection: close\r\n\r\n")
        taken = b""
        while len(taken.partition(b"\r\n\r\n")[2]) < 300_000:
            taken += client.recv(1 << 16)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(20)
        origin.resume()
        with client.makefile("rb") as rest:
            assert taken.partition(b"\r\n\r\n")[2] + rest.read() == CONTENT


def test_stalled_and_idle_connections_do_not_keep_an_origin_from_closing(store):
    with Origin(store.url, choose=lambda _exchange: Fault(STALL)) as origin:
        idle, stalled = connect(origin), connect(origin)
        idle.connect()
        stalled.request("GET", "/length")
        answer = stalled.getresponse()
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        answer.read()
    with pytest.raises(ConnectionError):
        get(origin)
    idle.close()
    stalled.close()


def test_a_refused_request_sees_its_connection_reset(origin):
    origin.choose = lambda _exchange: Fault(REFUSE)
    with socket.create_connection(urlsplit(origin.url).netloc.split(":")) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_503_is_answered_without_asking_the_store_and_the_connection_lives_on(store, origin):
    origin.choose = lambda exchange: Fault(UNAVAILABLE) if exchange.method == "PUT" else None
    connection = connect(origin)
    before = len(store.stored)
    for _ in range(2):
        connection.request("PUT", "/", body=CONTENT)
        answer = connection.getresponse()
        assert (answer.status, b"SlowDown" in answer.read()) == (503, True)
    connection.request("GET", "/length")
    assert connection.getresponse().read() == CONTENT
    connection.close()
    assert len(store.stored) == before
    assert [each.fault is not None for each in origin.exchanges()] == [True, True, False]


def test_a_choice_that_fails_is_raised_where_the_origin_ends(store):
    origin = Origin(store.url, choose=lambda _exchange: 1 // 0).__enter__()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        get(origin)
    with pytest.raises(ExceptionGroup):
        origin.__exit__(None, None, None)


@given(
    rate=st.floats(1, 1e9),
    steps=st.lists(st.tuples(st.floats(0.001, 0.1), st.sampled_from([0.0, 0.01, 1.0])), min_size=1, max_size=40),
)
def test_no_stretch_of_time_sees_more_than_the_rate_and_its_credit(rate, steps):
    pacer, now, passed = Pacer(rate), 0.0, []
    pacer.begin(now)
    for worth_s, late_s in steps:
        num_bytes = max(1, int(worth_s * rate))
        now = max(now + late_s, pacer.reserve(num_bytes, now + late_s))
        passed.append((now, num_bytes))
    for first, (start, _) in enumerate(passed):
        for last, (stop, _) in enumerate(passed[first:], first):
            moved = sum(num_bytes for _, num_bytes in passed[first + 1 : last + 1])
            assert moved <= rate * (stop - start + CREDIT_S) * (1 + 1e-6) + 1e-3


def seconds_of(work):
    start = time.monotonic()
    work()
    return time.monotonic() - start


# The least time is a law and no measurement: a busy machine only takes longer.
def test_limits_hold_for_each_connection_and_for_all_of_them(store):
    def get_three():
        with ThreadPoolExecutor(3) as pool:
            assert [body for _, body in pool.map(lambda _: get(origin), range(3))] == [CONTENT] * 3

    with Origin(store.url, Limits(connection_rate=8e6, total_rate=12e6, latency_s=0.05)) as origin:
        assert seconds_of(lambda: get(origin)) >= len(CONTENT) / 8e6 + 0.05 - CREDIT_S
        assert seconds_of(get_three) >= 3 * len(CONTENT) / 12e6 - CREDIT_S


def test_an_origin_in_a_process_of_its_own_counts_and_ends_with_its_input(store):
    with OriginProcess(store.url, Limits(connection_rate=100e6, total_rate=200e6, latency_s=0.001)) as origin:
        assert get(origin, "/a?b=c")[1] == CONTENT
        assert get(origin, "/a?b=d")[1] == CONTENT
        assert origin.counts() == {"requests": 2, "bytes": 2 * len(CONTENT), "paths": {"/a": 2 * len(CONTENT)}}
        origin.forget()
        assert origin.counts()["bytes"] == 0
    with pytest.raises(ConnectionError):
        get(origin)
