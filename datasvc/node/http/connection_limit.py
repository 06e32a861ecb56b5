"""Limits of open connections, so that clients without the token cannot keep others out.

A connection counts as *pending* until the head of its first request has arrived, and is refused before aiohttp gets
it if it is one too many. The limits:

- A first head takes at most `FIRST_HEAD_S`.
- Connections without an authorized request are limited per address of the client.
- Pending connections are limited in total: a new one takes the place of the oldest.
- The others are limited by `max_connections`, except for requests of `/healthz`, which is answered at any load.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Final

from aiohttp import web

FIRST_HEAD_S: Final = 5.0
_MAX_PENDING_PER_ADDRESS: Final = 32
_MAX_HEAD_BYTES: Final = 16 << 10  # more than aiohttp accepts in a line
_HEALTH: Final = (b"GET /healthz ", b"HEAD /healthz ")
_BODY: Final = b'{"error": "too many connections"}'
_REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class BoundedConnections:
    """Protocol factory for `loop.create_server` that limits the connections.

    Args:
        server: aiohttp server, which counts the connections that it has.
        max_connections: maximum number of these; further ones are refused. Also the maximum of pending ones.

    Attributes:
        num_refused: connections that were refused, or dropped without a first request.
    """

    def __init__(self, server: web.Server, max_connections: int) -> None:
        self._server = server
        self._max = max_connections
        self._pending: dict[_FirstHead, str] = {}  # client by connection, the oldest first
        self._authorized: set[object] = set()
        self.num_refused = 0

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return _FirstHead(self)

    @property
    def num_open(self) -> int:
        """Number of open connections that have sent the head of a request."""
        return len(self._server.connections)

    def authorize(self, request: web.Request) -> None:
        """Lift the limit of its client's address from the connection of an authorized request."""
        self._authorized.add(request.protocol)

    def close_pending(self) -> None:
        """Close the connections that have sent no request."""
        for connection in tuple(self._pending):
            connection.abort()

    def admit(self, connection: _FirstHead, address: str) -> bool:
        """Count a new connection as pending, unless its client has too many without an authorized request."""
        connections = self._server.connections
        self._authorized.intersection_update(connections)
        others = [
            *self._pending.values(),
            *(client_of(other.peername) for other in connections if other not in self._authorized),
        ]
        if others.count(address) >= min(_MAX_PENDING_PER_ADDRESS, self._max):
            self.num_refused += 1
            return False
        if len(self._pending) >= self._max:
            # It had more time to send a head than any other.
            next(iter(self._pending)).abort()
            self.num_refused += 1
        self._pending[connection] = address
        return True

    def forget(self, connection: _FirstHead) -> None:
        """End the count of a pending connection; forgetting it again does nothing."""
        self._pending.pop(connection, None)

    def count_refused(self) -> None:
        """Count a connection that sent no head in time."""
        self.num_refused += 1

    def protocol_for(self, head: bytes) -> asyncio.Protocol | None:
        """Return the protocol for the connection of a request that begins with `head`; None: it is refused."""
        if self.num_open >= self._max and not head.startswith(_HEALTH):
            self.num_refused += 1
            return None
        return self._server()


class _FirstHead(asyncio.Protocol):
    """Protocol of a connection until the head of its first request has arrived."""

    def __init__(self, connections: BoundedConnections) -> None:
        self._connections = connections
        self._received = bytearray()
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._connections.admit(self, client_of(transport.get_extra_info("peername"))):
            self._timer = asyncio.get_running_loop().call_later(FIRST_HEAD_S, self._give_up)
        else:
            self._refuse()

    def data_received(self, data: bytes) -> None:
        if self._timer is None:  # refused already
            return
        # The end of the head may begin in the bytes before.
        begin = max(0, len(self._received) - 3)
        self._received += data
        if self._received.find(b"\r\n\r\n", begin) >= 0:
            self._hand_over()
        elif len(self._received) > _MAX_HEAD_BYTES:
            self._give_up()

    def connection_lost(self, _error: Exception | None) -> None:
        self._end()

    def abort(self) -> None:
        """Close the connection without an answer."""
        self._end()
        self._transport.abort()

    def _hand_over(self) -> None:
        self._end()
        received = bytes(self._received)
        protocol = self._connections.protocol_for(received)
        if protocol is None:
            self._refuse()
            return
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(received)

    def _give_up(self) -> None:
        self._connections.count_refused()
        self.abort()

    def _refuse(self) -> None:
        # A response, instead of a closed connection, tells the peer that it may try again.
        self._transport.write(_REFUSAL)
        self._transport.close()

    def _end(self) -> None:
        self._connections.forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def client_of(peername: object) -> str:
    """Return the text that identifies a client: its IPv4 address, or the first 64 bits of its IPv6 address."""
    if not isinstance(peername, tuple):
        return ""
    address = ipaddress.ip_address(str(peername[0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    # One machine may have every address of such a network.
    return str(ipaddress.ip_network((address, 64), strict=False))
