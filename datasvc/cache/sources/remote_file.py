"""A remote file as the origin of one object, which is named by the URL and the state of the file.

`staged_files` fetches such objects. The state is part of the name, so that a changed file is another object.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from blake3 import blake3
from fsspec import AbstractFileSystem

from datasvc.durable import is_plain_name
from datasvc.errors import ConfigError, NotFoundError, SourceChangedError
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.repository.store import obstore_loop
from datasvc.repository.store.object_store_files import ObjectStoreFiles
from datasvc.repository.store.object_stores import ObjectBucket, choose_bucket, read_settings
from datasvc.repository.store.obstore_loop import CancellationToken
from datasvc.repository.store.ranges import RangeReader, Take
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import with_retries
from datasvc.repository.store.storage import resolve_url

# Fields by which stores report the state of a file, the most exact first.
_STATES = (
    "ETag",
    "etag",
    "md5",
    "content_md5",
    "generation",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "mtime",
)
_sharing: Final = threading.RLock()
# A forked child must not find it locked. The child can use the clients only if no request was made before the fork.
os.register_at_fork(before=_sharing.acquire, after_in_parent=_sharing.release, after_in_child=_sharing.release)


class RemoteFile:
    """One file at a URL, as the origin of one object.

    Args:
        url: URL that fsspec reads.

    Attributes:
        file_name: last part of the path, which names the staged file.
        info: the object; its name is a digest of URL, state and size, and its size is that of the file.

    Raises:
        ConfigError: the URL is not a single file, its state is not reported, or its name is not a plain file name.
        NotFoundError: the file does not exist.
        UnavailableError: the store does not answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._objects, self._object_path = _share_bucket(url)
        self.file_name = _file_name(self._object_path or self._driver[1], url)
        state, size_bytes = self._look_up()
        if size_bytes is None:
            raise ConfigError(f"{redact_url(url)} is a folder or has no known size; give the URLs of single files")
        if state is None:
            raise ConfigError(
                f"the store of {redact_url(url)} reports neither a checksum nor a modification time, so a change "
                "of the file could not be detected; download the file instead of staging it"
            )
        # The digest of this text names the object, because the digest of the content is not known before the fetch.
        identity = f"datasvc file\0{url}\0{state}\0{size_bytes}"
        self.info = ObjectInfo(Digest(blake3(identity.encode()).hexdigest()), size_bytes)

    def check_unchanged(self) -> None:
        """Raise SourceChangedError if the store reports another state of the file than at `__init__`.

        Raises the errors of `RemoteFile` too.
        """
        if RemoteFile(self.url).info != self.info:
            raise SourceChangedError(f"{redact_url(self.url)} changed while it was staged; stage it again")

    @property
    def objects(self) -> RemoteFile:
        """This file: the `Origin` of its only object, as `Repository.objects` is the `Origin` of many objects."""
        return self

    def location(self, _digest: Digest) -> str:
        """Return the URL without credentials, for messages."""
        return redact_url(self.url)

    def read_range(self, _digest: Digest, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`. Raises NotFoundError or UnavailableError."""
        if (objects := self._usable_objects) is not None:
            return objects.read_range(self._object_path, offset, length)
        return self._ranges.read(self._driver[1], offset, length, location=redact_url(self.url))

    @property
    def can_stream(self) -> bool:
        """Whether `stream_range` needs little memory for a range of any length."""
        return self._usable_objects is not None or self._ranges.can_stream

    def stream_range(
        self, _digest: Digest, offset: int, length: int, take: Take, interrupt: CancellationToken
    ) -> None:
        """Pass `length` bytes from `offset` to `take` as they arrive; see `RangeReader.stream`."""
        if (objects := self._usable_objects) is not None:
            objects.stream_range(self._object_path, offset, length, take, interrupt)
            return
        location = redact_url(self.url)
        self._ranges.stream(self._driver[1], offset, length, take, location=location, interrupt=interrupt)

    @property
    def _usable_objects(self) -> ObjectStoreFiles | None:
        """Files of the bucket by obstore, or None where fsspec's driver must be used, as in a forked process."""
        return self._objects if obstore_loop.is_usable() else None

    @cached_property
    def _driver(self) -> tuple[AbstractFileSystem, str]:
        """File system of fsspec and the path on it. Opening it may ask for the credentials a second time."""
        return resolve_url(self.url)

    @cached_property
    def _ranges(self) -> RangeReader:
        return RangeReader(self._driver[0])

    def _look_up(self) -> tuple[object, int | None]:
        """Return the file's state and size; None for each that the store does not report. A folder has no size."""
        if (objects := self._usable_objects) is not None:
            try:
                meta = objects.details(self._object_path)
            except NotFoundError:
                if objects.names(self._object_path):
                    return None, None
                raise
            return meta["e_tag"] or meta["last_modified"], meta["size"]
        file_system, path = self._driver
        file_system.invalidate_cache()  # the store's client may have cached an earlier state of the file
        metadata: dict[str, Any] = with_retries(
            file_system, "read the metadata of", redact_url(self.url), lambda: file_system.info(path)
        )
        if metadata.get("type") == "directory" or metadata.get("size") is None:
            return None, None
        state = next((metadata[key] for key in _STATES if metadata.get(key)), None)
        return state, int(metadata["size"])


def _share_bucket(url: str) -> tuple[ObjectStoreFiles | None, str]:
    """Return the files of the bucket of `url` (None without obstore or without a path in it), and the path in it."""
    # One client for all files of a process needs few connections, and its credentials once.
    with _sharing:
        bucket = choose_bucket(url)
        if isinstance(bucket, str) or not bucket.prefix:
            return None, ""
        parts = urlsplit(url)
        return _open_files(
            replace(bucket, prefix=""), f"{parts.scheme}://{parts.netloc}", read_settings()
        ), bucket.prefix


@lru_cache(maxsize=16)
def _open_files(bucket: ObjectBucket, url: str, _settings: Hashable) -> ObjectStoreFiles:
    return ObjectStoreFiles(bucket, url)


def _file_name(path: str, url: str) -> str:
    """Return the last part of a store's path, or of a URL. Raises ConfigError if it is not a plain file name."""
    parts = urlsplit(path)
    if parts.scheme in {"http", "https"}:
        path = unquote(parts.path)  # before the split: "%2F" must not become a slash in the file name
    name = path.rpartition("/")[2]
    if not is_plain_name(name):
        raise ConfigError(
            f"cannot stage {redact_url(url)}: its last part, {name[:80]!r}, is not a valid file name; expected 1 to "
            "255 bytes without a leading dot or control characters; copy the file to such a name"
        )
    return name


Store = Repository | RemoteFile
"""Permanent store of an object."""
