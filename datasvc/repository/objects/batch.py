"""Many objects stored together: each synced before it has its name, as always, but not each waited for by itself.

A sync of one file makes the file system commit all that it has begun. So the disk is told to begin at once with every
file, and asked for the oldest only when a window of them is full: most then find that they are on it already. Folders
are synced at the end, each once.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final, Self, TypeVar

from datasvc import durable
from datasvc.repository.objects.intact import mark_intact
from datasvc.repository.objects.objects import Digest, ObjectInfo, Objects
from datasvc.repository.store.retries import map_exceptions

_MAX_OPEN: Final = 128
_SYNCS_AT_ONCE: Final = 8

_Each = TypeVar("_Each")


@dataclass(frozen=True)
class _PendingObject:
    """A whole object that may not be on the disk yet, and has no name."""

    file: FileIO
    temporary: Path
    target: Path
    writeback: Future[None]


class ObjectBatch:
    """Objects that are stored together. Use it as a context manager; safe for threads.

    What was not published when the block ends, because of an error, is removed.

    Args:
        objects: where to.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._written: deque[_PendingObject] = deque()
        self._unsynced: set[Path] = set()
        # A busy disk lets whoever asks it wait; those who encode the next object shall not.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="datasvc-writeback")

    def write(self, info: ObjectInfo, content: bytes | memoryview) -> None:
        """Write `content`, which has that digest and size and cannot be reused.

        It has its name for certain once `finish` returned. Raises UnavailableError.
        """
        target = self._objects.local_path(info.digest)
        if target is None:
            self._objects.write(info, content)
            return
        with map_exceptions("write", str(target)):
            self._make_folder(target.parent)
            self._written.append(self._write(target, content))
        if len(self._written) > _MAX_OPEN:
            with suppress(IndexError):  # others took them
                self._publish(self._written.popleft())

    def reuse(self, digest: Digest) -> None:
        """Let an object that is there be as certain as those of this batch: another may have just stored it.

        Its file was synced before it had its name, but the name may not be on the disk yet.
        """
        path = self._objects.local_path(digest)
        if path is not None:
            with self._lock:
                self._unsynced |= {path.parent, path.parent.parent}

    def finish(self) -> None:
        """Let every object exist under its digest, through a power cut too. Raises UnavailableError."""
        _for_each(self._publish, list(self._written))
        self._written.clear()
        _for_each(_sync_folder, self._unsynced)
        self._unsynced.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._disk.shutdown(cancel_futures=True)
        for written in self._written:
            with suppress(OSError):
                _remove(written.file, written.temporary)

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            durable.make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
        with self._lock:  # of one that is there, too: another may have made it a moment ago
            self._unsynced.add(folder.parent)

    def _write(self, target: Path, content: bytes | memoryview) -> _PendingObject:
        temporary = target.with_name(f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        file = FileIO(temporary, "xb")
        try:
            left = memoryview(content).cast("B")
            while left:
                left = left[file.write(left) :]
            writeback = self._disk.submit(durable.start_writeback, file.fileno(), 0, len(content))
        except BaseException:
            _remove(file, temporary)
            raise
        return _PendingObject(file, temporary, target, writeback)

    def _publish(self, written: _PendingObject) -> None:
        try:
            if not written.writeback.cancel():
                written.writeback.result()
            with map_exceptions("write", str(written.target)):
                os.fsync(written.file.fileno())
                written.file.close()
                written.temporary.rename(written.target)
        except BaseException:
            _remove(written.file, written.temporary)
            raise
        mark_intact(written.target)
        with self._lock:
            self._unsynced.add(written.target.parent)


def _remove(file: FileIO, temporary: Path) -> None:
    file.close()
    temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    with map_exceptions("write", str(folder)):
        durable.fsync_folder(folder)


def _for_each(act: Callable[[_Each], None], arguments: Iterable[_Each]) -> None:
    with ThreadPoolExecutor(_SYNCS_AT_ONCE, thread_name_prefix="datasvc-sync") as pool:
        for _ in pool.map(act, arguments):
            pass
