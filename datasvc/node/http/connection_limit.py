"""Limits of open connections, so that clients without the token cannot keep others out.

A connection is *pending* until the head of its first request has arrived. Then it is given to aiohttp. The limits:

- A first head takes at most `FIRST_HEAD_S`.
- Pending connections are limited per address of the client and in total. Above a limit, a new connection replaces the
  oldest one: ordinary clients send the head at once, so the oldest connection is probably not theirs.
- Connections with an authorized request are limited by `max_connections`; a request above this limit gets a 503
  response. `/healthz` does not count.
- Connections of aiohttp are limited to twice `max_connections`, whether their requests are authorized or not.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Final

from aiohttp import web

FIRST_HEAD_S: Final = 5.0
_MAX_PENDING_PER_ADDRESS: Final = 32
# A client may open many connections in a burst, all of which the event loop accepts before it reads a head. The limit
# per address therefore closes only a connection that is older than this.
_BURST_S: Final = 1.0
# Limit of the connections of aiohttp, as a multiple of `max_connections`. Connections without access count until they
# are answered and closed.
_TOTAL_FACTOR: Final = 2
_NUM_HEALTH: Final = 64  # connections above the total limit that only `/healthz` and `/livez` may use
_MAX_HEAD_BYTES: Final = 16 << 10  # more than aiohttp accepts in one line of a head
_HEALTH: Final = (b"GET /healthz ", b"HEAD /healthz ", b"GET /livez ", b"HEAD /livez ")
_BODY: Final = b'{"error": "too many connections"}'
_REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class BoundedConnections:
    """Protocol factory for `loop.create_server` that limits the connections.

    Args:
        server: aiohttp server, which counts the connections that it has.
        max_connections: maximum number of connections with an authorized request; also of pending connections.

    Attributes:
        num_refused: connections whose request was refused, or that were closed without a request.
    """

    def __init__(self, server: web.Server, max_connections: int) -> None:
        self._server = server
        self._max_connections = max_connections
        self._pending: dict[_FirstHead, None] = {}  # an ordered set, the oldest first
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
        """Count the connection of an authorized request."""
        self._authorized.add(request.protocol)

    def is_authorized(self, request: web.BaseRequest) -> bool:
        """Return whether the connection of a request has had an authorized one."""
        return request.protocol in self._authorized

    def close_pending(self) -> None:
        """Close the connections that have sent no request."""
        for connection in tuple(self._pending):
            connection.abort()

    def add(self, connection: _FirstHead) -> None:
        """Count a new connection as pending; close the oldest of its client, or of all, if there are too many."""
        of_client = [other for other in self._pending if other.client == connection.client]
        if len(of_client) >= _MAX_PENDING_PER_ADDRESS and of_client[0].age_s > _BURST_S:
            self.drop(of_client[0])
        elif len(self._pending) >= self._max_connections:
            self.drop(next(iter(self._pending)))
        self._pending[connection] = None

    def remove(self, connection: _FirstHead) -> None:
        """Count a connection no longer as pending; removing it again does nothing."""
        self._pending.pop(connection, None)

    def drop(self, connection: _FirstHead) -> None:
        """Close a pending connection, and count it as refused."""
        self.num_refused += 1
        connection.abort()

    def protocol_for(self, head: bytes) -> asyncio.Protocol | None:
        """Return the protocol for the connection of a request that begins with `head`; None: it is refused."""
        connections = self._server.connections
        self._authorized.intersection_update(connections)  # remove those that are closed
        is_health = head.startswith(_HEALTH)
        max_total = _TOTAL_FACTOR * self._max_connections + (_NUM_HEALTH if is_health else 0)
        is_full = len(self._authorized) >= self._max_connections
        if len(connections) >= max_total or (is_full and not is_health):
            self.num_refused += 1
            return None
        return self._server()


class _FirstHead(asyncio.Protocol):
    """Protocol of a connection until the head of its first request has arrived.

    Attributes:
        client: text that identifies the client, see `client_of`.
    """

    def __init__(self, connections: BoundedConnections) -> None:
        self._connections = connections
        self._received = bytearray()
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self.client = ""

    @property
    def age_s(self) -> float:
        """Seconds since the connection was accepted."""
        return self._loop.time() - self._began_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.client = client_of(transport.get_extra_info("peername"))
        self._timer = self._loop.call_later(FIRST_HEAD_S, self._connections.drop, self)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._timer is None:  # refused or closed already
            return
        # The four bytes that end the head may begin in the last three bytes received before.
        begin = max(0, len(self._received) - 3)
        self._received += data
        if self._received.find(b"\r\n\r\n", begin) >= 0:
            self._hand_over()
        elif len(self._received) > _MAX_HEAD_BYTES:
            self._connections.drop(self)

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
            # Respond before closing the connection: the response states that the peer may try again.
            self._transport.write(_REFUSAL)
            self._transport.close()
            return
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(received)

    def _end(self) -> None:
        self._connections.remove(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def client_of(peername: object) -> str:
    """Return the text that identifies a client: its IPv4 address, or the network of its IPv6 address."""
    if not isinstance(peername, tuple):
        return ""  # a socket without addresses
    address = ipaddress.ip_address(str(peername[0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    # A machine may use any address of its network of 64 bits, so its single addresses must not count separately.
    return str(ipaddress.ip_network((address, 64), strict=False))
