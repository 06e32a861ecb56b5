"""`RemoteFiles`: the operations of `Storage` on a remote store, by its fsspec driver.

Drivers cache listings, which lack the files that other processes have created since, so cached listings are dropped
before and after each use. Exceptions are converted to those of `datasvc.errors`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from datasvc.errors import NotFoundError
from datasvc.repository.store import exclusive_create, file_age
from datasvc.repository.store.obstore_loop import CancellationToken
from datasvc.repository.store.ranges import RangeReader, Take
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions, with_retries

if TYPE_CHECKING:
    import fsspec

_Result = TypeVar("_Result")


class RemoteFiles:
    """Files below the path `root` of `file_system`, by their paths relative to it; see `Storage`."""

    def __init__(self, file_system: fsspec.AbstractFileSystem, root: str, url: str, ranges: RangeReader) -> None:
        self._fs = file_system
        self._root = root
        self._url = url
        self._ranges = ranges
        # Option of `info` and `find` to ignore cached listings, for drivers that ignore `use_listings_cache`.
        self._refresh_option = {"refresh": True} if "refresh" in inspect.signature(self._fs.info).parameters else {}

    def full(self, path: str) -> str:
        """Return the path for the file system."""
        assert ".." not in path.split("/"), path
        return f"{self._root}/{path}" if path else self._root

    def location(self, path: str) -> str:
        """Return the URL of `path`, for messages."""
        return f"{redact_url(self._url)}/{path}"

    def read(self, path: str) -> bytes:
        return self._retry("read", path, lambda: bytes(self._fs.cat_file(self.full(path))))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        return self._ranges.read(self.full(path), offset, length, location=self.location(path))

    @property
    def can_stream(self) -> bool:
        return self._ranges.can_stream

    def stream_range(self, path: str, offset: int, length: int, take: Take, interrupt: CancellationToken) -> None:
        """Pass exactly `length` bytes from `offset` to `take` as they arrive; see `RangeReader.stream`."""
        location = self.location(path)
        self._ranges.stream(self.full(path), offset, length, take, location=location, interrupt=interrupt)

    def size(self, path: str) -> int | None:
        info = self._info(path)
        return None if info is None else int(info["size"])

    def stored_file(self, path: str) -> file_age.StoredFile | None:
        """Return the size and the modification time of a file, or None if it does not exist."""
        info = self._info(path)
        if info is None:
            return None
        return file_age.StoredFile(path, int(info["size"]), file_age.modified_s(info, self.location(path)))

    def names(self, folder: str) -> set[str]:
        """Return the names directly below `folder`; see `Storage.list`."""
        return {_name_of(entry) for entry in self._listing(folder)}

    def find(self, folder: str) -> Sequence[str]:
        full = self.full(folder)

        def read_tree() -> Sequence[str]:
            self._drop_listings(None)
            paths: Sequence[str] = self._fs.find(full, **self._refresh_option)
            self._drop_listings(None)  # release the memory: a repository may have large listings
            return paths

        prefix = f"{self._fs._strip_protocol(full)}/"  # noqa: SLF001 - a driver's documented interface
        paths = map(self._fs._strip_protocol, self._retry("list", folder, read_tree))  # noqa: SLF001
        return [path[len(prefix) :] for path in paths if path.startswith(prefix)]

    def walk(self, folder: str) -> Iterator[file_age.StoredFile]:
        for info in self._listing(folder):
            path = f"{folder}/{_name_of(info)}".lstrip("/")
            if info["type"] == "directory":
                yield from self.walk(path)
            else:
                yield file_age.StoredFile(path, int(info["size"]), file_age.modified_s(info, self.location(path)))

    def create(self, path: str, content: bytes) -> None:
        exclusive_create.create_and_read_back(
            lambda: exclusive_create.create(self._fs, self.full(path), content),
            lambda: self.read(path),
            content,
            self.location(path),
        )

    def write_temporary(self, path: str, content: bytes) -> None:
        with map_exceptions("write", self.location(path)):
            self._fs.pipe_file(self.full(path), content)

    def remove(self, path: str) -> None:
        with map_exceptions("delete", self.location(path)):
            self._fs.rm_file(self.full(path))

    def put_bytes(self, path: str, content: bytes | memoryview, *, synced: bool) -> None:  # noqa: ARG002
        with map_exceptions("write", self.location(path)):
            self._fs.pipe_file(self.full(path), bytes(content))

    def delete_if_older(self, path: str, before_s: float) -> bool:
        with map_exceptions("delete", self.location(path)):
            file = self.stored_file(path)
            if file is None or file.modified_s >= before_s:
                return False
            try:
                self._fs.rm_file(self.full(path))
            except FileNotFoundError:
                return False
            return True

    def delete_folder(self, folder: str) -> None:
        full = self.full(folder)
        with suppress(NotFoundError), map_exceptions("delete", self.location(folder)):
            self._drop_listings(None)  # files that another process has added are deleted too
            try:
                self._fs.rm(full, recursive=True)
            except FileNotFoundError:  # there is no such folder, or something in it is deleted meanwhile
                self._drop_listings(None)
                for path in self._fs.find(full):
                    with suppress(FileNotFoundError):
                        self._fs.rm_file(path)

    def adopt(self, path: str, finished: Path) -> None:
        with map_exceptions("write", self.location(path)):
            self._fs.put_file(str(finished), self.full(path))
            finished.unlink()

    def _listing(self, folder: str) -> Sequence[dict[str, Any]]:
        """Return fsspec's details of each entry of `folder`; [] if the folder does not exist."""
        full = self.full(folder)

        def read_listing() -> Sequence[dict[str, Any]]:
            self._drop_listings(full)
            entries: Sequence[dict[str, Any]] = self._fs.ls(full, detail=True)
            self._drop_listings(full)  # release the memory
            return entries

        try:
            entries = self._retry("list", folder, read_listing)
        except NotFoundError:
            return []
        # Some stores list the folder itself among its entries.
        itself = self._fs._strip_protocol(full)  # noqa: SLF001 - a driver's documented interface
        return [entry for entry in entries if self._fs._strip_protocol(entry["name"]) != itself]  # noqa: SLF001

    def _info(self, path: str) -> dict[str, Any] | None:
        """Return fsspec's details of the file at `path`, or None if it does not exist."""
        full = self.full(path)

        def read_info() -> dict[str, Any]:
            self._drop_listings(full)
            return dict(self._fs.info(full, **self._refresh_option))

        try:
            info = self._retry("look up", path, read_info)
        except NotFoundError:
            return None
        # Some drivers report a file that is not in a cached listing as a folder. Count a folder as missing.
        return None if info["type"] == "directory" else info

    def _retry(self, action: str, path: str, read: Callable[[], _Result]) -> _Result:
        return with_retries(self._fs, action, self.location(path), read)

    def _drop_listings(self, full: str | None) -> None:
        """Drop the listings of `full` and of all folders above it, or all (None), see `open_without_listings`."""
        if full is None:
            with suppress(KeyError):
                self._fs.invalidate_cache()
        # Drivers take the details of a file from the listing of its parent.
        folder = full
        while folder:
            # fsspec looks a listing up and then deletes it, without a lock: another thread may delete it in between.
            with suppress(KeyError):
                self._fs.invalidate_cache(folder)
            folder = folder.rpartition("/")[0]


def _name_of(entry: Mapping[str, Any]) -> str:
    """Return the last part of the path in an entry of a listing; some stores end folders with a slash."""
    return str(entry["name"]).rstrip("/").rpartition("/")[2]
