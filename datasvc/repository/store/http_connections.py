"""HTTP connections for `http_stream`: reused between requests, cancelled from another thread, read without copies.

`Connection` is one connection; `Connections` is the pool of idle ones.
"""

from __future__ import annotations

import errno
import http.client
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

from datasvc.repository.store.cancellation import CancellationToken
from datasvc.repository.store.min_throughput import MinThroughput
from datasvc.repository.store.response_head import read_head

# Servers close idle connections, some after 5 s.
_MAX_IDLE_S = 4.0
_MAX_IDLE = 32  # connections per server
_POLL_MS = 50  # interval at which a connection attempt checks for its cancellation
_TIMEVAL = struct.Struct("ll")  # `struct timeval` of the kernel: seconds and microseconds


class Endpoint(NamedTuple):
    """Address of a server; `scheme` is "http" or "https"."""

    scheme: str
    host: str
    port: int


@dataclass(frozen=True)
class Timeouts:
    """Limits for the time that a client waits for a server.

    Attributes:
        connect_s: maximum time to connect.
        silence_s: maximum time without a byte, and from the first byte of a response to the end of its headers. The
            default is that of botocore: a store may have to load cold data.
        min_bytes_s: minimum throughput in bytes per second, see `MinThroughput`.
        window_s: time of waiting after which the throughput is checked, and a new measurement begins.
    """

    connect_s: float = 15
    silence_s: float = 60
    min_bytes_s: float = 16 << 10
    window_s: float = 60


class Connection:
    """One connection. One thread uses it; only `shut_down` may be called from any thread.

    Args:
        server: address of the server.
        timeouts: limits of waiting.
        interrupt: token that cancels the connection attempt.

    Attributes:
        was_kept: whether the connection has served a request before; if so, the server may have closed it since.

    Raises:
        OSError: the server does not respond, or its certificate is invalid.
    """

    def __init__(self, server: Endpoint, timeouts: Timeouts, interrupt: CancellationToken) -> None:
        self.was_kept = False
        self._timeouts = timeouts
        self._is_tls = server.scheme == "https"
        make_http: Callable[..., http.client.HTTPConnection] = (
            partial(http.client.HTTPSConnection, context=_tls()) if self._is_tls else http.client.HTTPConnection
        )
        self._http = make_http(server.host, server.port, timeout=timeouts.connect_s)
        with ExitStack() as connecting:
            # http.client connects by calling this attribute, which is `socket.create_connection` by default.
            cast("Any", self._http)._create_connection = partial(_connect, interrupt, connecting)  # noqa: SLF001
            self._http.connect()
        self._socket: socket.socket = self._http.sock
        # Use the kernel's timeout: Python's makes the socket non-blocking, and a read then returns after each packet.
        seconds, fraction = divmod(timeouts.silence_s, 1)
        timeout = _TIMEVAL.pack(int(seconds), int(fraction * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._response: http.client.HTTPResponse | None = None
        self._num_buffered: int | None = None  # bytes in the response's buffer; None before its first read

    def send_get(self, target: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send a GET and return the response with an unread body. Raise OSError or HTTPException on failure."""
        # Python's timeout limits the read of the head. For the body, `_receive` turns it off: the kernel's remains.
        self._socket.settimeout(self._timeouts.silence_s)
        self._http.request("GET", target, headers=headers)
        self._response, self._num_buffered = read_head(self._http, silence_s=self._timeouts.silence_s), None
        return self._response

    def read_into(self, buffer: memoryview, throughput: MinThroughput) -> int:
        """Fill the buffer with the next bytes of the response.

        Returns:
            Number of bytes read; less than the buffer's size only at the end of the response or the connection.

        Raises:
            OSError: no bytes arrive, or the throughput is too low.
        """
        filled = 0
        while filled < len(buffer):
            began = time.monotonic()
            num_bytes = self._receive(buffer[filled:])
            if not num_bytes:
                break
            filled += num_bytes
            throughput.add(num_bytes, time.monotonic() - began)
        return filled

    def finish_response(self) -> bool:
        """Finish a response that was read completely, and return whether the connection can be reused."""
        assert self._response is not None
        self._response.close()
        self.was_kept = True
        return not self._response.will_close

    def shut_down(self) -> None:
        """Shut the connection down, from any thread, so that a blocked read returns."""
        _shut_down(self._socket)

    def close(self) -> None:
        """Close the connection."""
        if self._response is not None:
            self._response.close()
        self._http.close()

    def _receive(self, buffer: memoryview) -> int:
        """Read at least one byte of the body into `buffer`, and return the number; 0 at the end."""
        assert self._response is not None
        file = cast("Any", self._response.fp)
        if self._is_tls:
            # Read from the TLS layer: the kernel's socket has only encrypted bytes.
            return cast("int", file.readinto1(buffer))
        if self._num_buffered is None:
            self._num_buffered = len(file.peek())  # bytes of the body that arrived together with the headers
            self._socket.setblocking(True)  # the kernel's timeout still applies
        if self._num_buffered:
            num_bytes = cast("int", file.readinto1(buffer[: self._num_buffered]))
            self._num_buffered -= num_bytes
            return num_bytes
        # Read past the response's buffer, so that the kernel writes into `buffer` and no copy is made.
        try:
            return self._socket.recv_into(buffer, 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError(f"no bytes arrived for {self._timeouts.silence_s} s") from error


class Connections:
    """Pool of idle connections; thread-safe. A forked child starts with an empty pool."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        # By server, oldest first: the time when a connection became idle, and the connection.
        self._idle: defaultdict[Endpoint, list[tuple[float, Connection]]] = defaultdict(list)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        weakref.finalize(self, _close_all, self._idle)

    def acquire(self, server: Endpoint, interrupt: CancellationToken, *, fresh: bool = False) -> Connection:
        """Return an idle connection, or a new one; with `fresh`, always a new one. Raise OSError on failure."""
        self._close_stale()
        with self._lock:
            idle = self._idle[server]
            if idle and not fresh:
                return idle.pop()[1]
        return Connection(server, self._timeouts, interrupt)

    def release(self, server: Endpoint, connection: Connection) -> None:
        """Return a connection to the pool after its last response was read completely."""
        self._close_stale()
        with self._lock:
            idle = self._idle[server]
            if len(idle) < _MAX_IDLE:
                idle.append((time.monotonic(), connection))
                return
        connection.close()

    def _close_stale(self) -> None:
        """Close connections that were idle for too long; in a forked child, all connections of the parent."""
        stale = []
        with self._lock:
            self._drop_after_fork()
            for idle in self._idle.values():
                while idle and time.monotonic() - idle[0][0] >= _MAX_IDLE_S:
                    stale.append(idle.pop(0)[1])
        for connection in stale:
            connection.close()

    def _drop_after_fork(self) -> None:
        # Two processes that share a connection would read each other's responses.
        if self._pid != os.getpid():
            self._pid = os.getpid()
            _close_all(self._idle)


def _connect(
    interrupt: CancellationToken,
    connecting: ExitStack,
    address: tuple[str, int],
    timeout_s: float,
    _source: object,  # passed by http.client; not used
) -> socket.socket:
    """Like socket.create_connection, but `interrupt` cancels the attempt until `connecting` is closed.

    The caller closes `connecting` after the TLS handshake, so `interrupt` cancels the handshake too.
    """
    error: OSError = ConnectionError(f"host name {address[0]} has no address")
    for family, kind, protocol, _, socket_address in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            _await_connection(connection, socket_address, time.monotonic() + timeout_s, interrupt)
            connection.settimeout(timeout_s)
            # `interrupt` shuts down a duplicate, because the TLS handshake takes the descriptor out of this socket.
            duplicate = connecting.enter_context(connection.dup())
            connecting.enter_context(interrupt.on_cancel(partial(_shut_down, duplicate)))
        except OSError as failure:
            connection.close()
            error = failure
        else:
            return connection
    raise error


def _await_connection(
    connection: socket.socket, socket_address: Any, deadline_s: float, interrupt: CancellationToken
) -> None:
    """Connect a socket, and check for a cancellation at intervals. Raise OSError if it does not succeed."""
    connection.setblocking(False)
    code = connection.connect_ex(socket_address)
    if code == errno.EINPROGRESS:
        poller = select.poll()
        poller.register(connection, select.POLLOUT)
        while not poller.poll(_POLL_MS):
            if interrupt.is_set:
                raise ConnectionError("the read was cancelled")
            if time.monotonic() > deadline_s:
                raise TimeoutError("the server does not accept connections")
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        # Call the plain socket's method. The method of ssl drops the TLS state, which another thread may be using.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


@cache
def _tls() -> ssl.SSLContext:
    """Return a context with the system's certificates, like aiohttp; cached, because they are slow to load."""
    return ssl.create_default_context()


def _close_all(idle: dict[Endpoint, list[tuple[float, Connection]]]) -> None:
    for connections in idle.values():
        for _, connection in connections:
            connection.close()
    idle.clear()
