"""The few calls we need of a store, over fsspec: read, ranged read, list, put, and create-only put.

`create` is what every commit rests on. On local files it is a link of a finished temporary file; elsewhere it is
fsspec's `pipe_file(mode="create")`, of a driver that does it in one step (see `exclusive_create`). A read-back always
follows it, because a store may answer with an error after it has written, or ignore the condition. Foreign exceptions
end here: callers see `datasvc.errors` only.
"""

from __future__ import annotations

import inspect
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

from datasvc import durable
from datasvc.errors import (
    ConfigError,
    ConflictError,
    CorruptDataError,
    DatasvcError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from datasvc.extras import how_to_install_driver
from datasvc.repository.store import exclusive_create, file_age
from datasvc.repository.store.cancellation import CancellationToken
from datasvc.repository.store.http_stream import Take
from datasvc.repository.store.ranges import RangeReader
from datasvc.repository.store.retries import map_exceptions, with_retries

_CONTAINER_SCHEMES = frozenset({"abfs", "abfss", "adl", "az"})

_Answer = TypeVar("_Answer")


def check_size(location: str, size_bytes: int, most_bytes: int | None) -> None:
    """Raise CorruptDataError where something has more bytes than anything of its kind: it is not to be read."""
    if most_bytes is not None and size_bytes > most_bytes:
        raise CorruptDataError(
            f"{location} has more than the {most_bytes} bytes that datasvc writes there at most: it is not what it "
            "should be, and was not read"
        )


def _raise_but_missing(_function: object, _path: str, error: Any) -> None:
    """Let a deletion go on where another process was faster."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def resolve_url(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of `url` and the path on it. A name without scheme is a local path.

    Raises:
        ConfigError: the scheme is unknown or its driver is not installed.
        UnavailableError: a driver that connects at once does not get an answer.
    """
    try:
        file_system, root = fsspec.core.url_to_fs(os.path.expanduser(url))
    except OSError as error:
        raise UnavailableError(f"cannot reach {redact_url(url)!r}: {error}") from error
    except ImportError as error:
        raise ConfigError(f"cannot use {redact_url(url)!r} ({error}): {how_to_install_driver(url)}") from error
    except ValueError as error:
        raise ConfigError(f"cannot use {redact_url(url)!r}: {error}") from error
    return file_system, root.rstrip("/") or "/"


def redact_url(url: str) -> str:
    """Return `url` for messages and entries: without passwords, keys and queries, every part of a chain."""
    return "::".join(map(_redact_part, url.split("::")))


def _redact_part(part: str) -> str:
    split = urlsplit(part)
    if not split.netloc:
        return part.partition("?")[0] if split.scheme else part
    user, at, host = split.netloc.rpartition("@")
    # Azure names a container where others name a user; a password follows a colon.
    kept = f"{user}{at}" if split.scheme in _CONTAINER_SCHEMES and ":" not in user else ""
    return urlunsplit((split.scheme, f"{kept}{host}", split.path, "", ""))


class Storage:
    """A folder tree below one URL. Paths are relative to it, with forward slashes, and never climb out.

    Args:
        url: a local folder or any fsspec URL (`s3://bucket/prefix`, `memory://x`). Credentials come from the
            environment, as the store's own client reads them.

    Raises:
        ConfigError: no driver for the URL.
    """

    def __init__(self, url: str) -> None:
        self._fs, self._root = resolve_url(url)
        self._ranges = RangeReader(self._fs)
        self.url = self._root if self.is_local else url.rstrip("/")
        # Another thread's answer may be cached after the listing was forgotten. Some drivers can be told not to use
        # it.
        self._fresh = {"refresh": True} if "refresh" in inspect.signature(self._fs.info).parameters else {}
        self._clock: float | None = None
        self._is_writable = self.is_local or exclusive_create.creates_exclusively(self._fs)

    @property
    def is_local(self) -> bool:
        """Whether the tree lies on a file system of this machine."""
        return isinstance(self._fs, LocalFileSystem)

    def __repr__(self) -> str:
        return f"Storage({redact_url(self.url)!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Clients never travel to another process: a copy of their sockets and threads would hang there.
        return {"url": self.url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"])  # type: ignore[misc]

    def local_path(self, path: str) -> Path | None:
        """Return where `path` lies on this machine, or None when the store is remote."""
        return Path(self._full(path)) if self.is_local else None

    def location(self, path: str) -> str:
        """Return `path` as a full URL or local path, for messages."""
        return self._full(path) if self.is_local else f"{redact_url(self.url)}/{path}"

    def check_writable(self) -> None:
        """Raise ConfigError where commits could be lost: the store's driver does not create a file in one step."""
        if not self._is_writable:
            raise ConfigError(
                f"a repository at {redact_url(self.url)} cannot be written: its driver {type(self._fs).__name__} is "
                "not known to create a file in one step, so of two commits at once one could be lost. Reading it is "
                f"possible. Write to {exclusive_create.WRITABLE_STORES}, and copy the files from there"
            )

    def read(self, path: str, most_bytes: int | None = None) -> bytes:
        """Return the whole content.

        Args:
            path: where.
            most_bytes: that anything has which belongs there; None for any number. What is larger is not read.

        Raises:
            NotFoundError, UnavailableError: as `retries.ask`.
            CorruptDataError: it is larger.
        """
        if most_bytes is None:
            return self._ask("read", path, lambda: bytes(self._fs.cat_file(self._full(path))))
        if self.is_local:
            check_size(self.location(path), self.size(path) or 0, most_bytes)
            return self.read(path)
        content = self._read_start(path, most_bytes + 1)
        check_size(self.location(path), len(content), most_bytes)
        return content

    def _read_start(self, path: str, length: int) -> bytes:
        """Return the first bytes, or all. One request, as for all of it: to ask for the size first takes another."""
        try:
            return self._ranges.read(self._full(path), 0, length, location=self.location(path))
        except UnavailableError:
            if self.size(path) == 0:  # of which stores say that it has no such range
                return b""
            raise

    def read_checked(self, path: str, check: Callable[[bytes], _Answer], *, most_bytes: int | None = None) -> _Answer:
        """Return what `check` makes of the whole content.

        A remote store is asked again where `check` finds damage: a bit that flipped on the way does not do so twice.

        Raises:
            NotFoundError, UnavailableError: as `read`.
            CorruptDataError: from `check`, or as `read`.
        """
        content = self.read(path, most_bytes)
        try:
            return check(content)
        except CorruptDataError:
            if self.is_local:
                raise
            return check(self.read(path, most_bytes))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`; fewer where the content ends. Raises as `read`."""
        return self._ranges.read(self._full(path), offset, length, location=self.location(path))

    def read_into(self, path: str, offset: int, out: memoryview) -> int:
        """Fill `out` with what lies from `offset` in a local tree; returns how many bytes there were. As `read`."""
        assert self.is_local
        with map_exceptions("read", self.location(path)), open(self._full(path), "rb", buffering=0) as file:
            file.seek(offset)
            filled = 0
            while filled < len(out) and (length := file.readinto(out[filled:])):
                filled += length
            return filled

    @property
    def can_stream(self) -> bool:
        """Whether `stream_range` needs little memory, however long the range."""
        return self._ranges.can_stream

    def stream_range(self, path: str, offset: int, length: int, take: Take, interrupt: CancellationToken) -> None:
        """Hand exactly `length` bytes from `offset` to `take` as they arrive; see `RangeReader.stream`."""
        self._ranges.stream(self._full(path), offset, length, take, location=self.location(path), interrupt=interrupt)

    def size(self, path: str) -> int | None:
        """Return the size in bytes, or None when nothing is there. Raises UnavailableError."""
        info = self._info(path)
        return None if info is None else int(info["size"])

    def list(self, folder: str) -> list[str]:
        """Return the names directly below `folder`, sorted; [] when there is no such folder.

        Unfinished temporary files are left out. Raises UnavailableError.
        """
        entries = self._entries(folder, detail=False)
        # Some stores list the folder itself among its entries.
        own = self._fs._strip_protocol(self._full(folder))  # noqa: SLF001 - fsspec's own name for its documented rule
        paths = {self._fs._strip_protocol(entry) for entry in entries} - {own}  # noqa: SLF001
        names = {path.rpartition("/")[2] for path in paths}
        return sorted(name for name in names if not name.startswith(durable.TEMPORARY_PREFIX))

    def create(self, path: str, content: bytes) -> None:
        """Write `content` to `path` only if nothing is there. `content` must be unique to this call's intent.

        Raises:
            ConfigError: see `check_writable`.
            ConflictError: something else is there.
            UnavailableError: the store failed and `path` is known to be empty still.
            UnknownOutcomeError: the store failed and could not be asked whether it wrote.
        """
        self.check_writable()
        if self.is_local:
            self._create_local(path, content)
        else:
            self._create_remote(path, content)

    def create_temporary(self, content: bytes) -> str:
        """Write a file of a new random name, for as long as this process needs it; returns its path.

        To be removed by `remove_temporary`: `gc` removes that of a process that died.

        Raises:
            ConfigError: see `check_writable`; or the store refuses.
            UnavailableError: the store failed.
        """
        self.check_writable()
        path = f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}"
        # Not by `create`: nobody else looks for this name before it is complete.
        with map_exceptions("write", self.location(path)):
            self._fs.pipe_file(self._full(path), content)
        return path

    def remove_temporary(self, path: str) -> None:
        """Remove such a file; where the store does not let it, it is left to `gc`."""
        with suppress(DatasvcError), map_exceptions("delete", self.location(path)):
            self._fs.rm_file(self._full(path))

    def put_bytes(self, path: str, content: bytes | memoryview, *, synced: bool = True) -> None:
        """Write an immutable object; writing the same content again is harmless.

        Args:
            path: where.
            content: all of it.
            synced: as of `durable.replacing`; stores that are not local always keep what they acknowledge.

        Raises:
            UnavailableError: the store failed.
        """
        with map_exceptions("write", self.location(path)):
            if self.is_local:
                target = Path(self._full(path))
                durable.make_folder(target.parent)
                durable.write_file(target, content, synced=synced)
            else:
                self._fs.pipe_file(self._full(path), bytes(content))

    def refresh(self, path: str, size_bytes: int) -> bool:
        """Make the file at `path` young, see `age`; returns False where it must be written (again) for that.

        Raises UnavailableError.
        """
        if self.is_local:
            return file_age.refresh_local(Path(self._full(path)), size_bytes)
        found = self._file(path)
        if found is None or found.size_bytes != size_bytes:
            return False
        if self._clock is None:
            self._clock = self.now_s() - time.monotonic()
        return found.modified_s > self._clock + time.monotonic() - file_age.REWRITE_S

    def now_s(self) -> float:
        """Return the time by the clock that dates the store's files: that of one which is written now and removed.

        This machine's clock may differ, so an age is only ever told by this one. Raises as `create_temporary`, and
        ConfigError where the store does not say how old a file is.
        """
        path = self.create_temporary(b"what time is it?")
        try:
            found = self._file(path)
        finally:
            self.remove_temporary(path)
        if found is None:
            raise UnavailableError(
                f"cannot read the clock of {self.location('')}: {path}, just written, is not there"
            )
        return found.modified_s

    def delete_if_older(self, path: str, before_s: float) -> bool:
        """Delete the file at `path` if it changed last before `before_s`; returns whether it did.

        On local files no writer can make it young unseen. Elsewhere one that does so in the moment between the look
        and the deletion is not seen. Raises UnavailableError, ConfigError.
        """
        with map_exceptions("delete", self.location(path)):
            if self.is_local:
                return file_age.delete_local_if_older(Path(self._full(path)), before_s)
            found = self._file(path)
            if found is None or found.modified_s >= before_s:
                return False
            try:
                self._fs.rm_file(self._full(path))
            except FileNotFoundError:
                return False
            return True

    def walk(self, folder: str) -> Iterator[file_age.StoredFile]:
        """Yield every file below `folder`, unfinished temporary ones too, in no certain order.

        Raises:
            UnavailableError: the store does not answer.
            ConfigError: the store does not say how old a file is.
        """
        if self.is_local:
            with map_exceptions("list", self.location(folder)):
                yield from file_age.walk_local(Path(self._root), folder)
            return
        for info in self._listing(folder):
            path = f"{folder}/{info['name'].rstrip('/').rpartition('/')[2]}".lstrip("/")
            if info["type"] == "directory":
                yield from self.walk(path)
            else:
                yield file_age.StoredFile(path, int(info["size"]), file_age.modified_s(info, self.location(path)))

    def _listing(self, folder: str) -> Sequence[dict[str, Any]]:
        """Return what a remote store says of each entry of `folder`, without the folder itself."""
        entries = self._entries(folder, detail=True)
        own = self._fs._strip_protocol(self._full(folder))  # noqa: SLF001 - fsspec's own name for its documented rule
        return [entry for entry in entries if self._fs._strip_protocol(entry["name"]) != own]  # noqa: SLF001

    def _file(self, path: str) -> file_age.StoredFile | None:
        info = self._info(path)
        if info is None:
            return None
        return file_age.StoredFile(path, int(info["size"]), file_age.modified_s(info, self.location(path)))

    def _info(self, path: str) -> dict[str, Any] | None:
        """Return what the store says of the file at `path`, None where nothing is there."""
        full = self._full(path)

        def told() -> dict[str, Any]:
            self._forget_listings(full)
            return dict(self._fs.info(full, **self._fresh))

        try:
            info = self._ask("look at", path, told)
        except NotFoundError:
            return None
        # Of a file that a cached listing lacks some drivers say that it is a folder.
        return None if info["type"] == "directory" and not self.is_local else info

    def _entries(self, folder: str, *, detail: bool) -> Sequence[Any]:
        """Return what lies directly below `folder` as the store says it; [] where there is no such folder."""
        full = self._full(folder)

        def listed() -> Sequence[Any]:
            self._forget_listings(full)
            entries: Sequence[Any] = self._fs.ls(full, detail=detail)
            self._forget_listings(full)  # a whole repository's listings would stay in memory
            return entries

        try:
            return self._ask("list", folder, listed)
        except NotFoundError:
            return []

    def _ask(self, action: str, path: str, question: Callable[[], _Answer]) -> _Answer:
        return with_retries(self._fs, action, self.location(path), question)

    def delete_folder(self, folder: str) -> None:
        """Delete everything below `folder`; nothing happens where there is none. Raises UnavailableError."""
        try:
            with map_exceptions("delete", self.location(folder)):
                if self.is_local:
                    shutil.rmtree(self._full(folder), onerror=_raise_but_missing)
                else:
                    self._fs.rm(self._full(folder), recursive=True)
        except NotFoundError:
            return

    def adopt(self, path: str, finished: Path) -> None:
        """Move the local file `finished`, synced by the caller, to `path`; `finished` is gone afterwards.

        A rename where both lie on one file system, an upload in parts elsewhere. Raises UnavailableError.
        """
        with map_exceptions("write", self.location(path)):
            if self.is_local:
                self._adopt_local(Path(self._full(path)), finished)
            else:
                self._fs.put_file(str(finished), self._full(path))
                finished.unlink()

    def _adopt_local(self, target: Path, finished: Path) -> None:
        durable.make_folder(target.parent)
        if finished.stat().st_dev == target.parent.stat().st_dev:
            finished.rename(target)
            durable.fsync_folder(target.parent)
            return
        with durable.replacing(target) as copy, finished.open("rb") as source:
            shutil.copyfileobj(source, copy, length=1 << 22)
        finished.unlink()

    def _create_local(self, path: str, content: bytes) -> None:
        target = Path(self._full(path))
        try:
            with map_exceptions("create", str(target)):
                durable.make_folder(target.parent)
                durable.create_file(target, content)
        except FileExistsError as error:
            raise ConflictError(f"{target} exists already") from error
        except UnavailableError as error:
            if self._read_back(path, error) == content:
                raise UnknownOutcomeError(
                    f"{target} was created, but may not survive a power cut ({error}); look at the disk"
                ) from error
            raise

    def _create_remote(self, path: str, content: bytes) -> None:
        failure: Exception | None = None
        try:
            exclusive_create.create(self._fs, self._full(path), content)
        except Exception as error:  # noqa: BLE001 - whatever it says, only the read-back knows the outcome
            failure = error
        found = self._read_back(path, failure)
        if found == content:
            return
        if found is not None:
            raise ConflictError(f"{self.location(path)} exists already") from failure
        raise UnavailableError(f"cannot create {self.location(path)}: {failure or 'it vanished'}") from failure

    def _read_back(self, path: str, failure: Exception | None) -> bytes | None:
        try:
            return self.read(path)
        except NotFoundError:
            return None
        except (UnavailableError, ConfigError) as error:
            raise UnknownOutcomeError(
                f"creating {self.location(path)} ended with {failure!r} and reading it back failed: {error}; "
                "look at the log before trying again"
            ) from error

    def _forget_listings(self, full: str) -> None:
        """Make the driver ask the store: a listing that it has cached lacks what other processes wrote since.

        Drivers answer for a file from the listing of its folder, and for a folder from that of the one above it.
        """
        if self.is_local:
            return
        folder = full
        while folder:
            # fsspec's cache looks a listing up and then deletes it: another thread may have deleted it in between.
            with suppress(KeyError):
                self._fs.invalidate_cache(folder)
            folder = folder.rpartition("/")[0]

    def _full(self, path: str) -> str:
        assert ".." not in path.split("/"), path
        return f"{self._root}/{path}" if path else self._root
