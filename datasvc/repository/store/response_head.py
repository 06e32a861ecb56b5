"""Reads the head of an HTTP response (status and headers) within a time limit.

The timeout of a socket applies to each read, so a server that sends one byte at a time would keep its client waiting
without end. Reads from web servers and from peers use this module; `MinThroughput` limits the body.
"""

from __future__ import annotations

import http.client
import io
import time
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import socket


def read_head(
    connection: http.client.HTTPConnection, *, silence_s: float, head_s: float | None = None
) -> http.client.HTTPResponse:
    """Return the response to the request that was sent on a connection, with an unread body.

    Afterwards, the timeout of the socket is `silence_s`.

    Args:
        connection: a connected connection.
        silence_s: longest time until the first byte. Seconds.
        head_s: longest time from the first byte to the end of the head; None: `silence_s`. Seconds.

    Raises:
        OSError, http.client.HTTPException: the connection failed, or the response is not HTTP.
        TimeoutError: the head did not arrive in time.
    """
    connected = connection.sock
    timed = _TimedSocket(connected, silence_s, silence_s if head_s is None else head_s)
    # http.client creates the response by calling this attribute.
    cast("Any", connection).response_class = lambda _socket, **options: http.client.HTTPResponse(
        cast("socket.socket", timed), **options
    )
    response = connection.getresponse()
    timed.reader.has_ended = True
    connected.settimeout(silence_s)
    return response


class _TimedReader(io.RawIOBase):
    """Reads a socket; until `has_ended`, the deadline of the head limits each read."""

    def __init__(self, connected: socket.socket, silence_s: float, head_s: float) -> None:
        # The stream of the socket, because it keeps the socket open until it is closed itself.
        self._stream = connected.makefile("rb", buffering=0)
        self._socket = connected
        self._silence_s, self._head_s = silence_s, head_s
        self._deadline_s: float | None = None
        self.has_ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self.has_ended:
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
    """What `http.client.HTTPResponse` uses of a socket: the creation of its stream."""

    def __init__(self, connected: socket.socket, silence_s: float, head_s: float) -> None:
        self.reader = _TimedReader(connected, silence_s, head_s)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self.reader)
