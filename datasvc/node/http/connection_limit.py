"""A bound on open connections, idle ones included: those above it get one answer and are closed."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

_BODY: Final = b'{"error": "too many connections"}'
_ANSWER: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class _Refusal(asyncio.Protocol):
    """Answers before a request was read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(_ANSWER)
        transport.close()


class BoundedConnections:
    """Makes the protocol of each new connection: pass it to `loop.create_server`.

    Args:
        server: of aiohttp, which knows its open connections.
        max_connections: more are refused.
    """

    def __init__(self, server: web.Server, max_connections: int) -> None:
        self._server = server
        self._max = max_connections
        self.num_refused = 0

    def __call__(self) -> asyncio.Protocol:
        """Return what talks on a new connection."""
        if self.num_open < self._max:
            return self._server()
        self.num_refused += 1
        return _Refusal()

    @property
    def num_open(self) -> int:
        """Connections that are open now."""
        return len(self._server.connections)
