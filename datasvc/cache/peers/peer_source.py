"""A peer (another node) as the source of an object: sends the HTTP requests, and records their failures.

Each stream opens its own connection. This costs little, because transfers are long. And no connection stays open that
a forked process would share.
"""

from __future__ import annotations

import http.client
import io
import os
import select
import socket
import ssl
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlencode, urlsplit

from datasvc.cache.peers.peer_health import PeerHealth
from datasvc.cache.sources.origin_source import Kind, Sink
from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.repository import Digest, ObjectInfo
from datasvc.repository.store.redaction import redact_url

TOKEN_VARIABLE: Final = "DATASVC_TOKEN"  # noqa: S105 - the name of a variable
CA_VARIABLE: Final = "DATASVC_CA"
TLS_NAME_VARIABLE: Final = "DATASVC_TLS_NAME"
_BUFFER_BYTES = 1 << 20
_REFUSALS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "it refuses the token of this node",
    HTTPStatus.FORBIDDEN: "it refuses the token of this node",
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: "its object of this name is shorter",
    HTTPStatus.SERVICE_UNAVAILABLE: "it is busy, or its origin does not answer",
    HTTPStatus.INSUFFICIENT_STORAGE: "it has no space for the object",
}


@dataclass(frozen=True)
class PeerSettings:
    """Connection settings for peers.

    Attributes:
        token: bearer token that peers require; None: they require none.
        ca_file: certificates that verify peers with "https"; None: those of the system.
        tls_name: name in the certificates of the peers; None: the host name of each peer.
        connect_timeout_s: time limit to establish a connection.
        stall_timeout_s: interval of health checks until an answer begins; then the time limit for its headers, and
            for each pause between its bytes.
        answer_timeout_s: time limit until an answer begins; the peer may have to fetch the object first.
        min_bytes_s: lowest accepted rate in bytes per second, measured over `rate_window_s`.
        rate_window_s: seconds over which the rate is measured.

    Raises:
        ConfigError: the token has invalid characters, or a time is not above zero.
    """

    token: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    tls_name: str | None = None
    connect_timeout_s: float = 2
    stall_timeout_s: float = 4
    answer_timeout_s: float = 120
    min_bytes_s: float = 1 << 20
    rate_window_s: float = 5

    def __post_init__(self) -> None:
        if self.token is not None and not (
            self.token.isascii() and self.token.isprintable() and " " not in self.token
        ):
            raise ConfigError(
                "the token has characters that an HTTP header cannot contain; expected printable ASCII without spaces"
            )
        for name in ("connect_timeout_s", "stall_timeout_s", "answer_timeout_s", "rate_window_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected more than 0")

    @classmethod
    def from_environment(cls) -> PeerSettings:
        """Return settings with the token and the certificates of `DATASVC_TOKEN`, `_CA` and `_TLS_NAME`."""
        # An empty variable counts as not set.
        ca_file = os.environ.get(CA_VARIABLE)
        return cls(
            token=os.environ.get(TOKEN_VARIABLE, "").strip() or None,
            ca_file=Path(ca_file) if ca_file else None,
            tls_name=os.environ.get(TLS_NAME_VARIABLE) or None,
        )


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return a context that verifies servers by `ca_file`; None: by the system's certificates. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot read certificates from {ca_file}: {error}; expected a file in PEM format"
        ) from error


def connect(address: str, settings: PeerSettings, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
    """Return an open connection to the node at a URL; its time limit is `settings.stall_timeout_s`.

    Raises:
        OSError: the node does not answer, or TLS fails.
    """
    url = urlsplit(address)
    assert url.hostname is not None
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=settings.connect_timeout_s)
    # Without this, a request on a connection that the node has closed would open another one, without TLS.
    connection.auto_open = 0
    connection.connect()
    try:
        if tls is not None:
            # HTTPSConnection is not used, because it always verifies the host name, which `tls_name` may replace.
            connection.sock = tls.wrap_socket(connection.sock, server_hostname=settings.tls_name or url.hostname)
        connection.sock.settimeout(settings.stall_timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


class PeerSource:
    """One peer as the source of one object.

    Args:
        url: base URL of the peer.
        digest: the object.
        origin_url: repository of the object.
        settings: connection settings.
        health: health of the peer.
        may_fetch: whether the peer fetches the object from there if it lacks it.
        tls: TLS context; None for "http".
    """

    kind: Kind = "peer"

    def __init__(
        self,
        url: str,
        digest: Digest,
        origin_url: str,
        settings: PeerSettings,
        health: PeerHealth,
        *,
        may_fetch: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = url
        self._digest = digest
        # The peer uses its own credentials for the origin, so none are sent to it.
        self._query = {"origin": redact_url(origin_url), **({} if may_fetch else {"fetch": "0"})}
        self._may_fetch = may_fetch
        self._settings = settings
        self._health = health
        self._tls = tls

    def stream(self, info: ObjectInfo, offset: int, length: int, sink: Sink) -> None:
        """Pass the bytes to the sink in order, from the calling thread. For errors see `ObjectSource.stream`."""
        # `Peers` checks only the health of peers that fetch. One that is on trial is not asked for a copy.
        if not self._may_fetch and not self._health.may_request():
            raise UnavailableError(f"{self.name} is not requested again so soon after a failure")
        with closing(self._receive(info, offset, length)) as views:
            # Errors of the sink are not failures of the peer, so the sink is called outside of `_receive`.
            for view in views:
                self._health.record_bytes(len(view))
                sink(offset, view)
                offset += len(view)

    def record_integrity(self, *, intact: bool) -> None:
        """Record whether an object with bytes from the peer had the right digest.

        If the digest was wrong, ask the peer to check its copy. `PeerHealth` then pauses other requests to it.
        """
        self._health.record_integrity(intact=intact)
        if not intact:
            self._request_check()

    def _request_check(self) -> None:
        """Request the peer to verify its copy of the object; ignore the answer, which is not trusted."""
        with suppress(OSError, http.client.HTTPException), closing(self._connect()) as connection:
            path = f"/objects/{self._digest}/check?{urlencode(self._query)}"
            connection.request("POST", path, headers=self._headers())
            read_head(connection, silence_s=self._settings.stall_timeout_s).close()

    def _receive(self, info: ObjectInfo, offset: int, length: int) -> Generator[memoryview, None, None]:
        """Yield the bytes as they arrive. All views share one buffer, so each is valid until the next one."""
        with (
            self._map_errors(),
            closing(self._connect()) as connection,
            closing(self._request(connection, info, offset, length)) as response,
        ):
            throughput = MinThroughput(self._settings.min_bytes_s, self._settings.rate_window_s)
            buffer = memoryview(bytearray(min(_BUFFER_BYTES, length)))
            while length:
                began = time.monotonic()
                # At most one read of the socket per call, so that a low rate is detected.
                num_bytes = response.fp.readinto1(buffer[:length])
                if not num_bytes:
                    raise ConnectionError(f"it closed the connection with {length} bytes missing")
                throughput.add(num_bytes, time.monotonic() - began)
                length -= num_bytes
                yield buffer[:num_bytes]

    def _request(
        self, connection: http.client.HTTPConnection, info: ObjectInfo, offset: int, length: int
    ) -> http.client.HTTPResponse:
        """Request a range of the object; return the checked response, whose body is not read yet."""
        query = urlencode({**self._query, "size": info.size_bytes})
        headers = self._headers()
        if length != info.size_bytes:
            stop = offset + length
            last = "" if stop == info.size_bytes else str(stop - 1)  # "": to the end of the object
            headers["Range"] = f"bytes={offset}-{last}"
        connection.request("GET", f"/objects/{info.digest}?{query}", headers=headers)
        # Read now: `getresponse` removes the socket from the connection if the peer closes it after the answer.
        connected_socket = connection.sock
        silence_s = self._wait_for_answer(connected_socket)
        response = read_head(connection, silence_s=silence_s, head_s=self._settings.stall_timeout_s)
        connected_socket.settimeout(self._settings.stall_timeout_s)
        try:
            self._check(response, info, offset, length)
        except BaseException:
            response.close()
            raise
        return response

    def _check(self, response: http.client.HTTPResponse, info: ObjectInfo, offset: int, length: int) -> None:
        """Raise NotFoundError or ConnectionError unless the response has the requested bytes of the object."""
        status = response.status
        if status == HTTPStatus.NOT_FOUND:
            raise NotFoundError(f"{self.name} does not have the object")
        if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            raise ConnectionError(_REFUSALS.get(status, f"it answers with status {status} {response.reason}"))
        # Checked before the first byte is used: bytes of another range would be written to the wrong place.
        expected_status = HTTPStatus.OK if length == info.size_bytes else HTTPStatus.PARTIAL_CONTENT
        content_range = f"bytes {offset}-{offset + length - 1}/{info.size_bytes}"
        if status != expected_status or response.length != length:
            raise ConnectionError(
                f"it sends {response.length} bytes (status {status}), expected {length} (status {expected_status:d})"
            )
        if status == HTTPStatus.PARTIAL_CONTENT and response.getheader("Content-Range") != content_range:
            raise ConnectionError(f"it sends {response.getheader('Content-Range')!r}, expected {content_range!r}")

    def _wait_for_answer(self, connected_socket: socket.socket) -> float:
        """Wait until an answer begins, as long as health checks succeed; return the time limit of its first byte."""
        deadline = time.monotonic() + self._settings.answer_timeout_s
        poll = select.poll()
        poll.register(connected_socket, select.POLLIN)
        while not poll.poll(1000 * self._settings.stall_timeout_s):  # milliseconds
            if time.monotonic() >= deadline:
                raise TimeoutError(f"it sent no answer within {self._settings.answer_timeout_s} s")
            if not self._is_alive():
                raise TimeoutError(
                    f"it sent no answer for at least {self._settings.stall_timeout_s} s, and then did not answer a "
                    f"health check (limit {self._settings.connect_timeout_s} s)"
                )
        # With TLS, the received bytes may be a message of the protocol, and the answer may take the remaining time.
        remaining_s = 0.0 if self._tls is None else deadline - time.monotonic()
        return max(remaining_s, self._settings.stall_timeout_s)

    def _is_alive(self) -> bool:
        try:
            with closing(self._connect()) as connection:
                connection.sock.settimeout(self._settings.connect_timeout_s)
                connection.request("GET", "/healthz")
                # Any answer counts: a peer that is busy or shutting down still completes this request.
                read_head(connection, silence_s=self._settings.connect_timeout_s).close()
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _connect(self) -> http.client.HTTPConnection:
        return connect(self.name, self._settings, self._tls)

    def _headers(self) -> dict[str, str]:
        return {} if self._settings.token is None else {"Authorization": f"Bearer {self._settings.token}"}

    @contextmanager
    def _map_errors(self) -> Iterator[None]:
        """Record failures in the peer's health, and raise them as errors of datasvc."""
        try:
            yield
        except NotFoundError:
            self._health.record_missing()
            raise
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            self._health.record_failure(reason)
            raise UnavailableError(f"{self.name}: {reason}") from error


# A timeout for silence never ends a stream that sends a few bytes at a time.


class MinThroughput:
    """Check of a sender's throughput over the time that a receiver waits for it.

    The time in which the receiver processes the bytes does not count. Each window is checked on its own, so a fast
    start does not hide a later stall.

    Args:
        min_bytes_s: minimum throughput in bytes per second.
        window_s: length of a window in seconds of waiting.
    """

    def __init__(self, min_bytes_s: float, window_s: float) -> None:
        self._min_bytes_s, self._window_s = min_bytes_s, window_s
        self._num_bytes, self._elapsed_s = 0, 0.0

    def add(self, num_bytes: int, elapsed_s: float) -> None:
        """Count received bytes and the time waited for them.

        Raises:
            TimeoutError: the throughput of the last window is below the minimum.
        """
        self._num_bytes += num_bytes
        self._elapsed_s += elapsed_s
        if self._elapsed_s < self._window_s:
            return
        if self._num_bytes < self._min_bytes_s * self._elapsed_s:
            rate = self._num_bytes / self._elapsed_s
            raise TimeoutError(f"too slow: {rate:.0f} bytes/s, expected at least {self._min_bytes_s:.0f}")
        self._num_bytes, self._elapsed_s = 0, 0.0


# The timeout of a socket applies to each read, so a server that sends one byte at a time would keep its client
# waiting without end. For the body, `MinThroughput` has the same role.


def read_head(
    connection: http.client.HTTPConnection, *, silence_s: float, head_s: float | None = None
) -> http.client.HTTPResponse:
    """Return the response to the request that was sent on a connection, with an unread body.

    Afterwards, the timeout of the socket is `silence_s`.

    Args:
        connection: connection on which a request was sent.
        silence_s: maximum time until the first byte.
        head_s: maximum time from the first byte to the end of the head; None: `silence_s`.

    Raises:
        OSError, http.client.HTTPException: the connection failed, or the response is not HTTP.
        TimeoutError: the first byte, or the whole head, did not arrive in time.
    """
    sock = connection.sock
    timed = _TimedSocket(sock, silence_s, silence_s if head_s is None else head_s)
    # `getresponse` calls this attribute to create the response. Replace its socket by the timed one.
    cast("Any", connection).response_class = lambda _socket, **options: http.client.HTTPResponse(
        cast("socket.socket", timed), **options
    )
    response = connection.getresponse()
    timed.reader.head_has_ended = True
    sock.settimeout(silence_s)
    return response


class _TimedReader(io.RawIOBase):
    """Reads a socket. Until `head_has_ended` is set, both time limits of `read_head` apply; then only the timeout."""

    def __init__(self, sock: socket.socket, silence_s: float, head_s: float) -> None:
        # The connection may be closed before the whole response is read. This stream keeps the socket open.
        self._stream = sock.makefile("rb", buffering=0)
        self._socket = sock
        self._silence_s, self._head_s = silence_s, head_s
        self._deadline_s: float | None = None  # set when the first byte has arrived
        self.head_has_ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self.head_has_ended:
            return cast("int | None", cast("Any", self._stream).readinto(buffer))
        remaining_s = self._silence_s if self._deadline_s is None else self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError(f"it did not send a whole head within {self._head_s:g} s")
        self._socket.settimeout(remaining_s)
        num_bytes = cast("int | None", cast("Any", self._stream).readinto(buffer))
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._head_s
        return num_bytes

    def close(self) -> None:
        self._stream.close()
        super().close()


class _TimedSocket:
    """Stands for a socket in `http.client.HTTPResponse`, which uses only its method `makefile`."""

    def __init__(self, sock: socket.socket, silence_s: float, head_s: float) -> None:
        self.reader = _TimedReader(sock, silence_s, head_s)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self.reader)
