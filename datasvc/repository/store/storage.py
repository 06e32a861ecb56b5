"""File operations on a store: read, ranged read, list, write, and create-only write.

`LocalFiles`, `ObjectStoreFiles` and `RemoteFiles` do them; `Storage` has what they share. `ObjectStoreFiles` uses
obstore, for the stores that `object_stores.choose_bucket` accepts; `RemoteFiles` uses the driver of fsspec, for all
others and in forked processes. Every commit uses `create`. For a local file, it links a finished temporary file. For
a remote file, it sends a create-only write of obstore or of an atomic driver (see `exclusive_create`), and then reads
the file. The read is needed because a store may write the file and then report an error, or may replace an existing
file without an error. All exceptions are converted to those of `datasvc.errors`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from datasvc import durable
from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, UnavailableError
from datasvc.repository.store import exclusive_create, file_age, obstore_loop
from datasvc.repository.store.local_files import LocalFiles
from datasvc.repository.store.object_store_files import ObjectStoreFiles
from datasvc.repository.store.object_stores import SCHEMES, choose_bucket
from datasvc.repository.store.obstore_loop import CancellationToken
from datasvc.repository.store.ranges import RangeReader, Take
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.remote_files import RemoteFiles
from datasvc.repository.store.urls import local_root, open_without_listings, resolve_url, url_of_pickle, url_to_pickle

if TYPE_CHECKING:
    import fsspec

__all__ = ["ReadOnlyStorage", "Storage", "resolve_url", "too_large"]

# The clock of a remote store is read again after this time.
_REREAD_CLOCK_S = 3600
_Result = TypeVar("_Result")


def too_large(location: str, max_bytes: int) -> CorruptDataError:
    """Return the error for a file that is larger than the maximum for its kind."""
    return CorruptDataError(
        f"{location} has more than the {max_bytes} bytes that are allowed for it, and was not read; restore it from "
        "another copy"
    )


class Storage:
    """File tree below one URL. Paths are relative to it, have forward slashes, and never leave the tree.

    Args:
        url: local folder or any fsspec URL (`s3://bucket/prefix`, `memory://x`). The store's own client reads
            credentials from the environment.

    Attributes:
        url: URL, or local path, of the tree.
        is_local: whether the tree is on a file system of this machine.

    Raises:
        ConfigError: no driver for the URL is installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") or url
        bucket = choose_bucket(self.url)
        self._objects = None if isinstance(bucket, str) else ObjectStoreFiles(bucket, self.url)
        self._client_reason = bucket if isinstance(bucket, str) else ""
        # The driver of fsspec with its files, and the process that has opened it; opened when it is needed.
        self._driver: tuple[int, fsspec.AbstractFileSystem, str, LocalFiles | RemoteFiles] | None = None
        root = local_root(self.url)
        # The driver of fsspec is not asked about a plain path: its import takes longer than many commands.
        files = LocalFiles(root) if root else self._opened()[3] if self._objects is None else None
        self._local = files if isinstance(files, LocalFiles) else None
        self.is_local = self._local is not None
        if self._local is not None:
            self.url = self._local.location("")
        # When the store's clock was read, by `time.time()`, and the store's time minus `time.monotonic()`.
        self._store_clock: tuple[float, float] | None = None
        self._is_writable = (
            self.is_local or self._objects is not None or exclusive_create.creates_exclusively(self._fs)
        )

    def __repr__(self) -> str:
        return f"Storage({redact_url(self.url)!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Do not pickle clients: copies of their sockets and threads do not work in another process.
        url, encrypted = (self.url, b"") if self.is_local else url_to_pickle(self.url)
        return {"url": url, "encrypted": encrypted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(url_of_pickle(state["url"], state["encrypted"]))  # type: ignore[misc]

    def local_path(self, path: str) -> Path | None:
        """Return the local path of `path`, or None if the store is remote."""
        assert ".." not in path.split("/"), path
        return Path(f"{self.url}/{path}" if path else self.url) if self.is_local else None

    def location(self, path: str) -> str:
        """Return `path` as a full URL or local path, for messages."""
        return self._files.location(path)

    @property
    def client(self) -> str:
        """Name of the client of the store; for fsspec's, with the reason why it is not obstore, for people."""
        if isinstance(self._files, ObjectStoreFiles):
            return "obstore"
        if self.is_local:
            return "the operating system"
        return f"{type(self._fs).__name__} of fsspec, because {self._reason}"

    @property
    def _reason(self) -> str:
        """Why obstore is not used."""
        return self._client_reason or "this process was forked from one that has used obstore"

    def check_writable(self) -> None:
        """Raise ConfigError if commits could be lost, because the store's driver has no atomic create."""
        if not self._is_writable:
            raise ConfigError(
                f"a repository at {redact_url(self.url)} cannot be written: its driver {type(self._fs).__name__} is "
                "not known to create files atomically, so one of two concurrent commits could be lost. Reading it is "
                f"possible. Write to {exclusive_create.WRITABLE_STORES}, and copy the files from there"
            )

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """Return the whole content of a file.

        Args:
            path: path of the file.
            max_bytes: maximum size; a larger file is not read. None: no limit.

        Raises:
            NotFoundError, ConfigError, UnavailableError: see `retries.map_exceptions`.
            CorruptDataError: the file is larger than `max_bytes`.
        """
        if max_bytes is None:
            return self._files.read(path)
        content = self.read_start(path, max_bytes + 1)
        if len(content) > max_bytes:
            raise too_large(self.location(path), max_bytes)
        return content

    def read_start(self, path: str, length: int) -> bytes:
        """Return the first `length` bytes of a file, or all if it has fewer; for errors, see `read`.

        This takes one request; reading the size first would take two.
        """
        try:
            # Not `read_range`: `RateLimitedStorage` overrides both methods, and would count the bytes twice.
            return self._files.read_range(path, 0, length)
        except UnavailableError:
            if self.size(path) == 0:  # stores report any range of an empty file as an error
                return b""
            raise

    def read_checked(
        self, path: str, check: Callable[[bytes, str], _Result], *, max_bytes: int | None = None
    ) -> _Result:
        """Return the result of `check` on the content of a file and its location, which is for messages.

        A remote file is read a second time if `check` finds it corrupt, because the transfer may have changed a bit.
        Raises CorruptDataError of `check`, and the errors of `read`.
        """
        content, location = self.read(path, max_bytes), self.location(path)
        try:
            return check(content, location)
        except CorruptDataError:
            if self.is_local:
                raise
            return check(self.read(path, max_bytes), location)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`, or fewer at the end of the file; for errors, see `read`."""
        return self._files.read_range(path, offset, length)

    def read_into(self, path: str, offset: int, out: memoryview) -> int:
        """Fill `out` from `offset` of a local file, and return the number of bytes read; for errors, see `read`."""
        assert isinstance(self._files, LocalFiles)
        return self._files.read_into(path, offset, out)

    @property
    def can_stream(self) -> bool:
        """Whether the memory that `stream_range` needs does not depend on the length of the range."""
        files = self._files
        return isinstance(files, ObjectStoreFiles) or (isinstance(files, RemoteFiles) and files.can_stream)

    def stream_range(self, path: str, offset: int, length: int, take: Take, interrupt: CancellationToken) -> None:
        """Pass exactly `length` bytes from `offset` to `take` as they arrive; see `RangeReader.stream`."""
        self._files.stream_range(path, offset, length, take, interrupt)

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist. Raises the errors of `map_exceptions`."""
        return self._files.size(path)

    def list(self, folder: str) -> list[str]:
        """Return the names directly below `folder`, sorted, without temporary files; [] if it does not exist.

        Raises the errors of `map_exceptions`.
        """
        return sorted([name for name in self._files.names(folder) if not name.startswith(durable.TEMPORARY_PREFIX)])

    def find(self, folder: str) -> Sequence[str]:
        """Return the paths of all files below `folder`, relative to it, in any order; [] if it does not exist.

        Temporary files are included, and links to local folders are followed. On an object store, this takes one
        request per thousand files, in however many folders they are. Raises the errors of `map_exceptions`.
        """
        return self._files.find(folder)

    def create(self, path: str, content: bytes) -> None:
        """Write `content` to `path` only if `path` does not exist.

        `content` must differ from that of any other writer, for example by a random id: `create` may read the file
        and compare it, to find out which writer has written it.

        Raises:
            ConfigError: see `check_writable`.
            ConflictError: `path` exists.
            UnavailableError: the store failed, and `path` still does not exist.
            UnknownOutcomeError: the store failed, and so did the read of `path`.
        """
        self.check_writable()
        self._files.create(path, content)

    def create_temporary(self, content: bytes) -> str:
        """Write a temporary file with a random name, and return its path.

        The caller must remove it with `remove_temporary`; if the caller is killed, `gc` does. Raises ConfigError (see
        `check_writable`, or the store denies access) and UnavailableError.
        """
        self.check_writable()
        path = f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}"
        # `create` is not needed, because no other process uses this random name.
        self._files.write_temporary(path, content)
        return path

    def remove_temporary(self, path: str) -> None:
        """Remove a temporary file; if that fails, it is left to `gc`."""
        files = self._files_to_change
        with suppress(DatasvcError):
            files.remove(path)

    def put_bytes(self, path: str, content: bytes | memoryview, *, synced: bool = True) -> None:
        """Write a file, replacing an existing one. Raises UnavailableError.

        With `synced`, a local file survives a power cut. Remote stores keep every acknowledged write.
        """
        self._files_to_change.put_bytes(path, content, synced=synced)

    def refresh(self, path: str, size_bytes: int) -> bool:
        """Return whether `gc` will keep a file for now; if not, the caller must write it again. See `file_age`.

        The age of a local file is reset. This is False if the file does not exist, has another size, is local and
        locked, or is remote and old: only a new write resets the age of a remote file.

        Raises:
            ConfigError, UnavailableError: see `now_s`.
        """
        files = self._files_to_change
        if isinstance(files, LocalFiles):
            return files.refresh(path, size_bytes)
        file = files.stored_file(path)
        if file is None or file.size_bytes != size_bytes:
            return False
        return file.modified_s > self._estimate_now_s() - file_age.REWRITE_S

    def _estimate_now_s(self) -> float:
        """Return the time of the store's clock as it was read last, plus the time that has passed on this machine."""
        # `now_s` takes requests, so it is called once an hour, and after a change of the clock of this machine or its
        # sleep, in which `time.monotonic` stands still: a store's clock may have been corrected in the meantime.
        own_s = time.time()
        if self._store_clock is None or not 0 <= own_s - self._store_clock[0] < _REREAD_CLOCK_S:
            self._store_clock = own_s, self.now_s() - time.monotonic()
        return self._store_clock[1] + time.monotonic()

    def now_s(self) -> float:
        """Return the time of the clock that dates the store's files, in seconds since 1970, by a new temporary file.

        Do not compare modification times with the clock of this machine: it may show another time.

        Raises:
            ConfigError: the store reports no modification times; or see `create_temporary`.
            UnavailableError: see `create_temporary`.
        """
        path = self.create_temporary(b"what time is it?")
        try:
            file = self._files.stored_file(path)
        finally:
            self.remove_temporary(path)
        if file is None:
            raise UnavailableError(
                f"cannot read the clock of {self.location('')}: the temporary file {path} does not exist after its "
                "write; try again"
            )
        return file.modified_s

    def delete_if_older(self, path: str, before_s: float) -> bool:
        """Delete a file if its last change was before `before_s`, and return whether it was deleted.

        For local files, a concurrent `refresh` is always noticed. For remote files, a `refresh` between the check and
        the deletion is not. Raises the errors of `map_exceptions`.
        """
        return self._files_to_change.delete_if_older(path, before_s)

    def walk(self, folder: str) -> Iterator[file_age.StoredFile]:
        """Yield every file below `folder`, including temporary files, in any order.

        Raises:
            UnavailableError: the store does not respond.
            ConfigError: the store reports no modification times.
        """
        yield from self._files.walk(folder)

    def delete_folder(self, folder: str) -> None:
        """Delete a folder with all its files, if it exists. Raises the errors of `map_exceptions`."""
        self._files_to_change.delete_folder(folder)

    def old_folders(self, parent: str, before_s: float) -> Sequence[str]:
        """Return the folders below `parent` that were changed before `before_s`, each after those below it.

        A remote store has no folders. Raises the errors of `map_exceptions`.
        """
        return self._local.old_folders(parent, before_s) if self._local is not None else []

    def delete_if_empty(self, folder: str) -> None:
        """Delete a folder of a local store unless it has files or folders. Raises the errors of `map_exceptions`."""
        files = self._files_to_change
        if isinstance(files, LocalFiles):
            files.delete_if_empty(folder)

    def adopt(self, path: str, finished: Path) -> None:
        """Move the local file `finished`, which the caller has synced, to `path` of the store.

        In a local store, the file is renamed, or copied if it is on another file system. To a remote store, it is
        uploaded in parts. Raises the errors of `map_exceptions`.
        """
        self._files_to_change.adopt(path, finished)

    @property
    def _files(self) -> LocalFiles | ObjectStoreFiles | RemoteFiles:
        if self._local is not None:  # needs no driver, also in a forked child
            return self._local
        if self._objects is not None and obstore_loop.is_usable():
            return self._objects
        return self._opened()[3]

    @property
    def _files_to_change(self) -> LocalFiles | ObjectStoreFiles | RemoteFiles:
        """The files, for the methods that write, rename or delete some."""
        return self._files

    @property
    def _fs(self) -> fsspec.AbstractFileSystem:
        return self._opened()[1]

    def _opened(self) -> tuple[int, fsspec.AbstractFileSystem, str, LocalFiles | RemoteFiles]:
        """Return the driver of fsspec, its root and its files. A forked child opens its own."""
        if self._driver is None or self._driver[0] != os.getpid():
            driver, root = self._open_driver()
            from fsspec.implementations.local import LocalFileSystem

            is_local = isinstance(driver, LocalFileSystem)
            files = LocalFiles(root) if is_local else RemoteFiles(driver, root, self.url, RangeReader(driver))
            self._driver = os.getpid(), driver, root, files
        return self._driver

    def _open_driver(self) -> tuple[fsspec.AbstractFileSystem, str]:
        try:
            return open_without_listings(self.url)
        except ConfigError as error:
            if self.url.partition("://")[0] not in SCHEMES:
                raise
            raise ConfigError(f"{error}; obstore needs none, but is not used, because {self._reason}") from error


class ReadOnlyStorage(Storage):
    """A storage that is read only: each method that would write, rename or delete a file raises ConfigError."""

    def check_writable(self) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{redact_url(self.url)} was opened read-only; open the repository without read_only=True")

    @property
    def _files_to_change(self) -> NoReturn:
        self.check_writable()
