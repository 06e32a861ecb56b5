"""The few calls we need of a store, over fsspec: read, ranged read, list, put, and create-only put.

`create` is what every commit rests on. On local files it is a link of a finished temporary file; elsewhere it
is fsspec's `pipe_file(mode="create")`, always followed by a read-back, because a store may answer with an error
after having written, or ignore the condition. Foreign exceptions end here: callers see `datasvc.errors` only.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

from datasvc import durable
from datasvc.errors import ConfigError, ConflictError, NotFoundError, UnavailableError, UnknownOutcomeError
from datasvc.repository import age

_CONTAINER_SCHEMES = frozenset({"abfs", "abfss", "adl", "az"})
# Packages whose exceptions mean "the store did not answer", though they are no OSError.
_CLIENT_PACKAGES = frozenset({"aiobotocore", "aiohttp", "asyncio", "azure", "botocore", "gcsfs", "google", "s3fs"})


@contextmanager
def translated(action: str, location: str) -> Iterator[None]:
    """Turn a store's exceptions into ours; `action` and `location` say what was tried, on what.

    Raises:
        NotFoundError: nothing is at `location`.
        ConfigError: the store refuses: credentials or permissions.
        UnavailableError: any other failure of the store or of the way to it.
    """
    try:
        yield
    except FileExistsError:
        raise
    except NotADirectoryError as error:
        raise ConfigError(f"cannot {action} {location}: a part of the path is a file, not a folder") from error
    except FileNotFoundError as error:
        raise NotFoundError(f"cannot {action} {location}: nothing is there") from error
    except PermissionError as error:
        raise ConfigError(f"cannot {action} {location}: not allowed ({error}); check the credentials") from error
    except (OSError, TimeoutError) as error:
        raise UnavailableError(f"cannot {action} {location}: {error}") from error
    except ImportError as error:
        raise ConfigError(f"cannot {action} {location}: its driver is missing ({error})") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENT_PACKAGES:
            raise
        raise UnavailableError(f"cannot {action} {location}: {type(error).__name__}: {error}") from error


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
    except (ValueError, ImportError) as error:
        raise ConfigError(f"cannot use {redact_url(url)!r}: {error}; is the driver's extra installed?") from error
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
        self.url = self._root if self.is_local else url.rstrip("/")

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

    def read(self, path: str) -> bytes:
        """Return the whole content. Raises NotFoundError, UnavailableError."""
        with translated("read", self.location(path)):
            return bytes(self._fs.cat_file(self._full(path)))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`; fewer where the content ends. Raises as `read`."""
        with translated("read", self.location(path)):
            return bytes(self._fs.cat_file(self._full(path), start=offset, end=offset + length))

    def size(self, path: str) -> int | None:
        """Return the size in bytes, or None when nothing is there. Raises UnavailableError."""
        try:
            with translated("look at", self.location(path)):
                return int(self._fs.info(self._full(path), **self._fresh())["size"])
        except NotFoundError:
            return None

    def list(self, folder: str) -> list[str]:
        """Return the names directly below `folder`, sorted; [] when there is no such folder.

        Unfinished temporary files are left out. Raises UnavailableError.
        """
        try:
            with translated("list", self.location(folder)):
                self._fs.invalidate_cache(self._full(folder))
                entries = self._fs.ls(self._full(folder), detail=False)
        except NotFoundError:
            return []
        # Some stores list the folder itself among its entries.
        own = self._fs._strip_protocol(self._full(folder))  # noqa: SLF001 - fsspec's own name for its documented rule
        paths = {self._fs._strip_protocol(entry) for entry in entries} - {own}  # noqa: SLF001
        names = {path.rpartition("/")[2] for path in paths}
        return sorted(name for name in names if not name.startswith(durable.TEMPORARY_PREFIX))

    def create(self, path: str, content: bytes) -> None:
        """Write `content` to `path` only if nothing is there. `content` must be unique to this call's intent.

        Raises:
            ConflictError: something else is there.
            UnavailableError: the store failed and `path` is known to be empty still.
            UnknownOutcomeError: the store failed and could not be asked whether it wrote.
        """
        if self.is_local:
            self._create_local(path, content)
        else:
            self._create_remote(path, content)

    def put_bytes(self, path: str, content: bytes | memoryview, *, synced: bool = True) -> None:
        """Write an immutable object; writing the same content again is harmless.

        Args:
            path: where.
            content: all of it.
            synced: as of `durable.replacing`; stores that are not local always keep what they acknowledge.

        Raises:
            UnavailableError: the store failed.
        """
        with translated("write", self.location(path)):
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
            return age.refresh_local(Path(self._full(path)), size_bytes)
        found = self._file(path)
        return found is not None and found.size_bytes == size_bytes and found.modified_s > time.time() - age.REWRITE_S

    def delete_if_older(self, path: str, before_s: float) -> bool:
        """Delete the file at `path` if it changed last before `before_s`; returns whether it did.

        On local files no writer can make it young unseen. Elsewhere one that does so in the moment between the look
        and the deletion is not seen. Raises UnavailableError, ConfigError.
        """
        with translated("delete", self.location(path)):
            if self.is_local:
                return age.delete_local_if_older(Path(self._full(path)), before_s)
            found = self._file(path)
            if found is None or found.modified_s >= before_s:
                return False
            try:
                self._fs.rm_file(self._full(path))
            except FileNotFoundError:
                return False
            return True

    def walk(self, folder: str) -> Iterator[age.StoredFile]:
        """Yield every file below `folder`, unfinished temporary ones too, in no certain order.

        Raises:
            UnavailableError: the store does not answer.
            ConfigError: the store does not say how old a file is.
        """
        if self.is_local:
            with translated("list", self.location(folder)):
                yield from age.walk_local(Path(self._root), folder)
            return
        for info in self._listing(folder):
            path = f"{folder}/{info['name'].rstrip('/').rpartition('/')[2]}".lstrip("/")
            if info["type"] == "directory":
                yield from self.walk(path)
            else:
                yield age.StoredFile(path, int(info["size"]), age.modified_s(info, self.location(path)))

    def _listing(self, folder: str) -> Sequence[dict[str, Any]]:
        """Return what a remote store says of each entry of `folder`, without the folder itself."""
        full = self._full(folder)
        try:
            with translated("list", self.location(folder)):
                self._fs.invalidate_cache(full)
                entries = self._fs.ls(full, detail=True)
                self._fs.invalidate_cache(full)  # a whole repository's listings would stay in memory
        except NotFoundError:
            return []
        own = self._fs._strip_protocol(full)  # noqa: SLF001 - fsspec's own name for its documented rule
        return [entry for entry in entries if self._fs._strip_protocol(entry["name"]) != own]  # noqa: SLF001

    def _file(self, path: str) -> age.StoredFile | None:
        try:
            with translated("look at", self.location(path)):
                info = self._fs.info(self._full(path), **self._fresh())
        except NotFoundError:
            return None
        return age.StoredFile(path, int(info["size"]), age.modified_s(info, self.location(path)))

    def delete_folder(self, folder: str) -> None:
        """Delete everything below `folder`; nothing happens where there is none. Raises UnavailableError."""
        try:
            with translated("delete", self.location(folder)):
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
        with translated("write", self.location(path)):
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
            with translated("create", str(target)):
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
            self._fs.pipe_file(self._full(path), content, mode="create")
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

    def _fresh(self) -> dict[str, Any]:
        # s3fs answers info() from a listing it cached; a reader of logs needs today's answer.
        return {"refresh": True} if "s3" in self._fs.protocol else {}

    def _full(self, path: str) -> str:
        assert ".." not in path.split("/"), path
        return f"{self._root}/{path}" if path else self._root
