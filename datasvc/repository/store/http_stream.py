"""HTTP client that streams file ranges from plain web servers through one small buffer; used by `RangeReader`.

fsspec's client collects each response in new memory, in one thread for all requests. This client sends only GET
requests with a range. Custom client settings, redirects and encoded responses are left to fsspec's client.
"""

from __future__ import annotations

import http.client
import re
from base64 import b64encode
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import fsspec

from datasvc.errors import UnavailableError
from datasvc.repository.store import retries
from datasvc.repository.store.cancellation import CancellationToken
from datasvc.repository.store.http_connections import Connection, Connections, Endpoint, Timeouts
from datasvc.repository.store.min_throughput import MinThroughput

Take = Callable[[memoryview], None]
"""Function that receives the next bytes of a stream. The view is valid only during the call."""

_BUFFER_BYTES: Final = 512 << 10
# After this many bytes without a failure, the next failure counts as the first one again.
_PROGRESS_BYTES: Final = 16 << 20
_REFUSALS: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


class UnsupportedResponseError(Exception):
    """This module cannot read the server's response, but fsspec's client may. No bytes were passed on."""


@dataclass(frozen=True)
class _StreamRequest:
    """A request for a file, without the range of bytes, which each attempt adds."""

    server: Endpoint
    target: str  # path and query of the URL
    headers: Mapping[str, str] = field(repr=False)  # may contain a password
    location: str  # for messages


class HttpStream:
    """Reader for HTTP servers over persistent connections; thread-safe.

    Args:
        file_system: fsspec's HTTP file system, which encodes URLs.
        timeouts: limits of waiting; None: the defaults.
    """

    def __init__(self, file_system: fsspec.AbstractFileSystem, timeouts: Timeouts | None = None) -> None:
        self._fs: Any = file_system
        self._timeouts = timeouts or Timeouts()
        self._connections = Connections(self._timeouts)

    @classmethod
    def of(cls, file_system: fsspec.AbstractFileSystem) -> HttpStream | None:
        """Return a reader of the same servers, or None if `file_system` is not fsspec's plain HTTP client."""
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
        """Pass `length` bytes, at least 1, from `offset` to `take`; for details, see `RangeReader.stream`.

        After a failure, the missing bytes are requested again, until `retries.ATTEMPTS` failures without progress.
        Also raises UnsupportedResponseError.
        """
        request = self._request(path, location)
        with closing(self._stream(request, offset, offset + length, interrupt)) as views:
            for view in views:
                take(view)

    def _request(self, path: str, location: str) -> _StreamRequest:
        url = self._fs.encode_url(path)
        headers = {"User-Agent": "datasvc"}  # some servers reject requests without it
        if url.user is not None or url.password is not None:
            secret = b64encode(f"{url.user or ''}:{url.password or ''}".encode()).decode("ascii")
            headers["Authorization"] = f"Basic {secret}"
        return _StreamRequest(Endpoint(url.scheme, url.raw_host, url.port), url.raw_path_qs, headers, location)

    def _stream(
        self, request: _StreamRequest, start: int, stop: int, interrupt: CancellationToken
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes of a range as they arrive, with a new request for the missing bytes after a failure."""
        offset, num_failures, progress_bytes = start, 0, 0
        while offset < stop:
            try:
                with closing(self._stream_response(request, offset, stop, interrupt)) as views:
                    for view in views:
                        offset, progress_bytes = offset + len(view), progress_bytes + len(view)
                        yield view
            except UnsupportedResponseError as error:
                if offset == start:
                    raise  # no byte was passed on, so fsspec's client can read the whole range
                raise UnavailableError(
                    f"cannot read {request.location}: the server sends a response of another kind than before; "
                    "try again"
                ) from error
            except UnavailableError:
                num_failures = 1 if progress_bytes >= _PROGRESS_BYTES else num_failures + 1
                progress_bytes = 0
                if num_failures == retries.ATTEMPTS or interrupt.wait(retries.pause_s(num_failures)):
                    raise

    def _stream_response(
        self, request: _StreamRequest, offset: int, stop: int, interrupt: CancellationToken
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes of one response as views of one buffer, which is reused."""
        with retries.map_exceptions("read", request.location), _as_os_errors(interrupt):
            connection, response = self._request_range(request, f"bytes={offset}-{stop - 1}", interrupt)
            is_reusable = False
            try:
                with interrupt.on_cancel(connection.shut_down):
                    _check(response, offset, stop)
                    throughput = MinThroughput(self._timeouts.min_bytes_s, self._timeouts.window_s)
                    buffer = memoryview(bytearray(min(_BUFFER_BYTES, stop - offset)))
                    while offset < stop:
                        num_bytes = connection.read_into(buffer[: stop - offset], throughput)
                        if interrupt.is_set:  # after a shutdown, bytes that arrived before can still be read
                            raise ConnectionError  # `_as_os_errors` adds the message
                        if not num_bytes:
                            raise ConnectionError(f"the server closed the connection {stop - offset} bytes too early")
                        offset += num_bytes
                        yield buffer[:num_bytes]
                    is_reusable = connection.finish_response() and not interrupt.is_set
            finally:
                if is_reusable:
                    self._connections.release(request.server, connection)
                else:
                    connection.close()

    def _request_range(
        self, request: _StreamRequest, byte_range: str, interrupt: CancellationToken
    ) -> tuple[Connection, http.client.HTTPResponse]:
        """Send a request over an idle or new connection; return the connection and the response, its body unread."""
        connection = self._connections.acquire(request.server, interrupt)
        while True:
            try:
                with interrupt.on_cancel(connection.shut_down):
                    return connection, connection.send_get(request.target, {**request.headers, "Range": byte_range})
            except OSError:  # http.client raises it for most broken connections
                connection.close()
                if not connection.was_kept or interrupt.is_set:  # a new connection failed, or the read was cancelled
                    raise
            except BaseException:
                connection.close()
                raise
            # The server has closed an idle connection, which is not a failure: use a new connection.
            connection = self._connections.acquire(request.server, interrupt, fresh=True)


@contextmanager
def _as_os_errors(interrupt: CancellationToken) -> Generator[None, None, None]:
    """Convert exceptions of http.client, and all those of a cancelled read, to ConnectionError."""
    try:
        if interrupt.is_set:
            raise ConnectionError
        yield
    except (OSError, http.client.HTTPException) as error:
        if interrupt.is_set:
            raise ConnectionError("the read was cancelled") from error
        # RemoteDisconnected is both an HTTPException and an OSError: it is not converted.
        if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
            raise ConnectionError(f"the response is not HTTP: {type(error).__name__}: {error}") from error
        raise


def _check(response: http.client.HTTPResponse, offset: int, stop: int) -> None:
    """Check that the body of a response is exactly the requested range.

    Raises:
        UnsupportedResponseError: the response is not supported.
        FileNotFoundError, PermissionError: the server does not send the file.
        ConnectionError: the server reports another error, or sends other bytes than the requested ones.
    """
    status = response.status
    if status == HTTPStatus.NOT_FOUND:
        raise FileNotFoundError
    if status in _REFUSALS:
        raise PermissionError(f"{status} {response.reason}")
    # fsspec's client follows redirects and decodes responses.
    if 300 <= status < 400 or response.getheader("Content-Encoding", "identity") != "identity":
        raise UnsupportedResponseError
    if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
        raise ConnectionError(f"the server responds {status} {response.reason}")
    # A response without a length is chunked, or ends with the connection. fsspec's client reads both.
    if response.length is None:
        raise UnsupportedResponseError
    length = stop - offset
    if status == HTTPStatus.OK and (offset or response.length != length):
        raise ConnectionError(
            f"the server does not support ranges: it sends {response.length} bytes, expected {length} from {offset}"
        )
    if status == HTTPStatus.PARTIAL_CONTENT:
        content_range = response.getheader("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(content_range)
        first_and_last = None if match is None else (int(match[1]), int(match[2]))
        if first_and_last != (offset, stop - 1) or response.length != length:
            raise ConnectionError(
                f"the server sends {response.length} bytes ({content_range!r}), expected {offset}-{stop - 1}"
            )
