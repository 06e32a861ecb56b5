"""HTTP/1.1 messages on a socket: heads are read, bodies pass in pieces without a copy.

Messages are RFC 9112's; only what a forwarding server must know of them is here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

_BUFFER_BYTES: Final = 256 << 10
_END_OF_HEAD: Final = b"\r\n\r\n"
_END_OF_LINE: Final = b"\r\n"
# They concern one connection, not the message; a client that waits for "100 Continue" is answered here.
_OF_THE_CONNECTION: Final = frozenset({"connection", "keep-alive", "proxy-connection", "expect"})

UNTIL_CLOSE: Final = -1
CHUNKED: Final = -2


class BrokenMessageError(ConnectionError):
    """The other side sent what is no HTTP message, or half of one."""


@dataclass(frozen=True)
class Head:
    """The first line of a message and its fields.

    Attributes:
        words: the three parts of the first line.
        fields: name and value, in the order they came.
    """

    words: tuple[str, str, str]
    fields: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, content: bytes) -> Head:
        """Return the head that `content` is, without its empty line. Raises BrokenMessageError."""
        first, *lines = content.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        fields = [line.partition(":") for line in lines]
        if len(words) < 2 or not all(colon for _, colon, _ in fields):
            raise BrokenMessageError(f"no head of a message: {first!r}")
        start, second, *rest = words
        return cls(
            (start, second, rest[0] if rest else ""), tuple((name, value.strip()) for name, _, value in fields)
        )

    def field(self, name: str) -> str:
        """Return the value of the first field of that name, given in lower case; "" where there is none."""
        return next((value for key, value in self.fields if key.lower() == name), "")

    def forwarded(self, first_line: str, *added: tuple[str, str]) -> bytes:
        """Return the head to send on: all fields but those that concern the connection alone, and `added`."""
        kept = [(name, value) for name, value in self.fields if name.lower() not in _OF_THE_CONNECTION]
        lines = [first_line, *(f"{name}: {value}" for name, value in [*kept, *added]), "", ""]
        return "\r\n".join(lines).encode("latin-1")

    def body_length(self, *, default: int) -> int:
        """Return the body's length in bytes, CHUNKED, or `default` where the head does not say."""
        if self.field("transfer-encoding").lower() == "chunked":
            return CHUNKED
        length = self.field("content-length")
        if length and not length.isdecimal():
            raise BrokenMessageError(f"no length of a body: {length!r}")
        return int(length) if length else default


class Wire:
    """A connected socket with a buffer of what came and was not yet asked for. Its creator closes the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._stop = 0
        self._loop = asyncio.get_running_loop()

    async def send(self, content: bytes | memoryview) -> None:
        """Send all of `content`. Raises OSError."""
        await self._loop.sock_sendall(self._socket, content)

    async def read_head(self) -> Head | None:
        """Return the head of the next message, or None where the other side has closed. Raises BrokenMessageError."""
        try:
            return Head.parse(await self._read_until(_END_OF_HEAD))
        except EOFError:
            return None

    async def read_body(self, length: int, step_bytes: int) -> AsyncIterator[tuple[memoryview, bool]]:
        """Yield the pieces of a body as they come, of `step_bytes` at most, and whether they are content.

        Chunks keep their framing, whose lines are the pieces that are no content. A piece is valid until the next.

        Raises:
            BrokenMessageError: the body ends early.
        """
        if length != CHUNKED:
            async for piece in self._read_pieces(length, step_bytes):
                yield piece, True
            return
        remaining = None
        while remaining != 0:
            line = await self._read_line()
            remaining = _chunk_size(line)
            yield memoryview(line + _END_OF_LINE), False
            async for piece in self._read_pieces(remaining, step_bytes):
                yield piece, True
            if remaining:
                yield memoryview(await self._read_line() + _END_OF_LINE), False
        trailer = None
        while trailer != b"":
            trailer = await self._read_line()
            yield memoryview(trailer + _END_OF_LINE), False

    async def _read_pieces(self, length: int, step_bytes: int) -> AsyncIterator[memoryview]:
        while length:
            if self._start == self._stop and not await self._receive():
                if length == UNTIL_CLOSE:
                    return
                raise BrokenMessageError(f"a body ended {length} bytes early")
            size = min(step_bytes, self._stop - self._start)
            if length != UNTIL_CLOSE:
                size = min(size, length)
                length -= size
            self._start += size
            yield self._buffer[self._start - size : self._start]

    async def _read_line(self) -> bytes:
        try:
            return await self._read_until(_END_OF_LINE)
        except EOFError as error:
            raise BrokenMessageError("a chunked body ended early") from error

    async def _read_until(self, end: bytes) -> bytes:
        """Return what comes before `end`. Raises EOFError where nothing comes at all, BrokenMessageError."""
        while (found := bytes(self._buffer[self._start : self._stop]).find(end)) < 0:
            if await self._receive():
                continue
            if self._start == self._stop:
                raise EOFError
            raise BrokenMessageError("a head ended early")
        content = bytes(self._buffer[self._start : self._start + found])
        self._start += found + len(end)
        return content

    async def _receive(self) -> int:
        """Put more behind what is buffered; returns how many bytes came. Raises OSError, BrokenMessageError."""
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._stop == len(self._buffer):
            if self._start == 0:
                raise BrokenMessageError("a head that does not fit the buffer")
            kept = bytes(self._buffer[self._start : self._stop])
            self._buffer[: len(kept)] = kept
            self._start, self._stop = 0, len(kept)
        count = await self._loop.sock_recv_into(self._socket, self._buffer[self._stop :])
        self._stop += count
        return count


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError as error:
        raise BrokenMessageError(f"no size of a chunk: {line!r}") from error
