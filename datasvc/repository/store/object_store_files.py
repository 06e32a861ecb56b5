"""`ObjectStoreFiles`: the operations of `Storage` on S3, Azure, Google and compatible stores, by obstore.

obstore retries requests by itself, and renews credentials. It caches no listings. Exceptions are converted to those
of `datasvc.errors`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.repository.store import exclusive_create, file_age, obstore_loop
from datasvc.repository.store.object_stores import ObjectBucket, make_client_options, move_to_region, open_bucket
from datasvc.repository.store.obstore_loop import (
    CancellationToken,
    RangeBeyondEndError,
    UnsupportedResponseError,
    WrongRegionError,
    convert_errors,
)
from datasvc.repository.store.ranges import RangeStreams, Take, Timeouts
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ObjectStore, RetryConfig

_Result = TypeVar("_Result")

# Larger files are uploaded in parts of this size, several at once. S3 allows 10,000 parts.
_PART_BYTES: Final = 8 << 20
_MAX_PARTS: Final = 10_000
_PARALLEL_PARTS: Final = 8
_REQUEST_SILENCE_S: Final = 120
# The limit of a request includes the upload of its part. The slowest link for uploads has this rate for one file.
_MIN_UPLOAD_BYTES_S: Final = 64 << 10
_SMALL_BYTES: Final = 1 << 20  # an upload that takes no longer than other requests
_STREAM_ATTEMPTS: Final = 6
_MIN_BYTES_S: Final = 16 << 10  # lowest throughput of a read into memory
_LISTED_AT_ONCE: Final = 1000
_RETRIES: Final[RetryConfig] = {
    "max_retries": 5,
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2},
    "retry_timeout": timedelta(minutes=3),
}
_NO_RETRIES: Final[RetryConfig] = {"max_retries": 0}


class _Clients:
    """obstore's clients of one bucket, opened when they are needed."""

    def __init__(self, bucket: ObjectBucket) -> None:
        self.bucket = bucket

    @cached_property
    def store(self) -> ObjectStore:
        """Client for all requests but streams and large uploads."""
        return self._open(_REQUEST_SILENCE_S, _RETRIES)

    @cached_property
    def uploads(self) -> ObjectStore:
        """Client for large uploads in parts of the usual size."""
        return self._open_for_uploads(_PART_BYTES)

    def _open_for_uploads(self, part_bytes: int) -> ObjectStore:
        # obstore has no limit of the time without progress of an upload. All parts at once share the link.
        limit_s = _REQUEST_SILENCE_S + _PARALLEL_PARTS * part_bytes / _MIN_UPLOAD_BYTES_S
        return self._open(
            limit_s, {**_RETRIES, "retry_timeout": _RETRIES["retry_timeout"] + timedelta(seconds=limit_s)}
        )

    def store_for(self, size_bytes: int, part_bytes: int = _PART_BYTES) -> ObjectStore:
        """Return the client for an upload."""
        if size_bytes <= _SMALL_BYTES:
            return self.store
        return self.uploads if part_bytes == _PART_BYTES else self._open_for_uploads(part_bytes)

    @cached_property
    def streams(self) -> RangeStreams:
        timeouts = Timeouts()
        return RangeStreams(self._open(timeouts.silence_s, _NO_RETRIES), timeouts, _STREAM_ATTEMPTS)

    def _open(self, silence_s: float, retry_config: RetryConfig) -> ObjectStore:
        options = make_client_options(
            connect_s=Timeouts.connect_s, silence_s=silence_s, allow_http=self.bucket.allows_http
        )
        return open_bucket(self.bucket, options, retry_config)


class ObjectStoreFiles:
    """Files below the root of a bucket, by their paths relative to it; see `Storage`.

    Args:
        bucket: the bucket and the path of the root.
        url: URL of the root for messages.
    """

    def __init__(self, bucket: ObjectBucket, url: str) -> None:
        self._clients = _Clients(bucket)
        self._region_lock = threading.Lock()
        self._url = url

    def location(self, path: str) -> str:
        """Return the URL of `path`, for messages."""
        return f"{redact_url(self._url)}/{path}" if path else redact_url(self._url)

    def read(self, path: str) -> bytes:
        async def request() -> bytes:
            result = await self._store.get_async(self._key(path))
            return bytes(await _with_limit(result.bytes_async(), result.meta["size"]))

        with map_exceptions("read", self.location(path)):
            return self._request(request)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        if not length:
            return b""

        async def request() -> bytes:
            content = self._store.get_range_async(self._key(path), start=offset, length=length)
            return bytes(await _with_limit(content, length))

        with map_exceptions("read", self.location(path)):
            try:
                return self._request(request)
            except RangeBeyondEndError:
                return b""

    def stream_range(self, path: str, offset: int, length: int, take: Take, interrupt: CancellationToken) -> None:
        """Pass exactly `length` bytes from `offset` to `take` as they arrive; see `RangeReader.stream`."""
        if not length:
            return
        location = self.location(path)

        def read() -> None:
            self._clients.streams.read(self._key(path), offset, length, take, location=location, interrupt=interrupt)

        try:
            self._in_region(read)
        except UnsupportedResponseError as error:
            raise UnavailableError(f"cannot read {location}: {error}") from error

    def size(self, path: str) -> int | None:
        file = self.stored_file(path)
        return None if file is None else file.size_bytes

    def stored_file(self, path: str) -> file_age.StoredFile | None:
        """Return the size and the modification time of a file, or None if it does not exist."""
        try:
            meta = self.details(path)
        except NotFoundError:
            return None
        return file_age.StoredFile(path, meta["size"], meta["last_modified"].timestamp())

    def details(self, path: str) -> ObjectMeta:
        """Return obstore's details of a file; for errors, see `Storage.read`."""
        return self._call("look up", path, lambda: self._store.head_async(self._key(path)))

    def names(self, folder: str) -> set[str]:
        """Return the names directly below `folder`; see `Storage.list`."""
        key = self._key(folder)
        try:
            listing = self._call("list", folder, lambda: self._store.list_with_delimiter_async(key or None))
        except NotFoundError:
            return set()
        paths = [*listing["common_prefixes"], *(meta["path"] for meta in listing["objects"])]
        return {path.rstrip("/").rpartition("/")[2] for path in paths if path.strip("/") != key}

    def find(self, folder: str) -> Sequence[str]:
        prefix = f"{folder}/" if folder else ""
        return [file.path[len(prefix) :] for file in self.walk(folder)]

    def walk(self, folder: str) -> Iterator[file_age.StoredFile]:
        root = f"{self._clients.bucket.prefix}/" if self._clients.bucket.prefix else ""
        for meta in self._list(folder):
            yield file_age.StoredFile(meta["path"][len(root) :], meta["size"], meta["last_modified"].timestamp())

    def create(self, path: str, content: bytes) -> None:
        async def request() -> object:
            return await self._clients.store_for(len(content)).put_async(self._key(path), content, mode="create")

        exclusive_create.create_and_read_back(
            partial(self._request, request), lambda: self.read(path), content, self.location(path)
        )

    def write_temporary(self, path: str, content: bytes) -> None:
        self._put(path, content, len(content))

    def remove(self, path: str) -> None:
        self._call("delete", path, lambda: self._delete(self._key(path)))

    def put_bytes(self, path: str, content: bytes | memoryview, *, synced: bool) -> None:  # noqa: ARG002
        view = memoryview(content).cast("B")
        self._put(path, view, len(view))

    def delete_if_older(self, path: str, before_s: float) -> bool:
        file = self.stored_file(path)
        if file is None or file.modified_s >= before_s:
            return False
        try:
            self.remove(path)
        except NotFoundError:
            return False
        return True

    def delete_folder(self, folder: str) -> None:
        paths = [file.path for file in self.walk(folder)]
        for start in range(0, len(paths), _LISTED_AT_ONCE):
            some = paths[start : start + _LISTED_AT_ONCE]
            keys = [self._key(path) for path in some]
            try:
                self._call("delete", folder, partial(self._delete, keys))
            except NotFoundError:  # another process has deleted some of them
                for path in some:
                    with suppress(NotFoundError):
                        self.remove(path)

    def adopt(self, path: str, finished: Path) -> None:
        size_bytes = finished.stat().st_size
        self._put(path, finished, size_bytes, max(_PART_BYTES, -(-size_bytes // _MAX_PARTS)))
        with map_exceptions("delete", str(finished)):
            finished.unlink()

    @property
    def _store(self) -> ObjectStore:
        return self._clients.store

    def _key(self, path: str) -> str:
        """Return the full path of a file in the bucket."""
        assert ".." not in path.split("/"), path
        return f"{self._clients.bucket.prefix}/{path}".strip("/")

    def _list(self, folder: str) -> Iterator[ObjectMeta]:
        """Yield obstore's details of every file below `folder`; nothing if it does not exist."""

        async def first() -> tuple[ListStream[Any], Sequence[ObjectMeta] | None]:
            pages = self._store.list(self._key(folder) or None, chunk_size=_LISTED_AT_ONCE)
            return pages, await obstore_loop.next_of(pages)

        with suppress(NotFoundError), map_exceptions("list", self.location(folder)), convert_errors():
            pages, page = self._request(first)
            while page:
                yield from page
                page = obstore_loop.call(obstore_loop.next_of(pages))

    async def _delete(self, keys: str | Sequence[str]) -> None:
        await self._store.delete_async(keys)

    def _put(
        self, path: str, content: bytes | memoryview | Path, size_bytes: int, part_bytes: int = _PART_BYTES
    ) -> None:
        def put() -> Awaitable[object]:
            store = self._clients.store_for(size_bytes, part_bytes)
            return store.put_async(self._key(path), content, chunk_size=part_bytes, max_concurrency=_PARALLEL_PARTS)

        self._call("write", path, put)

    def _call(self, action: str, path: str, request: Callable[[], Awaitable[_Result]]) -> _Result:
        """Return the result of a request. obstore's functions need a running loop, so `request` is called on it."""

        async def run() -> _Result:
            return await request()

        with map_exceptions(action, self.location(path)):
            return self._request(run)

    def _request(self, request: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Return the result of a request on the loop. Raises the errors of `convert_errors`."""

        def call() -> _Result:
            with convert_errors():
                return obstore_loop.call(request())

        return self._in_region(call)

    def _in_region(self, act: Callable[[], _Result]) -> _Result:
        """Return the result of `act`, which is called again if the bucket turns out to be in another region."""
        clients = self._clients
        try:
            return act()
        except WrongRegionError:
            self._find_region(clients)
        try:
            return act()
        except WrongRegionError as error:
            region = self._clients.bucket.config["region"]
            raise ConfigError(
                f"cannot reach {self.location('')} in the region {region}: {error}; set AWS_REGION to the region of "
                "the bucket"
            ) from error

    def _find_region(self, tried: _Clients) -> None:
        """Replace the clients by those of the region of the bucket, unless another thread has done so."""
        with self._region_lock, map_exceptions("find the region of", self.location("")):
            if self._clients is tried:
                self._clients = _Clients(move_to_region(tried.bucket))


async def _with_limit(content: Awaitable[_Result], size_bytes: int) -> _Result:
    """Return the awaited content, and raise TimeoutError if it arrives too slowly."""
    limit_s = _REQUEST_SILENCE_S + size_bytes / _MIN_BYTES_S
    async with asyncio.timeout(limit_s):
        return await content
