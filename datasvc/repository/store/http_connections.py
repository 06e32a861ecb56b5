"""Connections to HTTP servers: kept for the next request, and read straight from their sockets."""

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
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

from datasvc.repository.store.cancellation import CancellationToken
from datasvc.repository.store.min_throughput import MinThroughput

# Servers drop connections that nobody uses, some after 5 s.
_KEPT_S = 4.0
_MAX_KEPT = 32
_LOOK_MS = 50
_TIMEVAL = struct.Struct("ll")


@dataclass(frozen=True)
class Endpoint:
    """Whom a connection leads to.

    Attributes:
        scheme: "http" or "https".
        host: name or number.
        port: its port.
    """

    scheme: str
    host: str
    port: int


@dataclass(frozen=True)
class Timeouts:
    """How long a server is waited for.

    Attributes:
        connect_s: until a connection stands.
        silence_s: without a byte. A store that has to find cold data first may need it: as long as botocore waits.
        min_bytes_s: one that gives less over `window_s` of waiting is too slow.
        window_s: see there.
    """

    connect_s: float = 15
    silence_s: float = 60
    min_bytes_s: float = 16 << 10
    window_s: float = 60


class Connection:
    """One connection. For one thread, but for `cut`.

    Args:
        server: to whom.
        patience: how long to wait.
        interrupt: ends the wait for it to stand.

    Attributes:
        was_kept: whether an answer came over it before: the server may have closed it since.

    Raises:
        OSError: nobody answers there, or it is not who it should be.
    """

    def __init__(self, server: Endpoint, patience: Timeouts, interrupt: CancellationToken) -> None:
        self.was_kept = False
        self._patience = patience
        self._is_tls = server.scheme == "https"
        self._http = http.client.HTTPConnection(server.host, server.port, timeout=patience.connect_s)
        if self._is_tls:
            self._http = http.client.HTTPSConnection(
                server.host, server.port, timeout=patience.connect_s, context=_tls()
            )
        with ExitStack() as connecting:
            # The place that http.client keeps for other ways to connect.
            cast("Any", self._http)._create_connection = partial(_connect, interrupt, connecting)  # noqa: SLF001
            self._http.connect()
        self._socket: socket.socket = self._http.sock
        # For reads that wait in the kernel until the buffer is full, and not in Python for each packet.
        seconds, fraction = divmod(patience.silence_s, 1)
        timeout = _TIMEVAL.pack(int(seconds), int(fraction * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._answer: http.client.HTTPResponse | None = None
        self._num_ahead: int | None = None

    def ask(self, target: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Return the answer to a GET, its body not read. Raises OSError, HTTPException."""
        self._socket.settimeout(self._patience.silence_s)
        self._http.request("GET", target, headers=headers)
        self._answer, self._num_ahead = self._http.getresponse(), None
        return self._answer

    def read_into(self, buffer: memoryview, pace: MinThroughput) -> int:
        """Fill the buffer with what comes next of the answer.

        Returns:
            How many bytes came: fewer only where the answer or the connection ends.

        Raises:
            OSError: nothing comes, or too little.
        """
        filled = 0
        while filled < len(buffer):
            began = time.monotonic()
            num_bytes = self._receive(buffer[filled:])
            if not num_bytes:
                break
            filled += num_bytes
            pace.add(num_bytes, time.monotonic() - began)
        return filled

    def end_answer(self) -> bool:
        """Say that all of the answer was read; returns whether the connection is good for another request."""
        assert self._answer is not None
        self._answer.close()
        self.was_kept = True
        return not self._answer.will_close

    def cut(self) -> None:
        """End the connection, from any thread: who reads from it wakes."""
        _cut(self._socket)

    def close(self) -> None:
        """Close it."""
        if self._answer is not None:
            self._answer.close()
        self._http.close()

    def _receive(self, buffer: memoryview) -> int:
        assert self._answer is not None
        file = cast("Any", self._answer.fp)
        if self._is_tls:
            return cast("int", file.readinto1(buffer))
        if self._num_ahead is None:
            self._num_ahead = len(file.peek())  # what came together with the head
            self._socket.setblocking(True)  # but for the timeout set above
        if self._num_ahead:
            num_bytes = cast("int", file.readinto1(buffer[: self._num_ahead]))
            self._num_ahead -= num_bytes
            return num_bytes
        try:
            return self._socket.recv_into(buffer, 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError(f"nothing came for {self._patience.silence_s} s") from error


class Connections:
    """Connections that wait for another request. Safe for threads; a forked child begins with none.

    Args:
        patience: of those that are made.
    """

    def __init__(self, patience: Timeouts) -> None:
        self._patience = patience
        self._kept: defaultdict[Endpoint, list[tuple[float, Connection]]] = defaultdict(list)
        self._lock = threading.Lock()
        self._process = os.getpid()
        weakref.finalize(self, _close_all, self._kept)

    def take(self, server: Endpoint, interrupt: CancellationToken, *, fresh: bool = False) -> Connection:
        """Return a connection: one that was given back a moment ago, or a new one. Raises OSError."""
        self._close_stale()
        with self._lock:
            kept = self._kept[server]
            if kept and not fresh:
                return kept.pop()[1]
        return Connection(server, self._patience, interrupt)

    def give_back(self, server: Endpoint, connection: Connection) -> None:
        """Keep a connection whose last answer was read to its end."""
        self._close_stale()
        with self._lock:
            kept = self._kept[server]
            if len(kept) < _MAX_KEPT:
                kept.append((time.monotonic(), connection))
                return
        connection.close()

    def _close_stale(self) -> None:
        """Close what nobody has used for too long, oldest first; and in a forked child all of the parent's."""
        stale = []
        with self._lock:
            self._forget_of_parent()
            for kept in self._kept.values():
                while kept and time.monotonic() - kept[0][0] >= _KEPT_S:
                    stale.append(kept.pop(0)[1])
        for connection in stale:
            connection.close()

    def _forget_of_parent(self) -> None:
        # Two processes that write to one connection get each other's answers.
        if self._process != os.getpid():
            self._process = os.getpid()
            _close_all(self._kept)


def _connect(
    interrupt: CancellationToken,
    connecting: ExitStack,
    address: tuple[str, int],
    timeout_s: float,
    _source: object,
) -> socket.socket:
    """Connect as socket.create_connection does, but end when interrupted, until `connecting` is closed."""
    error: OSError = ConnectionError(f"no address for {address[0]}")
    for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            _await_connection(connection, place, time.monotonic() + timeout_s, interrupt)
            connection.settimeout(timeout_s)
            # For the handshake of TLS, which is to come and takes the descriptor out of this socket.
            twin = connecting.enter_context(connection.dup())
            connecting.enter_context(interrupt.cutting(partial(_cut, twin)))
        except OSError as failure:
            connection.close()
            error = failure
        else:
            return connection
    raise error


def _await_connection(connection: socket.socket, place: Any, deadline_s: float, interrupt: CancellationToken) -> None:
    connection.setblocking(False)
    code = connection.connect_ex(place)
    if code == errno.EINPROGRESS:
        waiting = select.poll()
        waiting.register(connection, select.POLLOUT)
        while not waiting.poll(_LOOK_MS):
            if interrupt.is_set:
                raise ConnectionError("nobody waits for it any more")
            if time.monotonic() > deadline_s:
                raise TimeoutError("it does not accept connections")
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        # As of a plain socket: otherwise TLS loses its state while another thread reads with it.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


@cache
def _tls() -> ssl.SSLContext:
    """Return what aiohttp uses by itself: the system's certificates, which take a while to load."""
    return ssl.create_default_context()


def _close_all(kept: dict[Endpoint, list[tuple[float, Connection]]]) -> None:
    for connections in kept.values():
        for _, connection in connections:
            connection.close()
    kept.clear()
