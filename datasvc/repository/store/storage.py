"""File operations on a store over fsspec: read, ranged read, list, write, and create-only write.

Every commit uses `create`. For a local file, it links a finished temporary file. For a remote file, it calls fsspec's
`pipe_file(mode="create")` of an atomic driver (see `exclusive_create`), and then reads the file. The read is needed
because a store may write the file and then report an error, or may replace an existing file without an error. All
exceptions are converted to those of `datasvc.errors`.
"""

from __future__ import annotations

import inspect
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.config import apply_config
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
from datasvc.repository.store.redaction import redact_text, redact_url, safe_cause
from datasvc.repository.store.retries import map_exceptions, with_retries

# The clock of a remote store is read again after this time.
_REREAD_CLOCK_S = 3600
_Result = TypeVar("_Result")


def too_large(location: str, max_bytes: int) -> CorruptDataError:
    """Return the error for a file that is larger than the maximum for its kind."""
    return CorruptDataError(
        f"{location} has more than the {max_bytes} bytes that are allowed for it, and was not read; restore it from "
        "another copy"
    )


def _raise_unless_missing(error: OSError) -> None:
    """Error handler for os.walk, which would otherwise ignore all errors: ignore only deleted folders."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _ignore_missing(_function: object, _path: str, error: Any) -> None:
    """Error handler for rmtree: ignore files that another process has deleted; `error` is as from `sys.exc_info`."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def _name_of(entry: Mapping[str, Any]) -> str:
    """Return the last part of the path in an entry of a listing; some stores end folders with a slash."""
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def resolve_url(url: str, **options: Any) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of `url` and the path on it. A URL without a scheme is a local path.

    Args:
        url: local path or any fsspec URL.
        **options: options of the driver.

    Raises:
        ConfigError: the scheme is unknown, or its driver is not installed.
        UnavailableError: a driver that connects immediately gets no response.
    """
    try:
        file_system, root = fsspec.core.url_to_fs(os.path.expanduser(url), **options)
    except OSError as error:
        raise UnavailableError(f"cannot reach {redact_url(url)!r}: {redact_text(str(error))}") from safe_cause(error)
    except ImportError as error:
        raise ConfigError(f"cannot use {redact_url(url)!r} ({error}): {how_to_install_driver(url)}") from error
    except ValueError as error:
        raise ConfigError(f"cannot use {redact_url(url)!r}: {redact_text(str(error))}") from safe_cause(error)
    return file_system, root.rstrip("/") or "/"


def _without_listings(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of `url`, which caches no listings if its driver has the option; see `resolve_url`.

    A cached listing lacks the entries that other processes have committed since, and drivers answer for single files
    from it. `Storage._drop_listings` alone is not enough: until the request that follows it, another thread may cache
    a listing that it requested before the commit.
    """
    try:
        return resolve_url(url, use_listings_cache=False)
    except TypeError:  # a driver of somebody else, without that option
        return resolve_url(url)


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
        self._fs, self._root = _without_listings(url)
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self._ranges = RangeReader(self._fs)
        self.url = self._root if self.is_local else url.rstrip("/")
        # Option of `info` and `find` to ignore cached listings, for drivers that ignore `use_listings_cache`.
        self._refresh_option = {"refresh": True} if "refresh" in inspect.signature(self._fs.info).parameters else {}
        # When the store's clock was read, by `time.time()`, and the store's time minus `time.monotonic()`.
        self._store_clock: tuple[float, float] | None = None
        self._is_writable = self.is_local or exclusive_create.creates_exclusively(self._fs)

    def __repr__(self) -> str:
        return f"Storage({redact_url(self.url)!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Do not pickle clients: copies of their sockets and threads do not work in another process.
        return {"url": self._url_to_pickle()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"])  # type: ignore[misc]

    def _url_to_pickle(self) -> str:
        """Return the URL. Its user and password are left out if fsspec's configuration contains the same ones.

        Otherwise they must be in the pickle: a worker process could not open the store without them.
        """
        url_without_password = redact_url(self.url)
        # Do not compare the options of several drivers in a chain, as in "zip://a::s3://b".
        if url_without_password == self.url or "::" in self.url:
            return self.url
        driver = type(self._fs)
        # Compare the options that fsspec would use, without opening a store. FSSPEC_* variables and fsspec's
        # configuration files may set the user and password too.
        options, configured_options = (
            apply_config(driver, driver._get_kwargs_from_urls(url))  # noqa: SLF001 - a driver's documented interface
            for url in (self.url, url_without_password)
        )
        same_path = driver._strip_protocol(self.url) == driver._strip_protocol(url_without_password)  # noqa: SLF001
        return url_without_password if same_path and options == configured_options else self.url

    def local_path(self, path: str) -> Path | None:
        """Return the local path of `path`, or None if the store is remote."""
        return Path(self._full(path)) if self.is_local else None

    def location(self, path: str) -> str:
        """Return `path` as a full URL or local path, for messages."""
        return self._full(path) if self.is_local else f"{redact_url(self.url)}/{path}"

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
            return self._retry("read", path, lambda: bytes(self._fs.cat_file(self._full(path))))
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
            return self._read_range(path, 0, length)
        except UnavailableError:
            if self.size(path) == 0:  # stores report any range of an empty file as an error
                return b""
            raise

    def read_checked(
        self, path: str, check: Callable[[bytes, str], _Result], *, max_bytes: int | None = None
    ) -> _Result:
        """Return the result of `check` on the whole content of a file.

        A remote file is read a second time if `check` finds it corrupt, because the transfer may have changed a bit.

        Args:
            path: path of the file.
            check: function that verifies and decodes the content; its second argument is the location, for messages.
            max_bytes: see `read`.

        Raises:
            NotFoundError, ConfigError, UnavailableError: see `read`.
            CorruptDataError: raised by `check`; or see `read`.
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
        return self._read_range(path, offset, length)

    def _read_range(self, path: str, offset: int, length: int) -> bytes:
        full = self._full(path)
        if not self.is_local:
            return self._ranges.read(full, offset, length, location=self.location(path))
        with map_exceptions("read", full), open(full, "rb") as file:
            file.seek(offset)
            # Read no more than the file has: `read` allocates memory for the whole length before it reads.
            return file.read(max(0, min(length, os.fstat(file.fileno()).st_size - offset)))

    def read_into(self, path: str, offset: int, out: memoryview) -> int:
        """Fill `out` from `offset` of a local file, and return the number of bytes read; for errors, see `read`."""
        assert self.is_local
        full = self._full(path)
        with map_exceptions("read", full), open(full, "rb", buffering=0) as file:
            file.seek(offset)
            filled = 0
            while filled < len(out) and (length := file.readinto(out[filled:])):
                filled += length
            return filled

    @property
    def can_stream(self) -> bool:
        """Whether the memory that `stream_range` needs does not depend on the length of the range."""
        return self._ranges.can_stream

    def stream_range(self, path: str, offset: int, length: int, take: Take, interrupt: CancellationToken) -> None:
        """Pass exactly `length` bytes from `offset` to `take` as they arrive; see `RangeReader.stream`."""
        self._ranges.stream(self._full(path), offset, length, take, location=self.location(path), interrupt=interrupt)

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist. Raises the errors of `map_exceptions`."""
        if not self.is_local:
            info = self._info(path)
            return None if info is None else int(info["size"])
        full = self._full(path)
        try:
            with map_exceptions("look up", full):
                return os.stat(full).st_size
        except NotFoundError:
            return None

    def list(self, folder: str) -> list[str]:
        """Return the names directly below `folder`, sorted, without temporary files; [] if it does not exist.

        Raises the errors of `map_exceptions`.
        """
        full = self._full(folder)
        if self.is_local:
            try:
                with map_exceptions("list", full):
                    names = set(os.listdir(full))
            except NotFoundError:
                return []
        else:
            names = {_name_of(entry) for entry in self._listing(folder)}
        return sorted([name for name in names if not name.startswith(durable.TEMPORARY_PREFIX)])

    def find(self, folder: str) -> Sequence[str]:
        """Return the paths of all files below `folder`, relative to it, in any order; [] if it does not exist.

        Temporary files are included, and links to local folders are followed. On an object store, this takes one
        request per thousand files, in however many folders they are. Raises the errors of `map_exceptions`.
        """
        full = self._full(folder)
        if self.is_local:
            with map_exceptions("list", full):
                walk = os.walk(full, onerror=_raise_unless_missing, followlinks=True)
                return [f"{parent}/{name}"[len(full) + 1 :] for parent, _, names in walk for name in names]

        def read_tree() -> Sequence[str]:
            self._drop_listings(None)
            paths: Sequence[str] = self._fs.find(full, **self._refresh_option)
            self._drop_listings(None)  # release the memory: a repository may have large listings
            return paths

        prefix = f"{self._fs._strip_protocol(full)}/"  # noqa: SLF001 - a driver's documented interface
        paths = map(self._fs._strip_protocol, self._retry("list", folder, read_tree))  # noqa: SLF001
        return [path[len(prefix) :] for path in paths if path.startswith(prefix)]

    def create(self, path: str, content: bytes) -> None:
        """Write `content` to `path` only if `path` does not exist.

        Args:
            path: path to create.
            content: bytes that differ from those of any other writer, for example by a random id. `create` may read
                the file and compare it with them, to find out which writer has written it.

        Raises:
            ConfigError: see `check_writable`.
            ConflictError: `path` exists.
            UnavailableError: the store failed, and `path` still does not exist.
            UnknownOutcomeError: the store failed, and so did the read of `path`.
        """
        self.check_writable()
        if self.is_local:
            self._create_local(path, content)
        else:
            self._create_remote(path, content)

    def create_temporary(self, content: bytes) -> str:
        """Write a temporary file with a random name, and return its path.

        The caller must remove the file with `remove_temporary`; if the caller is killed before that, `gc` removes it.

        Raises:
            ConfigError: see `check_writable`; or the store denies access.
            UnavailableError: the store failed.
        """
        self.check_writable()
        path = f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}"
        # `create` is not needed, because no other process uses this random name.
        with map_exceptions("write", self.location(path)):
            self._fs.pipe_file(self._full(path), content)
        return path

    def remove_temporary(self, path: str) -> None:
        """Remove a temporary file; if that fails, it is left to `gc`."""
        with suppress(DatasvcError), map_exceptions("delete", self.location(path)):
            self._fs.rm_file(self._full(path))

    def put_bytes(self, path: str, content: bytes | memoryview, *, synced: bool = True) -> None:
        """Write a file, replacing an existing one.

        Args:
            path: path of the file.
            content: whole content.
            synced: whether a local file is synced, so that it survives a power cut. Remote stores keep every
                acknowledged write.

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
        """Return whether `gc` will keep a file for now; if not, the caller must write it again. See `file_age`.

        The age of a local file is reset. This is False if the file does not exist, has another size, is local and
        locked, or is remote and old: only a new write resets the age of a remote file.

        Raises:
            ConfigError, UnavailableError: see `now_s`.
        """
        if self.is_local:
            return file_age.refresh_local(Path(self._full(path)), size_bytes)
        file = self._file(path)
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
        """Return the time of the clock that dates the store's files, in seconds since 1970.

        The result is the modification time of a new temporary file. Do not compare modification times with the clock
        of this machine: it may show another time.

        Raises:
            ConfigError: the store reports no modification times; or see `create_temporary`.
            UnavailableError: see `create_temporary`.
        """
        path = self.create_temporary(b"what time is it?")
        try:
            file = self._file(path)
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
        with map_exceptions("delete", self.location(path)):
            if self.is_local:
                return file_age.delete_local_if_older(Path(self._full(path)), before_s)
            file = self._file(path)
            if file is None or file.modified_s >= before_s:
                return False
            try:
                self._fs.rm_file(self._full(path))
            except FileNotFoundError:
                return False
            return True

    def walk(self, folder: str) -> Iterator[file_age.StoredFile]:
        """Yield every file below `folder`, including temporary files, in any order.

        Raises:
            UnavailableError: the store does not respond.
            ConfigError: the store reports no modification times.
        """
        if self.is_local:
            with map_exceptions("list", self.location(folder)):
                yield from file_age.walk_local(Path(self._root), folder)
            return
        for info in self._listing(folder):
            path = f"{folder}/{_name_of(info)}".lstrip("/")
            if info["type"] == "directory":
                yield from self.walk(path)
            else:
                yield file_age.StoredFile(path, int(info["size"]), file_age.modified_s(info, self.location(path)))

    def _listing(self, folder: str) -> Sequence[dict[str, Any]]:
        """Return fsspec's details of each entry of a remote `folder`; [] if the folder does not exist."""
        full = self._full(folder)

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

    def _file(self, path: str) -> file_age.StoredFile | None:
        """Return the size and the modification time of a file, or None if it does not exist."""
        info = self._info(path)
        if info is None:
            return None
        return file_age.StoredFile(path, int(info["size"]), file_age.modified_s(info, self.location(path)))

    def _info(self, path: str) -> dict[str, Any] | None:
        """Return fsspec's details of the file at `path`, or None if it does not exist."""
        full = self._full(path)

        def read_info() -> dict[str, Any]:
            self._drop_listings(full)
            return dict(self._fs.info(full, **self._refresh_option))

        try:
            info = self._retry("look up", path, read_info)
        except NotFoundError:
            return None
        # Some drivers report a file that is not in a cached listing as a folder. Count a remote folder as missing.
        return None if info["type"] == "directory" and not self.is_local else info

    def _retry(self, action: str, path: str, read: Callable[[], _Result]) -> _Result:
        return with_retries(self._fs, action, self.location(path), read)

    def delete_folder(self, folder: str) -> None:
        """Delete a folder with all its files, if it exists. Raises the errors of `map_exceptions`."""
        with suppress(NotFoundError), map_exceptions("delete", self.location(folder)):
            if self.is_local:
                shutil.rmtree(self._full(folder), onerror=_ignore_missing)
            else:
                self._drop_listings(None)  # files that another process has added are deleted too
                try:
                    self._fs.rm(self._full(folder), recursive=True)
                except FileNotFoundError:  # there is no such folder, or something in it is deleted meanwhile
                    self._drop_listings(None)
                    for path in self._fs.find(self._full(folder)):
                        with suppress(FileNotFoundError):
                            self._fs.rm_file(path)

    def adopt(self, path: str, finished: Path) -> None:
        """Move the local file `finished`, which the caller has synced, to `path` of the store.

        In a local store, the file is renamed, or copied if it is on another file system. To a remote store, it is
        uploaded in parts. Raises the errors of `map_exceptions`.
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
        """Create a local file; for errors, see `create`."""
        target = Path(self._full(path))
        try:
            with map_exceptions("create", str(target)):
                durable.make_folder(target.parent)
                durable.create_file(target, content)
        except FileExistsError as error:
            raise ConflictError(f"{target} exists already") from error
        except UnavailableError as error:
            # `create_file` links the finished file, then syncs the folder. If only the sync failed, the file exists.
            if self._read_back(path, error) == content:
                raise UnknownOutcomeError(
                    f"{target} was created, but may not survive a power cut ({error}); check the disk"
                ) from error
            raise

    def _create_remote(self, path: str, content: bytes) -> None:
        """Create a remote file, and read it to find out whether this call has written it; see `create`."""
        failure: Exception | None = None
        try:
            exclusive_create.create(self._fs, self._full(path), content)
        except Exception as error:  # noqa: BLE001 - after any error, only a read shows the outcome
            failure = error
        # Read even after a success: a store may ignore the condition and report success to two writers.
        stored = self._read_back(path, failure)
        if stored == content:
            return
        if stored is not None:
            raise ConflictError(f"{self.location(path)} exists already") from failure
        reason = redact_text(str(failure)) if failure else "it does not exist after the write"
        cause = safe_cause(failure) if failure else None
        raise UnavailableError(f"cannot create {self.location(path)}: {reason}") from cause

    def _read_back(self, path: str, failure: Exception | None) -> bytes | None:
        """Return the content of a file after a create that may have failed with `failure`; None if there is no file.

        Raises:
            UnknownOutcomeError: the file cannot be read.
        """
        try:
            return self.read(path)
        except NotFoundError:
            return None
        except (UnavailableError, ConfigError) as error:
            raise UnknownOutcomeError(
                f"creating {self.location(path)} failed with {redact_text(repr(failure))}, and so did the read that "
                f"shows whether it exists: {error}; read the log before you try again"
            ) from error

    def _drop_listings(self, full: str | None) -> None:
        """Drop the listings that the driver caches by itself, see `_without_listings`.

        The listings of `full` and of all folders above it are dropped, because drivers take the details of a file
        from the listing of its parent. None: those of all folders, which `find` needs.
        """
        if self.is_local:
            return
        if full is None:
            with suppress(KeyError):
                self._fs.invalidate_cache()
        folder = full
        while folder:
            # fsspec looks a listing up and then deletes it, without a lock: another thread may delete it in between.
            with suppress(KeyError):
                self._fs.invalidate_cache(folder)
            folder = folder.rpartition("/")[0]

    def _full(self, path: str) -> str:
        assert ".." not in path.split("/"), path
        return f"{self._root}/{path}" if path else self._root
