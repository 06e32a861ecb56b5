"""Ranges of files of plain HTTP servers, handed on as they arrive, through one small buffer.

fsspec's client gathers each answer in fresh memory, on one thread for all. This one does nothing but GET with a
range, and leaves alone whatever asks for more: a client with settings of its own, redirections, encoded answers.
"""

from __future__ import annotations

import http.client
import re
from base64 import b64encode
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import fsspec

from datasvc.errors import UnavailableError
from datasvc.repository.store import retries
from datasvc.repository.store.cancellation import CancellationToken
from datasvc.repository.store.http_connections import Connection, Connections, Endpoint, Timeouts
from datasvc.repository.store.min_throughput import MinThroughput

Take = Callable[[memoryview], None]
"""Takes the bytes that come next; the view is valid during the call only."""

_BUFFER_BYTES: Final = 512 << 10
# So much without a fault, and the faults before it are forgotten.
_PROGRESS_BYTES: Final = 16 << 20
_OK, _PARTIAL = 200, 206
_MISSING = 404
_REFUSALS: Final = (401, 403)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


class UnsuitedError(Exception):
    """The server's way of answering is not known here: fsspec's client may know it. Nothing was handed on."""


@dataclass(frozen=True)
class _StreamRequest:
    """What to ask of whom, but for the range."""

    server: Endpoint
    target: str
    headers: Mapping[str, str] = field(repr=False)
    location: str


class HttpStream:
    """Reads from HTTP servers, over connections that are kept. Safe for threads.

    Args:
        file_system: fsspec's, which says what is meant by a URL.
        patience: how long to wait.
    """

    def __init__(self, file_system: fsspec.AbstractFileSystem, patience: Timeouts | None = None) -> None:
        self._fs: Any = file_system
        self._patience = patience or Timeouts()
        self._connections = Connections(self._patience)

    @classmethod
    def of(cls, file_system: fsspec.AbstractFileSystem) -> HttpStream | None:
        """Return what reads as this file system does; None where that is not known to be the same."""
        protocol = file_system.protocol
        if "http" not in ((protocol,) if isinstance(protocol, str) else protocol):
            return None
        from fsspec.implementations import http as fsspec_http

        fs: Any = file_system
        is_plain = type(fs) is fsspec_http.HTTPFileSystem and fs.get_client is fsspec_http.get_client
        return cls(fs) if is_plain and not (fs.client_kwargs or fs.kwargs) else None

    def read(
        self, path: str, offset: int, length: int, take: Take, *, location: str, interrupt: CancellationToken
    ) -> None:
        """Hand `length` bytes from `offset` to `take`, in order, each once, from the calling thread.

        A server that fails is asked again, up to 4 times in a row, for what is missing.

        Args:
            path: the URL, as fsspec takes it.
            offset: in the file.
            length: above 0.
            take: gets the bytes. What it raises passes through.
            location: the URL for messages.
            interrupt: ends it.

        Raises:
            UnsuitedError: see there.
            NotFoundError, ConfigError, UnavailableError: as `retries.translated`; interrupted, too.
        """
        request = self._request(path, location)
        with closing(self._all_pieces(request, offset, offset + length, interrupt)) as pieces:
            for view in pieces:
                take(view)

    def _request(self, path: str, location: str) -> _StreamRequest:
        url = self._fs.encode_url(path)
        headers = {"User-Agent": "datasvc"}  # some servers refuse who has no name
        if url.user is not None or url.password is not None:
            secret = b64encode(f"{url.user or ''}:{url.password or ''}".encode()).decode("ascii")
            headers["Authorization"] = f"Basic {secret}"
        return _StreamRequest(Endpoint(url.scheme, url.raw_host, url.port), url.raw_path_qs, headers, location)

    def _all_pieces(
        self, request: _StreamRequest, start: int, stop: int, interrupt: CancellationToken
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes as they come, from as many answers as it takes."""
        offset, num_failures, moved = start, 0, 0
        while offset < stop:
            try:
                with closing(self._pieces(request, offset, stop, interrupt)) as pieces:
                    for view in pieces:
                        offset, moved = offset + len(view), moved + len(view)
                        yield view
            except UnsuitedError as error:
                if offset == start:
                    raise
                raise UnavailableError(f"cannot read {request.location}: it changes its way of answering") from error
            except UnavailableError:
                num_failures = 1 if moved >= _PROGRESS_BYTES else num_failures + 1
                moved = 0
                if num_failures == retries.ATTEMPTS or interrupt.wait(retries.pause_s(num_failures)):
                    raise

    def _pieces(
        self, request: _StreamRequest, offset: int, stop: int, interrupt: CancellationToken
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes of one answer, in one buffer that is used again and again."""
        with retries.map_exceptions("read", request.location), _translated(interrupt):
            connection, answer = self._ask(request, f"bytes={offset}-{stop - 1}", interrupt)
            is_good = False
            try:
                with interrupt.cutting(connection.cut):
                    _check(answer, offset, stop)
                    pace = MinThroughput(self._patience.min_bytes_s, self._patience.window_s)
                    buffer = memoryview(bytearray(min(_BUFFER_BYTES, stop - offset)))
                    while offset < stop:
                        num_bytes = connection.read_into(buffer[: stop - offset], pace)
                        if interrupt.is_set:  # what has arrived can be read of a connection that was cut
                            raise ConnectionError
                        if not num_bytes:
                            raise ConnectionError(f"it hung up with {stop - offset} bytes to go")
                        offset += num_bytes
                        yield buffer[:num_bytes]
                    is_good = connection.end_answer() and not interrupt.is_set
            finally:
                if is_good:
                    self._connections.give_back(request.server, connection)
                else:
                    connection.close()

    def _ask(
        self, request: _StreamRequest, wanted: str, interrupt: CancellationToken
    ) -> tuple[Connection, http.client.HTTPResponse]:
        connection = self._connections.take(request.server, interrupt)
        while True:
            try:
                with interrupt.cutting(connection.cut):
                    return connection, connection.ask(request.target, {**request.headers, "Range": wanted})
            except OSError:  # http.client says so of most, too
                connection.close()
                if not connection.was_kept or interrupt.is_set:
                    raise
            except BaseException:
                connection.close()
                raise
            # The server closed it while nobody used it: that says nothing.
            connection = self._connections.take(request.server, interrupt, fresh=True)


@contextmanager
def _translated(interrupt: CancellationToken) -> Generator[None, None, None]:
    """Turn what HTTP can raise into what the operating system raises."""
    try:
        if interrupt.is_set:
            raise ConnectionError
        yield
    except (OSError, http.client.HTTPException) as error:
        if interrupt.is_set:
            raise ConnectionError("nobody waits for it any more") from error
        if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
            raise ConnectionError(f"no HTTP: {type(error).__name__}: {error}") from error
        raise


def _check(answer: http.client.HTTPResponse, offset: int, stop: int) -> None:
    """Raise unless these bytes follow and nothing else.

    Raises:
        UnsuitedError: not understood.
        FileNotFoundError, PermissionError, ConnectionError: it gives none, or others.
    """
    status = answer.status
    if status == _MISSING:
        raise FileNotFoundError
    if status in _REFUSALS:
        raise PermissionError(f"{status} {answer.reason}")
    if 300 <= status < 400 or answer.getheader("Content-Encoding", "identity") != "identity":
        raise UnsuitedError
    if status not in (_OK, _PARTIAL):
        raise ConnectionError(f"answers {status} {answer.reason}")
    if answer.length is None:
        raise UnsuitedError
    length = stop - offset
    if status == _OK and (offset or answer.length != length):
        raise ConnectionError(f"sends all {answer.length} bytes, asked for {length} from {offset}; it has no ranges")
    if status == _PARTIAL:
        sent = answer.getheader("Content-Range", "")
        found = _CONTENT_RANGE.fullmatch(sent)
        if found is None or (int(found[1]), int(found[2])) != (offset, stop - 1) or answer.length != length:
            raise ConnectionError(f"sends {answer.length} bytes ({sent!r}), asked for {offset}-{stop - 1}")
