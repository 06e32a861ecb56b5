"""Ranges over plain HTTP as they arrive: whatever a server does, they are the file's or an error says why not."""

import os
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.repository.store.obstore_loop import CancellationToken, UnsupportedResponseError
from datasvc.repository.store.ranges import CHUNK_BYTES, HttpRanges, RangeReader, Timeouts
from datasvc.repository.store.retries import ATTEMPTS
from tests.examples import examples
from tests.repository.faulty_server import FaultyServer
from tests.support.dripping_server import DrippingServer
from tests.support.threads import in_thread

CONTENT = os.urandom(1 << 16) * 40 + b"tail"
SIZE = len(CONTENT)
PATIENT = Timeouts(connect_s=600, silence_s=600, chunk_s=600)
HASTY = Timeouts(connect_s=600, silence_s=0.4, chunk_s=0.8)
# Those that a server may commit now and then, and does no harm by.
PASSING = [500, 503, 416, "refuse", "hang up", "stall", "silent", "trickle", "short", "long", "shifted", "garbage"]
STRANGE = ["chunked", "no length", "gzip"]


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr("datasvc.repository.store.retries.FIRST_PAUSE_S", 0.001)


LASTING = ["stall", "silent", "trickle"]


def stream_of(fault=None):
    """Return a stream that waits for what lasts for ever only."""
    return HttpRanges(fsspec.filesystem("http", skip_instance_cache=True), HASTY if fault in LASTING else None)


def read(stream, server, offset=0, length=SIZE, interrupt=None, path="/file"):
    """Return what comes, in order."""
    pieces = bytearray()
    url = f"{server.url}{path}"
    stream.read(url, offset, length, pieces.extend, location=url, interrupt=interrupt or CancellationToken())
    return pieces


def test_any_range_is_what_the_file_has_there():
    stream = stream_of()
    with FaultyServer(CONTENT) as server:
        for offset, length in [(0, SIZE), (0, 1), (SIZE - 1, 1), (17, 300_000), (1 << 20, 1 << 20)]:
            assert read(stream, server, offset, length) == CONTENT[offset : offset + length]


def test_a_connection_serves_one_range_after_the_other():
    stream = stream_of()
    with FaultyServer(CONTENT) as server:
        for offset in range(0, SIZE, 500_000):
            length = min(500_000, SIZE - offset)
            assert read(stream, server, offset, length) == CONTENT[offset : offset + length]
        # The client gives a connection back in the background, now and then after the next read has begun.
        assert server.num_connections < len(server.ranges)


def test_a_connection_that_the_server_ends_is_not_used_again():
    stream = stream_of()
    with FaultyServer(CONTENT, "closing") as server:
        for _ in range(3):
            assert read(stream, server) == CONTENT
        assert server.num_connections == len(server.ranges) == 3


def test_a_kept_connection_that_was_closed_meanwhile_is_no_failure(monkeypatch):
    monkeypatch.setattr("datasvc.repository.store.retries.ATTEMPTS", 1)
    for passing in [(UnavailableError,)] * 3 + [()]:  # the first connection may not be given back yet, see above
        stream = stream_of()
        with FaultyServer(CONTENT, faults=[None, "refuse"]) as server:
            assert read(stream, server) == CONTENT
            with suppress(*passing):
                assert read(stream, server) == CONTENT
                assert server.num_connections == 2
                break


@pytest.mark.parametrize("fault", PASSING)
def test_what_was_missing_after_a_fault_is_requested_again(fault, monkeypatch):
    monkeypatch.setattr("datasvc.repository.store.ranges.CHUNK_BYTES", 10_000)
    with FaultyServer(CONTENT, faults=[fault] * (ATTEMPTS - 1)) as server:
        assert read(stream_of(fault), server) == CONTENT
        assert len(server.ranges) == ATTEMPTS
        if fault == "hang up":
            starts = [start for start, _ in server.ranges]
            assert starts == sorted(set(starts))  # chunks that have arrived are not requested again


@examples(25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    faults=st.lists(st.sampled_from([each for each in PASSING if each not in LASTING]), max_size=3),
    start=st.integers(0, SIZE - 1),
    length=st.integers(1, SIZE),
)
def test_faults_that_pass_leave_every_byte_in_its_place(faults, start, length):
    length = min(length, SIZE - start)
    with FaultyServer(CONTENT, faults=faults) as server:
        assert read(stream_of(), server, start, length) == CONTENT[start : start + length]


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=pytest.mark.slow if fault in LASTING else ()) for fault in PASSING],
)
def test_a_lasting_fault_is_an_error_after_a_few_attempts(fault):
    with FaultyServer(CONTENT, fault) as server:
        with pytest.raises(UnavailableError, match=r"cannot read http://localhost:\d+/file"):
            read(stream_of(fault), server, 1, SIZE - 1)
        assert len(server.ranges) == ATTEMPTS


def test_a_file_cut_off_again_and_again_comes_as_long_as_much_of_it_comes(monkeypatch):
    monkeypatch.setattr("datasvc.repository.store.ranges.CHUNK_BYTES", 1000)
    monkeypatch.setattr("datasvc.repository.store.ranges._PROGRESS_BYTES", 1000)
    with FaultyServer(CONTENT, faults=["hang up"] * 7) as server:
        assert read(stream_of(), server) == CONTENT


@pytest.mark.parametrize(("status", "error"), [(404, NotFoundError), (401, ConfigError), (403, ConfigError)])
def test_a_refused_request_is_not_repeated(status, error):
    with FaultyServer(CONTENT, status) as server:
        with pytest.raises(error, match=r"cannot read http://localhost:\d+/file"):
            read(stream_of(), server)
        assert len(server.ranges) == 1


def test_a_server_that_is_not_there_is_unavailable():
    with FaultyServer(CONTENT) as server:
        pass
    with pytest.raises(UnavailableError, match="cannot read"):
        read(stream_of(), server)


def test_a_server_without_ranges_gives_whole_files_and_no_parts():
    with FaultyServer(CONTENT, "no ranges") as server:
        ranges, pieces = RangeReader(fsspec.filesystem("http")), bytearray()
        url, options = f"{server.url}/file", {"location": "it", "interrupt": CancellationToken()}
        ranges.stream(url, 0, SIZE, pieces.extend, **options)
        assert pieces == CONTENT
        with pytest.raises(UnavailableError, match=f"received {SIZE} of {SIZE - 1} bytes"):
            ranges.stream(url, 1, SIZE - 1, pieces.extend, **options)


def test_a_redirect_is_followed():
    with FaultyServer(CONTENT, "redirect") as server:
        assert read(stream_of(), server, 5, 1000) == CONTENT[5:1005]


@pytest.mark.parametrize("fault", STRANGE)
def test_a_response_of_another_kind_is_read_by_fsspec(fault):
    with FaultyServer(CONTENT, fault) as server:
        with pytest.raises(UnsupportedResponseError):
            read(stream_of(), server)
        ranges, pieces = RangeReader(fsspec.filesystem("http")), bytearray()
        assert ranges.can_stream
        for offset in (0, SIZE // 2):
            length = SIZE // 2
            ranges.stream(
                f"{server.url}/file", offset, length, pieces.extend, location="it", interrupt=CancellationToken()
            )
        assert pieces == CONTENT[: 2 * (SIZE // 2)]
        assert not ranges.can_stream


def test_a_server_that_begins_to_compress_half_way_hands_nothing_on_twice():
    with FaultyServer(CONTENT, "gzip", faults=["hang up"]) as server:
        ranges, pieces = RangeReader(fsspec.filesystem("http")), bytearray()
        with pytest.raises(UnavailableError, match="sends a response of another kind"):
            ranges.stream(f"{server.url}/file", 0, SIZE, pieces.extend, location="it", interrupt=CancellationToken())
        assert 0 < len(pieces) <= SIZE // 2
        assert pieces == CONTENT[: len(pieces)]


@pytest.mark.parametrize(
    "settings", [{"headers": {"X": "y"}}, {"client_kwargs": {"trust_env": True}}, {"encoded": True}, {"ssl": False}]
)
def test_a_client_with_settings_of_its_own_is_left_alone(settings):
    file_system = fsspec.filesystem("http", skip_instance_cache=True, **settings)
    assert (HttpRanges.of(file_system) is None) == (settings != {"encoded": True})
    assert RangeReader(file_system).can_stream == (settings == {"encoded": True})


def test_other_stores_are_left_alone():
    for protocol in ("file", "memory"):
        assert HttpRanges.of(fsspec.filesystem(protocol)) is None
    assert HttpRanges.of(fsspec.filesystem("simplecache", target_protocol="http")) is None


def test_user_and_password_of_a_url_are_sent_as_fsspec_sends_them():
    with FaultyServer(CONTENT) as server:
        url = f"{server.url.replace('//', '//me%40here:s%20cret@')}/a%20b ü"
        file_system = fsspec.filesystem("http", skip_instance_cache=True)
        assert file_system.cat_file(url) == CONTENT
        pieces = bytearray()
        HttpRanges(file_system).read(url, 0, SIZE, pieces.extend, location="it", interrupt=CancellationToken())
        assert pieces == CONTENT
        assert server.authorizations[0] is not None
        assert len(set(server.authorizations)) == 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """An issuer's certificate, and the certificate and the key of the server that it has issued."""
    folder = tmp_path_factory.mktemp("certificates")
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    server = ("-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE")
    issue = ("x509", "-req", "-in", "request", "-CA", "issuer", "-CAkey", "issuer.key", "-copy_extensions", "copy")
    for command in (
        (*new, "-x509", "-days", "1", "-subj", "/CN=issuer", "-out", "issuer", "-keyout", "issuer.key"),
        (*new, "-subj", "/CN=localhost", *server, "-out", "request", "-keyout", "server.key"),
        (*issue, "-days", "1", "-out", "server"),
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True, cwd=folder)
    return folder / "issuer", folder / "server", folder / "server.key"


@pytest.fixture
def tls(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate[1:])
    return context


def test_over_https_a_server_that_is_trusted_is_read_and_no_other(certificate, tls, monkeypatch):
    with FaultyServer(CONTENT, faults=["hang up", 503], tls=tls) as server:
        with pytest.raises(UnavailableError, match="certificate verify failed: it is from an unknown issuer"):
            read(stream_of(), server)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        stream = stream_of()
        for offset in (0, SIZE // 2):
            length = SIZE // 2
            assert read(stream, server, offset, length) == CONTENT[offset : offset + length]
        assert len(server.ranges) == 4


@pytest.mark.parametrize("fault", [None, "stall", "silent", 503])
def test_an_interrupt_ends_what_is_under_way(fault, monkeypatch):
    monkeypatch.setattr("datasvc.repository.store.retries.FIRST_PAUSE_S", 600)
    patient = HttpRanges(fsspec.filesystem("http", skip_instance_cache=True), PATIENT)
    interrupt, begun = CancellationToken(), threading.Event()

    def take(_view):
        begun.set()
        if fault is None:
            interrupt.wait(60)

    def read_file():
        patient.read(f"{server.url}/file", 0, SIZE, take, location="it", interrupt=interrupt)

    with FaultyServer(CONTENT, fault) as server:
        thread, raised = in_thread(read_file)
        if fault in (None, "stall"):
            assert begun.wait(60)
        interrupt.set()
        thread.join(60)
        assert [type(error) for error in raised] == [UnavailableError]
        with pytest.raises(UnavailableError, match="the read was cancelled"):
            read_file()


def test_an_interrupt_ends_a_stream_over_https(certificate, tls, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    interrupt, patient = CancellationToken(), HttpRanges(fsspec.filesystem("http"), PATIENT)
    with FaultyServer(CONTENT, "stall", tls=tls) as server, ThreadPoolExecutor(1) as pool:
        half, arrived = threading.Event(), bytearray()

        def take(view):
            arrived.extend(view)
            if len(arrived) >= CHUNK_BYTES:
                half.set()

        reading = pool.submit(patient.read, f"{server.url}/file", 0, SIZE, take, location="it", interrupt=interrupt)
        assert half.wait(60)
        interrupt.set()
        with pytest.raises(UnavailableError, match="the read was cancelled"):
            reading.result(60)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), UnavailableError("stopping")])
def test_what_takes_the_bytes_may_fail_and_its_error_passes_through(error):
    def full(_view):
        raise error

    with FaultyServer(CONTENT) as server:
        with pytest.raises(type(error), match=r"No space left|stopping"):
            stream_of().read(f"{server.url}/file", 0, SIZE, full, location="it", interrupt=CancellationToken())
        assert len(server.ranges) == 1


def test_the_memory_of_a_long_range_is_that_of_few_chunks():
    lengths = []
    with FaultyServer(CONTENT) as server:
        options = {"location": "it", "interrupt": CancellationToken()}
        stream_of().read(f"{server.url}/file", 0, SIZE, lambda view: lengths.append(len(view)), **options)
    assert sum(lengths) == SIZE
    assert max(lengths) < 2 * CHUNK_BYTES


@pytest.mark.slow
def test_a_file_whose_head_drips_is_unavailable_after_a_few_tries():
    with DrippingServer() as server:
        with pytest.raises(UnavailableError, match="no answer within the time limit"):
            read(stream_of("silent"), server)
        assert server.num_connections == ATTEMPTS


@pytest.mark.parametrize("path", ["/a%2Fb", "/a//b", "/a/", "/a%FFb", "/a%0Ab"])
def test_a_path_that_would_be_requested_in_another_form_is_left_to_fsspec(path):
    with FaultyServer(CONTENT) as server:
        encoded = fsspec.filesystem("http", encoded=True, skip_instance_cache=True)
        with pytest.raises(UnsupportedResponseError):
            HttpRanges(encoded).read(server.url + path, 0, 5, bytes, location="it", interrupt=CancellationToken())
        assert server.ranges == []


def test_the_query_of_a_signed_url_is_sent_with_every_request():
    seen = []

    class RecordingServer(FaultyServer):
        def answer(self, handler):
            seen.append(handler.path)
            super().answer(handler)

    with RecordingServer(CONTENT, faults=[503]) as server:
        assert read(stream_of(), server, 0, 10, path="/a%20b/c?X-Sig=a%2Bb&n=1") == CONTENT[:10]
    assert seen == ["/a%20b/c?X-Sig=a%2Bb&n=1"] * 2


def test_an_interrupt_ends_the_wait_for_a_connection():
    """A server whose queue is full does not answer those who come next."""
    interrupt, patient = CancellationToken(), HttpRanges(fsspec.filesystem("http"), PATIENT)
    with socket.socket() as server, ThreadPoolExecutor(1) as pool, ExitStack() as callers:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        callers.enter_context(socket.create_connection(("127.0.0.1", port)))
        url = f"http://127.0.0.1:{port}/file"
        reading = pool.submit(patient.read, url, 0, SIZE, bytearray().extend, location="it", interrupt=interrupt)
        while f":{port:04X} 02" not in Path("/proc/net/tcp").read_text():  # 02: it waits for an answer
            os.sched_yield()
        interrupt.set()
        with pytest.raises(UnavailableError, match="the read was cancelled"):
            reading.result(30)


def test_an_interrupt_ends_a_handshake():
    """A server that accepts the connection and then says nothing."""
    interrupt, patient = CancellationToken(), HttpRanges(fsspec.filesystem("http"), PATIENT)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        url = f"https://127.0.0.1:{server.getsockname()[1]}/file"
        reading = pool.submit(patient.read, url, 0, SIZE, bytearray().extend, location="it", interrupt=interrupt)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b"\x16"  # it begins
            interrupt.set()
            with pytest.raises(UnavailableError, match="the read was cancelled"):
                reading.result(30)
