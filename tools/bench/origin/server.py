"""The forwarding server of an origin, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

from .faults import CUT, FLIP, REFUSE, STALL, UNAVAILABLE, Exchange, Fault
from .pacing import Limits, Pacer, choose_step_bytes
from .wire import UNTIL_CLOSE, Head, Wire

# Bytes count when the kernel takes them; a small buffer keeps that near to what the client got.
_SEND_BUFFER_BYTES: Final = 512 << 10
_BACKLOG: Final = 1024
_REFUSED: Final = b"<Error><Code>SlowDown</Code></Error>"
_BODILESS: Final = frozenset({"204", "304"})
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)

Choose = Callable[[Exchange], "Fault | None"]


class _HangUpError(ConnectionError):
    """This connection is to end here, as a fault wants it."""


class Origin:
    """A forwarding HTTP server before a store, running from `__enter__` to `__exit__`.

    Every answer comes over a connection of its own from the store, so what the store does with its connections does
    not show. Signed S3 requests pass, as the host that the client signed is passed on.

    Args:
        upstream: the URL of the store: "http://127.0.0.1:7480". Its path is not used.
        limits: how fast, how late.
        host: the address to listen on.
        port: the port; 0 chooses one.
        choose: called with every exchange before it goes on; says what goes wrong with it. Runs in the origin's
            thread, in order of arrival; may be set anew at any time.
    """

    def __init__(
        self,
        upstream: str,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        choose: Choose | None = None,
    ) -> None:
        split = urlsplit(upstream)
        self._upstream = (split.hostname or "127.0.0.1", split.port or 80)
        self._limits = limits
        self._total = Pacer(limits.total_rate)
        self.choose = choose
        self._lock = threading.Lock()
        self._exchanges: list[Exchange] = []
        self._num_exchanges = 0
        self._listener = socket.create_server((host, port), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._resumed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="origin")

    def __enter__(self) -> Self:
        self._serving = self._loop.create_task(self._serve())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()
        self._loop.close()
        if not self._serving.cancelled():
            self._serving.result()

    def exchanges(self) -> list[Exchange]:
        """Return what was asked since the start or `forget`, in order of arrival; what is under way still changes."""
        with self._lock:
            return list(self._exchanges)

    def num_bytes(self, containing: str = "") -> int:
        """Return the bytes of answers' bodies to paths with `containing` in them: "/objects/"."""
        return sum(exchange.num_bytes for exchange in self.exchanges() if containing in exchange.path)

    def counts(self) -> dict[str, Any]:
        """Return `{"requests": int, "bytes": int, "paths": {path without query: bytes}}` since start or `forget`."""
        exchanges = self.exchanges()
        paths: Counter[str] = Counter()
        for exchange in exchanges:
            paths[exchange.path.partition("?")[0]] += exchange.num_bytes
        return {"requests": len(exchanges), "bytes": paths.total(), "paths": paths}

    def forget(self) -> None:
        """Count anew from here."""
        with self._lock:
            self._exchanges.clear()

    def resume(self) -> None:
        """Let every stalled answer go on, and those that stall later."""
        self._loop.call_soon_threadsafe(self._resumed.set)

    def _run(self) -> None:
        self._loop.run_until_complete(asyncio.wait([self._serving]))

    async def _serve(self) -> None:
        with self._listener:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    connection, (client, *_) = await self._loop.sock_accept(self._listener)
                    tasks.create_task(self._attend(connection, client))

    async def _attend(self, connection: socket.socket, client: str) -> None:
        """Answer the requests of one connection until either side ends it."""
        with connection, suppress(OSError):
            _prepare(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            wire, pacer = Wire(connection), Pacer(self._limits.connection_rate)
            while (head := await wire.read_head()) is not None:
                exchange = self._note(head, client)
                if exchange.fault and exchange.fault.kind == REFUSE:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                    return
                if not await self._answer(wire, head, exchange, pacer):
                    return

    def _note(self, head: Head, client: str) -> Exchange:
        method, path, _ = head.words
        with self._lock:
            self._num_exchanges += 1
            exchange = Exchange(self._num_exchanges, client, method, path, head.field("range"))
            self._exchanges.append(exchange)
        exchange.fault = self.choose(exchange) if self.choose else None
        return exchange

    async def _answer(self, wire: Wire, head: Head, exchange: Exchange, pacer: Pacer) -> bool:
        """Forward a request and its answer; returns whether the connection can take another."""
        if "100-continue" in head.field("expect").lower():
            await wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if exchange.fault and exchange.fault.kind == UNAVAILABLE:
            await self._forward_body(wire, None, head, pacer)
            await self._wait_until(self._loop.time() + self._limits.latency_s)
            await _refuse_service(wire, exchange, HTTPStatus.SERVICE_UNAVAILABLE)
            return _keeps_open(head)
        with socket.socket() as connection:
            _prepare(connection)
            try:
                await self._loop.sock_connect(connection, self._upstream)
            except OSError:
                await _refuse_service(wire, exchange, HTTPStatus.BAD_GATEWAY)
                return False
            upstream = Wire(connection)
            method, path, _ = head.words
            await upstream.send(head.forwarded(f"{method} {path} HTTP/1.1", ("Connection", "close")))
            await self._forward_body(wire, upstream, head, pacer)
            earliest = self._loop.time() + self._limits.latency_s
            answer = await upstream.read_head()
            if answer is None:
                return False
            await self._wait_until(earliest)
            return await self._forward_answer(upstream, wire, answer, exchange, pacer) and _keeps_open(head)

    async def _forward_body(self, wire: Wire, upstream: Wire | None, head: Head, pacer: Pacer) -> None:
        """Send a request's body on, or nowhere."""
        pacer.begin(self._loop.time())
        async for piece, is_content in wire.read_body(head.body_length(default=0), self._step_bytes(None)):
            if is_content:
                await self._wait_turn(len(piece), pacer)
            if upstream is not None:
                await upstream.send(piece)

    async def _forward_answer(self, upstream: Wire, wire: Wire, head: Head, exchange: Exchange, pacer: Pacer) -> bool:
        """Send an answer on; returns whether its end shows without closing the connection."""
        _, status, reason = head.words
        exchange.status = int(status)
        has_body = exchange.method != "HEAD" and status not in _BODILESS
        length = head.body_length(default=UNTIL_CLOSE) if has_body else 0
        closes = [("Connection", "close")] if length == UNTIL_CLOSE else []
        await wire.send(head.forwarded(f"HTTP/1.1 {status} {reason}", *closes))
        fault = exchange.fault
        slow = Pacer(fault.rate if fault else None)
        pacer.begin(self._loop.time())
        async for piece, is_content in upstream.read_body(length, self._step_bytes(slow.rate)):
            if is_content:
                await self._wait_turn(len(piece), pacer, slow)
                await _send_content(wire, piece, exchange, self._resumed)
            else:
                await wire.send(piece)
        return length != UNTIL_CLOSE

    def _step_bytes(self, rate: float | None) -> int:
        return choose_step_bytes(rate, self._limits.connection_rate, self._limits.total_rate)

    async def _wait_turn(self, num_bytes: int, *pacers: Pacer) -> None:
        now = self._loop.time()
        await self._wait_until(max(pacer.reserve(num_bytes, now) for pacer in (self._total, *pacers)))

    async def _wait_until(self, moment: float) -> None:
        delay = moment - self._loop.time()
        if delay > 0:
            await asyncio.sleep(delay)


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _send_content(wire: Wire, piece: memoryview, exchange: Exchange, resumed: asyncio.Event) -> None:
    """Send a piece of a body as its fault wants it, and count it. Raises OSError where the answer is to end here."""
    fault = exchange.fault
    at = fault.offset - exchange.num_bytes if fault else -1
    if fault is not None and 0 <= at < len(piece):
        if fault.kind == FLIP:
            piece[at] ^= 0xFF
        elif fault.kind in {CUT, STALL}:
            exchange.num_bytes += at
            await wire.send(piece[:at])
            piece = piece[at:]
            if fault.kind == CUT:
                raise _HangUpError
            await resumed.wait()
    # Counted first: who has the last byte may ask for the count at once.
    exchange.num_bytes += len(piece)
    await wire.send(piece)


async def _refuse_service(wire: Wire, exchange: Exchange, status: HTTPStatus) -> None:
    exchange.status = status
    lines = (
        f"HTTP/1.1 {status} {status.phrase}",
        "Content-Type: application/xml",
        f"Content-Length: {len(_REFUSED)}",
    )
    await wire.send("\r\n".join((*lines, "", "")).encode() + _REFUSED)


def _keeps_open(request: Head) -> bool:
    return request.words[2] == "HTTP/1.1" and request.field("connection").lower() != "close"
