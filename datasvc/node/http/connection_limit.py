"""Limit of open connections, including idle ones; a connection above it gets a 503 response and is closed."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

_BODY: Final = b'{"error": "too many connections"}'
_RESPONSE: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class _Refusal(asyncio.Protocol):
    """Protocol that sends the 503 response without reading a request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(_RESPONSE)
        transport.close()


class BoundedConnections:
    """Protocol factory for `loop.create_server` that limits the connections.

    Args:
        server: aiohttp server, which counts its open connections.
        max_connections: maximum number of open connections; further ones are refused.
    """

    def __init__(self, server: web.Server, max_connections: int) -> None:
        self._server = server
        self._max = max_connections
        self.num_refused = 0

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        if self.num_open < self._max:
            return self._server()
        # A response, instead of a closed connection, tells the peer that it may try again.
        self.num_refused += 1
        return _Refusal()

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._server.connections)
