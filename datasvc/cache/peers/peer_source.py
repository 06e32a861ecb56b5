"""One other node as the source of an object: the HTTP requests that it comes over, and what counts as a failure.

A connection of its own for each stream: what is asked for is long, and nothing is left open that a fork could copy.
"""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from datasvc.cache.peers.peer_health import PeerHealth
from datasvc.cache.sources.origin_source import Kind
from datasvc.cache.sources.request_gate import Sink
from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.repository import Digest, ObjectInfo
from datasvc.repository.store.min_throughput import MinThroughput
from datasvc.repository.store.storage import redact_url

_BUFFER_BYTES = 1 << 20
_OK, _PARTIAL = 200, 206
_MISSING = 404
_REFUSALS = {
    401: "it refuses our token",
    403: "it refuses our token",
    416: "it has fewer bytes under this name",
    503: "it is busy, or its origin does not answer",
    507: "it has no room for the object",
}


@dataclass(frozen=True)
class PeerSettings:
    """How peers are talked to.

    Attributes:
        token: what they ask for; None where they ask for nothing.
        ca_file: certificates that vouch for peers with "https"; None takes the system's.
        tls_name: the name in the peers' certificates; None expects each to have its host's.
        connect_timeout_s: until a connection stands.
        stall_timeout_s: without a byte, once an answer has begun; before that, without a sign of life.
        answer_timeout_s: until an answer begins: a peer that lives may have to fetch the object itself.
        min_bytes_s: a peer that gives less over `rate_window_s` is too slow.
        rate_window_s: see there.
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
            raise ConfigError("the token has characters that no HTTP header can carry; expected printable ASCII")
        for name in ("connect_timeout_s", "stall_timeout_s", "answer_timeout_s", "rate_window_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected more than 0")


class PeerSource:
    """One peer as the source of one object, over a connection of its own per stream.

    Args:
        url: the peer's base URL.
        digest: the object.
        origin_url: the repository to fetch from if it lacks the object; None: it shall not fetch.
        settings: how to talk to it.
        health: its record.
        tls: None for "http".
    """

    kind: Kind = "peer"

    def __init__(
        self,
        url: str,
        digest: Digest,
        origin_url: str | None,
        settings: PeerSettings,
        health: PeerHealth,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = url
        self._digest = digest
        self._origin = {} if origin_url is None else {"origin": redact_url(origin_url)}
        self._settings = settings
        self._health = health
        self._tls = tls

    def stream(self, info: ObjectInfo, offset: int, length: int, sink: Sink) -> None:
        """See `Source`: in order, from the calling thread."""
        # A peer that shall fetch was chosen a moment ago; one that is a last resort is chosen when it comes to that.
        if not self._origin and not self._health.may_ask():
            raise UnavailableError(f"{self.name} is left alone after it failed")
        with closing(self._pieces(info, offset, length)) as pieces:
            for view in pieces:
                self._health.received(len(view))
                sink(offset, view)
                offset += len(view)

    def judge(self, *, intact: bool) -> None:
        """See `Source`: whoever gave wrong bytes is left alone for long, and told to look at its disk."""
        self._health.judged(intact=intact)
        if not intact:
            self._have_it_checked()

    def _have_it_checked(self) -> None:
        """Ask the peer to read its object again. Nothing depends on the answer: it may be no honest one."""
        with suppress(OSError, http.client.HTTPException), closing(self._connected()) as connection:
            connection.request("POST", f"/objects/{self._digest}/check", headers=self._headers())
            connection.getresponse().close()

    def _pieces(self, info: ObjectInfo, offset: int, length: int) -> Generator[memoryview, None, None]:
        """Yield the bytes as they come, in one buffer that is used again and again."""
        with (
            self._translated(),
            closing(self._connected()) as connection,
            closing(self._ask(connection, info, offset, length)) as response,
        ):
            pace = MinThroughput(self._settings.min_bytes_s, self._settings.rate_window_s)
            buffer = memoryview(bytearray(min(_BUFFER_BYTES, length)))
            while length:
                began = time.monotonic()
                # One read of the socket at most, so that a trickle is seen as such.
                num_bytes = response.fp.readinto1(buffer[:length])
                if not num_bytes:
                    raise ConnectionError(f"it hung up with {length} bytes to go")
                pace.add(num_bytes, time.monotonic() - began)
                length -= num_bytes
                yield buffer[:num_bytes]

    def _ask(
        self, connection: http.client.HTTPConnection, info: ObjectInfo, offset: int, length: int
    ) -> http.client.HTTPResponse:
        query = urlencode({**self._origin, "size": info.size_bytes})
        headers = self._headers()
        if length != info.size_bytes:
            stop = offset + length
            headers["Range"] = f"bytes={offset}-{'' if stop == info.size_bytes else stop - 1}"
        connection.request("GET", f"/objects/{info.digest}?{query}", headers=headers)
        connected = connection.sock  # an answer that ends the connection takes it away from there
        self._wait_for_answer(connected)
        response = connection.getresponse()
        connected.settimeout(self._settings.stall_timeout_s)
        try:
            self._check(response, info, offset, length)
        except BaseException:
            response.close()
            raise
        return response

    def _check(self, response: http.client.HTTPResponse, info: ObjectInfo, offset: int, length: int) -> None:
        status = response.status
        if status == _MISSING:
            raise NotFoundError(f"{self.name} does not have it")
        if status not in (_OK, _PARTIAL):
            raise ConnectionError(_REFUSALS.get(status, f"answers {status} {response.reason}"))
        expected = _OK if length == info.size_bytes else _PARTIAL
        content_range = f"bytes {offset}-{offset + length - 1}/{info.size_bytes}"
        if status != expected or response.length != length:
            raise ConnectionError(f"sends {response.length} bytes (status {status}), asked for {length}")
        if status == _PARTIAL and response.getheader("Content-Range") != content_range:
            raise ConnectionError(f"sends {response.getheader('Content-Range')!r}, asked for {content_range!r}")

    def _wait_for_answer(self, connected: socket.socket) -> None:
        """Wait until an answer begins, as long as the peer lives: it may be fetching the object itself."""
        deadline = time.monotonic() + self._settings.answer_timeout_s
        poll = select.poll()
        poll.register(connected, select.POLLIN)
        while not poll.poll(1000 * self._settings.stall_timeout_s):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no answer in {self._settings.answer_timeout_s} s")
            if not self._is_alive():
                raise TimeoutError(f"no sign of life in {self._settings.stall_timeout_s} s")
        if self._tls is not None:  # what came may be a message of TLS itself
            connected.settimeout(max(deadline - time.monotonic(), self._settings.stall_timeout_s))

    def _is_alive(self) -> bool:
        try:
            with closing(self._connected()) as connection:
                connection.sock.settimeout(self._settings.connect_timeout_s)
                connection.request("GET", "/healthz")
                # Whatever it says: one that is busy or about to stop still has our request in hand.
                connection.getresponse().close()
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _connected(self) -> http.client.HTTPConnection:
        url = urlsplit(self.name)
        assert url.hostname is not None
        connection = http.client.HTTPConnection(url.hostname, url.port)
        timeout_s = self._settings.connect_timeout_s
        plain = socket.create_connection((url.hostname, url.port), timeout=timeout_s)
        try:
            connection.sock = plain
            if self._tls is not None:
                connection.sock = self._tls.wrap_socket(
                    plain, server_hostname=self._settings.tls_name or url.hostname
                )
            connection.sock.settimeout(self._settings.stall_timeout_s)
        except BaseException:
            plain.close()
            raise
        return connection

    def _headers(self) -> dict[str, str]:
        return {} if self._settings.token is None else {"Authorization": f"Bearer {self._settings.token}"}

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what can go wrong with a peer into our errors, and keep it in the peer's record."""
        try:
            yield
        except NotFoundError:
            self._health.missing()
            raise
        except (OSError, http.client.HTTPException) as error:
            self._health.failed()
            raise UnavailableError(f"{self.name}: {error or type(error).__name__}") from error
