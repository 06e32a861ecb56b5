"""One remote file as an origin of objects: what a URL gives, named by URL and state."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from datasvc.durable import is_plain_name
from datasvc.errors import ConfigError, SourceChangedError
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.repository.store.cancellation import CancellationToken
from datasvc.repository.store.http_stream import Take
from datasvc.repository.store.ranges import RangeReader
from datasvc.repository.store.retries import with_retries
from datasvc.repository.store.storage import redact_url, resolve_url

# What stores say of the state of a file, the most exact first.
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


class RemoteFile:
    """One file at a URL, as an origin of objects.

    Args:
        url: any that fsspec reads.

    Attributes:
        file_name: the last part of its path, as a name for the staged file.

    Raises:
        ConfigError: it is no single file, or its name cannot name a file in a folder of ours.
        NotFoundError, UnavailableError: it is not there, or the store does not answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._path = resolve_url(url)
        self.file_name = _file_name(self._path, url)
        self._fs.invalidate_cache()  # of the store's client: what it listed once may have changed
        facts: dict[str, Any] = with_retries(self._fs, "look at", redact_url(url), lambda: self._fs.info(self._path))
        if facts.get("type") == "directory" or facts.get("size") is None:
            raise ConfigError(f"{redact_url(url)} is no file of a known size; name single files")
        state = next((facts[key] for key in _STATES if facts.get(key)), None)
        if state is None:
            raise ConfigError(
                f"the store of {redact_url(url)} says neither a checksum nor a time, so a changed file could not be "
                "told from the staged one; copy it instead"
            )
        self._ranges = RangeReader(self._fs)
        name = f"datasvc file\0{url}\0{state}\0{facts['size']}"
        self.info = ObjectInfo(Digest(blake3(name.encode()).hexdigest()), int(facts["size"]))

    def check_unchanged(self) -> None:
        """Raise SourceChangedError unless the store says of the file what it said at first."""
        if RemoteFile(self.url).info != self.info:
            raise SourceChangedError(f"{redact_url(self.url)} changed while it was staged; stage it again")

    @property
    def objects(self) -> RemoteFile:
        """Itself: the store of its only object."""
        return self

    def location(self, _digest: Digest) -> str:
        """Return where it lies, for messages."""
        return redact_url(self.url)

    def read_range(self, _digest: Digest, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`. Raises NotFoundError, UnavailableError."""
        return self._ranges.read(self._path, offset, length, location=redact_url(self.url))

    @property
    def can_stream(self) -> bool:
        """Whether `stream_range` needs little memory, however long the range."""
        return self._ranges.can_stream

    def stream_range(
        self, _digest: Digest, offset: int, length: int, take: Take, interrupt: CancellationToken
    ) -> None:
        """Hand `length` bytes from `offset` to `take` as they arrive; see `RangeReader.stream`."""
        location = redact_url(self.url)
        self._ranges.stream(self._path, offset, length, take, location=location, interrupt=interrupt)


def _file_name(path: str, url: str) -> str:
    """Return the last part of a path of a store. Raises ConfigError where it cannot name a file."""
    parts = urlsplit(path)
    if parts.scheme in {"http", "https"}:
        path = unquote(parts.path)  # before it is taken apart: "%2F" is a slash to whoever opens the result
    name = path.rpartition("/")[2]
    if not is_plain_name(name):
        raise ConfigError(
            f"cannot stage {redact_url(url)}: its last part, {name[:80]!r}, is no name for a file in the cache; "
            "expected 1 to 255 bytes without a leading dot or control characters; copy the file to such a name"
        )
    return name


Store = Repository | RemoteFile
"""Where an object lives for good."""
