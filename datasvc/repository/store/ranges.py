"""Ranged reads of a store's files, returned as bytes or passed on as they arrive.

`RangeReader.stream` reads plain web servers by obstore (`HttpRanges`), and other stores in blocks by fsspec's client.
fsspec's client collects each response in memory, in one thread for all requests. obstore's client does not, but lacks
some of what fsspec's has: its settings, and responses that are encoded or have no length. These are left to fsspec.
"""

from __future__ import annotations

import asyncio
import threading
from base64 import b64encode
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from datasvc.errors import UnavailableError
from datasvc.repository.store import obstore_loop, retries
from datasvc.repository.store.object_stores import make_client_options
from datasvc.repository.store.obstore_loop import CancellationToken, UnsupportedResponseError, convert_errors
from datasvc.repository.store.retries import ATTEMPTS, with_retries

if TYPE_CHECKING:
    import fsspec
    from obstore import BytesStream, GetResult
    from obstore.store import ObjectStore


_BLOCK_BYTES: Final = 16 << 20


Take = Callable[[memoryview], None]
"""Function that receives the next bytes of a stream. The view is valid only during the call."""

# Smaller chunks take more processor time: 512 KiB a third more.
CHUNK_BYTES: Final = 1 << 20
# Chunks of a stream in memory while one is passed on. With what obstore collects, a stream takes some 4 MiB.
_PREFETCHED_CHUNKS: Final = 2
# After this many bytes without a failure, the next failure counts as the first one again.
_PROGRESS_BYTES: Final = 16 << 20


class RangeReader:
    """Reader of ranges of the files of one store; thread-safe."""

    def __init__(self, file_system: fsspec.AbstractFileSystem) -> None:
        self._fs = file_system
        self._http = HttpRanges.of(file_system)

    @property
    def can_stream(self) -> bool:
        """Whether `stream` passes on bytes as they arrive, not in blocks.

        An unsupported response ends this, and a fork does in the child, see `obstore_loop`.
        """
        return self._http is not None and obstore_loop.is_usable()

    def read(self, path: str, offset: int, length: int, *, location: str) -> bytes:
        """Return `length` bytes from `offset`, or fewer at the end of the file; for errors, see `with_retries`."""
        return with_retries(
            self._fs, "read", location, lambda: bytes(self._fs.cat_file(path, start=offset, end=offset + length))
        )

    def stream(
        self, path: str, offset: int, length: int, take: Take, *, location: str, interrupt: CancellationToken
    ) -> None:
        """Pass exactly `length` bytes from `offset` to `take`, in order, in the calling thread.

        The exceptions of `take` are not converted. `location` is the URL or path of the file for messages.

        Raises:
            NotFoundError, ConfigError: see `retries.map_exceptions`.
            UnavailableError: see `retries.map_exceptions`; or the read was cancelled, or the file is too short.
        """
        http = self._http
        if http is not None and length and obstore_loop.is_usable():
            try:
                http.read(path, offset, length, take, location=location, interrupt=interrupt)
            except UnsupportedResponseError:
                self._http = None  # from now on, use fsspec's client
            else:
                return
        read_block = partial(self.read, path, location=location)
        stream_blocks(read_block, offset, length, take, location=location, interrupt=interrupt)


def stream_blocks(
    read: Callable[[int, int], bytes],
    offset: int,
    length: int,
    take: Take,
    *,
    location: str,
    interrupt: CancellationToken,
) -> None:
    """Pass a range to `take` in blocks, each read by `read(offset, length)`; see `RangeReader.stream`."""
    for start in range(offset, offset + length, _BLOCK_BYTES):
        block_bytes = min(_BLOCK_BYTES, offset + length - start)
        if interrupt.is_set:
            raise UnavailableError(f"cannot read {location}: the read was cancelled")
        content = read(start, block_bytes)
        if len(content) != block_bytes:
            raise UnavailableError(f"cannot read {location}: received {len(content)} of {block_bytes} bytes")
        take(memoryview(content))


class HttpRanges:
    """Reader for HTTP servers over persistent connections; thread-safe.

    Args:
        file_system: fsspec's HTTP file system, which encodes URLs.
        timeouts: limits of waiting.
    """

    def __init__(self, file_system: fsspec.AbstractFileSystem, timeouts: Timeouts | None = None) -> None:
        self._fs: Any = file_system
        self._timeouts = timeouts or Timeouts()
        self._lock = threading.Lock()
        # By address, user and password, and query: obstore adds a path to a URL that has the others.
        self._streams: dict[tuple[str, str | None, str | None], RangeStreams] = {}

    @classmethod
    def of(cls, file_system: fsspec.AbstractFileSystem) -> HttpRanges | None:
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
        """Pass `length` bytes, at least 1, from `offset` of the URL `path` to `take`; see `RangeStreams.read`."""
        url = self._fs.encode_url(path)
        streams = self._streams_of(url)
        streams.read(_decoded_path(url), offset, length, take, location=location, interrupt=interrupt)

    def _streams_of(self, url: Any) -> RangeStreams:
        query = f"?{url.raw_query_string}" if url.raw_query_string else ""
        key = (f"{url.scheme}://{url.host_port_subcomponent}/{query}", url.user, url.password)
        with self._lock:
            if key not in self._streams:
                self._streams[key] = self._open(*key)
            return self._streams[key]

    def _open(self, base: str, user: str | None, password: str | None) -> RangeStreams:
        from obstore.store import HTTPStore

        headers = {}
        if user is not None or password is not None:
            secret = b64encode(f"{user or ''}:{password or ''}".encode()).decode("ascii")
            headers["Authorization"] = f"Basic {secret}"
        options = make_client_options(
            connect_s=self._timeouts.connect_s,
            silence_s=self._timeouts.silence_s,
            allow_http=base.startswith("http://"),
            headers=headers,
        )
        store = HTTPStore(base, client_options=options, retry_config={"max_retries": 0})
        return RangeStreams(store, self._timeouts, ATTEMPTS, is_supported=_is_plain)


def _decoded_path(url: Any) -> str:
    """Return the path of a URL as obstore takes it, which encodes it again."""
    path: str = url.raw_path
    names = path.removeprefix("/").split("/")
    if "%2f" in path.lower() or any(name in {"", ".", ".."} for name in map(unquote, names)):
        raise UnsupportedResponseError("the path of the URL has names that obstore does not accept")
    try:
        decoded = unquote(path.removeprefix("/"), errors="strict")
    except UnicodeDecodeError as error:
        raise UnsupportedResponseError("the path of the URL is not UTF-8") from error
    if not decoded.isprintable():
        raise UnsupportedResponseError("the path of the URL has control characters")
    return decoded


def _is_plain(response: Any) -> bool:
    """Return whether the body of a response is the file itself, and not a compressed form of it."""
    encoding: str = response.attributes.get("Content-Encoding", "identity")
    return encoding == "identity"


# Each chunk has a time limit, so a silent server and one that sends a few bytes at a time are both detected; the time
# in which the reader processes the bytes does not count. After a failure, only the missing bytes are requested again.
# The client of the store must not retry by itself.


@dataclass(frozen=True)
class Timeouts:
    """Limits for the time that a client waits for a server.

    Attributes:
        connect_s: maximum time to connect.
        silence_s: maximum time until the headers of a response are complete, and without a byte of it. The default is
            that of botocore: a store may have to load cold data.
        chunk_s: maximum time for `CHUNK_BYTES`: the minimum throughput is some 17 KB/s.
    """

    connect_s: float = 15
    silence_s: float = 60
    chunk_s: float = 60


class RangeStreams:
    """Reader of ranges of one store; thread-safe.

    Args:
        store: client of obstore, without retries.
        timeouts: limits of waiting; its own limits are `connect_s` and `silence_s`.
        attempts: number of failures without progress after which a read ends.
        is_supported: whether obstore can read a response as it is, by the response.
    """

    def __init__(
        self,
        store: ObjectStore,
        timeouts: Timeouts,
        attempts: int,
        is_supported: Callable[[GetResult], bool] = lambda _response: True,
    ) -> None:
        self._store = store
        self._timeouts = timeouts
        self._attempts = attempts
        self._is_supported = is_supported

    def read(
        self, path: str, offset: int, length: int, take: Take, *, location: str, interrupt: CancellationToken
    ) -> None:
        """Pass `length` bytes, at least 1, from `offset` to `take`; for details, see `RangeReader.stream`.

        Also raises UnsupportedResponseError.
        """
        with closing(self._stream(path, offset, offset + length, location, interrupt)) as chunks:
            for chunk in chunks:
                take(memoryview(chunk))

    def _stream(
        self, path: str, start: int, stop: int, location: str, interrupt: CancellationToken
    ) -> Generator[bytes, None, None]:
        """Yield the bytes of a range as they arrive, with a new request for the missing bytes after a failure."""
        offset, num_failures, progress_bytes = start, 0, 0
        while offset < stop:
            try:
                with closing(self._stream_response(path, offset, stop, location, interrupt)) as chunks:
                    for chunk in chunks:
                        offset, progress_bytes = offset + len(chunk), progress_bytes + len(chunk)
                        yield chunk
            except UnsupportedResponseError as error:
                if offset == start:
                    raise  # no byte was passed on, so fsspec's client can read the whole range
                raise UnavailableError(
                    f"cannot read {location}: the server sends a response of another kind than before; try again"
                ) from error
            except UnavailableError:
                num_failures = 1 if progress_bytes >= _PROGRESS_BYTES else num_failures + 1
                progress_bytes = 0
                if num_failures == self._attempts or interrupt.wait(retries.pause_s(num_failures)):
                    raise

    def _stream_response(
        self, path: str, offset: int, stop: int, location: str, interrupt: CancellationToken
    ) -> Generator[bytes, None, None]:
        """Yield the chunks of one response."""
        with retries.map_exceptions("read", location), convert_errors():
            chunks: SimpleQueue[bytes | None] = SimpleQueue()  # None: no chunk follows
            free = asyncio.Semaphore(_PREFETCHED_CHUNKS)
            request = obstore_loop.start(self._receive(path, offset, stop, chunks, free))
            request.add_done_callback(lambda _request: chunks.put(None))
            try:
                with interrupt.on_cancel(request.cancel):
                    while offset < stop:
                        chunk = chunks.get()
                        if interrupt.is_set:
                            raise ConnectionError("the read was cancelled")
                        if chunk is None:
                            obstore_loop.wait(request)  # raises its exception
                            raise ConnectionError(f"the server closed the connection {stop - offset} bytes too early")
                        offset += len(chunk)
                        if offset > stop:
                            raise ConnectionError(f"the server sends {offset - stop} bytes more than it says")
                        yield chunk
                        obstore_loop.run_soon(free.release)
            finally:
                request.cancel()

    async def _receive(
        self, path: str, offset: int, stop: int, chunks: SimpleQueue[bytes | None], free: asyncio.Semaphore
    ) -> None:
        """Request a range and put its chunks into a queue, each when `free` has a place for it."""
        # The next chunk is requested here, and not by the thread that takes it: the socket is read without a pause.
        stream = (await self._request(path, offset, stop)).stream(CHUNK_BYTES)
        while offset < stop:
            await free.acquire()
            chunk = await self._next(stream)
            if not chunk:
                return
            offset += len(chunk)
            chunks.put(chunk)

    async def _request(self, path: str, offset: int, stop: int) -> GetResult:
        response = await self._store.get_async(path, options={"range": (offset, stop)})
        if not self._is_supported(response):
            raise UnsupportedResponseError
        if response.range != (offset, stop):
            first, end = response.range
            raise ConnectionError(f"the server sends the bytes {first}-{end - 1}, expected {offset}-{stop - 1}")
        return response

    async def _next(self, chunks: BytesStream) -> bytes:
        """Return the next chunk, which is shorter than `CHUNK_BYTES` only at the end; b"" after the end."""
        try:
            async with asyncio.timeout(self._timeouts.chunk_s):
                return await obstore_loop.next_of(chunks) or b""
        except TimeoutError as error:
            raise TimeoutError(f"too slow: less than {CHUNK_BYTES} bytes in {self._timeouts.chunk_s:g} s") from error
