"""`LocalFiles`: the operations of `Storage` on a folder of this machine.

Exceptions are converted to those of `datasvc.errors`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from datasvc import durable
from datasvc.errors import ConflictError, NotFoundError, UnavailableError, UnknownOutcomeError
from datasvc.repository.store import exclusive_create, file_age
from datasvc.repository.store.obstore_loop import CancellationToken
from datasvc.repository.store.ranges import Take, stream_blocks
from datasvc.repository.store.retries import map_exceptions


class LocalFiles:
    """Files below the folder `root`, by their paths relative to it; see `Storage`."""

    def __init__(self, root: str) -> None:
        self._root = root

    def location(self, path: str) -> str:
        """Return the full path of `path`, for operations and for messages."""
        assert ".." not in path.split("/"), path
        return f"{self._root}/{path}" if path else self._root

    def read(self, path: str) -> bytes:
        full = self.location(path)
        with map_exceptions("read", full), open(full, "rb") as file:
            return file.read()

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        full = self.location(path)
        with map_exceptions("read", full), open(full, "rb") as file:
            file.seek(offset)
            # Read no more than the file has: `read` allocates memory for the whole length before it reads.
            return file.read(max(0, min(length, os.fstat(file.fileno()).st_size - offset)))

    def read_into(self, path: str, offset: int, out: memoryview) -> int:
        full = self.location(path)
        with map_exceptions("read", full), open(full, "rb", buffering=0) as file:
            file.seek(offset)
            filled = 0
            while filled < len(out) and (length := file.readinto(out[filled:])):
                filled += length
            return filled

    def stream_range(self, path: str, offset: int, length: int, take: Take, interrupt: CancellationToken) -> None:
        """Pass exactly `length` bytes from `offset` to `take`, in blocks; see `RangeReader.stream`."""
        read, location = partial(self.read_range, path), self.location(path)
        stream_blocks(read, offset, length, take, location=location, interrupt=interrupt)

    def size(self, path: str) -> int | None:
        file = self.stored_file(path)
        return None if file is None else file.size_bytes

    def stored_file(self, path: str) -> file_age.StoredFile | None:
        """Return the size and the modification time of a file, or None if it does not exist."""
        full = self.location(path)
        try:
            with map_exceptions("look up", full):
                status = os.stat(full)
        except NotFoundError:
            return None
        return file_age.StoredFile(path, status.st_size, status.st_mtime)

    def names(self, folder: str) -> set[str]:
        """Return the names directly below `folder`; see `Storage.list`."""
        full = self.location(folder)
        try:
            with map_exceptions("list", full):
                return set(os.listdir(full))
        except NotFoundError:
            return set()

    def find(self, folder: str) -> Sequence[str]:
        full = self.location(folder)
        with map_exceptions("list", full):
            walk = os.walk(full, onerror=_raise_unless_missing, followlinks=True)
            return [f"{parent}/{name}"[len(full) + 1 :] for parent, _, names in walk for name in names]

    def walk(self, folder: str) -> Iterator[file_age.StoredFile]:
        with map_exceptions("list", self.location(folder)):
            yield from file_age.walk_local(Path(self._root), folder)

    def create(self, path: str, content: bytes) -> None:
        """See `Storage.create`: a finished temporary file gets the name by a link."""
        target = Path(self.location(path))
        try:
            with map_exceptions("create", str(target)):
                durable.retry_if_folder_vanishes(durable.create_file, target, content, folder=target.parent)
        except FileExistsError as error:
            raise ConflictError(f"{target} exists already") from error
        except UnavailableError as error:
            # `create_file` links the finished file, then syncs the folder. If only the sync failed, the file exists.
            if exclusive_create.read_back(lambda: self.read(path), str(target), error) == content:
                raise UnknownOutcomeError(
                    f"{target} was created, but may not survive a power cut ({error}); check the disk"
                ) from error
            raise

    def write_temporary(self, path: str, content: bytes) -> None:
        """Write a file that has no name of its own; see `Storage.create_temporary`."""
        full = self.location(path)
        with map_exceptions("write", full), open(full, "wb") as file:
            file.write(content)

    def remove(self, path: str) -> None:
        full = self.location(path)
        with map_exceptions("delete", full):
            os.remove(full)

    def put_bytes(self, path: str, content: bytes | memoryview, *, synced: bool) -> None:
        target = Path(self.location(path))
        with map_exceptions("write", str(target)):
            create = partial(durable.write_file, target, content, synced=synced)
            durable.retry_if_folder_vanishes(create, folder=target.parent)

    def refresh(self, path: str, size_bytes: int) -> bool:
        return file_age.refresh_local(Path(self.location(path)), size_bytes)

    def delete_if_older(self, path: str, before_s: float) -> bool:
        full = self.location(path)
        with map_exceptions("delete", full):
            return file_age.delete_local_if_older(Path(full), before_s)

    def delete_folder(self, folder: str) -> None:
        full = self.location(folder)
        with suppress(NotFoundError), map_exceptions("delete", full):
            shutil.rmtree(full, onerror=_ignore_missing)

    def old_folders(self, parent: str, before_s: float) -> Sequence[str]:
        found = []
        with map_exceptions("list", self.location(parent)):
            for folder, _, _ in os.walk(self.location(parent), topdown=False, onerror=_raise_unless_missing):
                path = folder[len(self._root) + 1 :]
                with suppress(FileNotFoundError):
                    if path != parent and os.stat(folder).st_mtime < before_s:
                        found.append(path)
        return found

    def delete_if_empty(self, folder: str) -> None:
        full = self.location(folder)
        try:
            with map_exceptions("delete", full):
                os.rmdir(full)
        except NotFoundError:
            pass  # another process has removed it
        except UnavailableError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.ENOTEMPTY:
                raise

    def adopt(self, path: str, finished: Path) -> None:
        target = Path(self.location(path))

        def move() -> None:
            if finished.stat().st_dev == target.parent.stat().st_dev:
                finished.rename(target)
                durable.fsync_folder(target.parent)
                return
            with durable.replacing(target) as copy, finished.open("rb") as source:
                shutil.copyfileobj(source, copy, length=1 << 22)
            finished.unlink()

        with map_exceptions("write", str(target)):
            durable.retry_if_folder_vanishes(move, folder=target.parent)


def _raise_unless_missing(error: OSError) -> None:
    """Error handler for os.walk, which would otherwise ignore all errors: ignore only deleted folders."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _ignore_missing(_function: object, _path: str, error: Any) -> None:
    """Error handler for rmtree: ignore files that another process has deleted; `error` is as from `sys.exc_info`."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]
