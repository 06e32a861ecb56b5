"""Reads the head of an HTTP response (status and headers) within a time limit.

The timeout of a socket applies to each read, so a server that sends one byte at a time would keep its client waiting
without end. For the body, `MinThroughput` has the same role.
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
