"""Batched writes of objects, for a save of many tensors: every object is durable at the end, but few syncs wait long.

Every object is synced before its rename. To keep the syncs short, the writeback of each file starts at once, and the
file is synced only when `_MAX_OPEN` later files are written: by then, most of its bytes are on the disk. Each folder
is synced once, at the end.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final, Self

from datasvc import durable
from datasvc.repository.objects.intact import mark_intact
from datasvc.repository.objects.objects import Digest, ObjectInfo, Objects
from datasvc.repository.store.retries import map_exceptions
from datasvc.threads import map_in_threads

_MAX_OPEN: Final = 128  # written files that are not synced yet, and so still open
_MAX_PARALLEL_SYNCS: Final = 8


@dataclass(frozen=True)
class _PendingObject:
    """A completely written object that is not synced and not renamed to its digest yet."""

    file: FileIO
    temporary: Path
    target: Path
    writeback: Future[None]


class ObjectBatch:
    """Objects stored together. Any thread may call `write` and `reuse`; afterwards, one thread calls `finish`.

    A context manager. If the block ends with an error, the temporary files of unpublished objects are removed.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._pending: deque[_PendingObject] = deque()  # oldest first
        self._unsynced_folders: set[Path] = set()
        # A separate thread starts the writeback: the call blocks on a busy disk, but encoders must not wait for it.
        self._writeback_thread = ThreadPoolExecutor(1, thread_name_prefix="datasvc-writeback")

    def write(self, info: ObjectInfo, content: bytes | memoryview) -> None:
        """Write an object that `Objects.reuse` has not found; `info` describes `content`. Raises UnavailableError.

        The object is guaranteed to exist only after `finish` has returned.
        """
        target = self._objects.local_path(info.digest)
        if target is None:
            self._objects.write(info, content)
            return

        def begin() -> _PendingObject:
            self._make_folder(target.parent)
            return self._write(target, content)

        with map_exceptions("write", str(target)):
            self._pending.append(durable.retry_if_folder_vanishes(begin))
        if len(self._pending) > _MAX_OPEN:
            with suppress(IndexError):  # other threads have taken all objects
                self._publish(self._pending.popleft())

    def reuse(self, digest: Digest) -> None:
        """Let `finish` guarantee that an existing object survives a power cut too.

        Another process may have renamed the object a moment ago: its file is synced, but its folder may not be.
        """
        path = self._objects.local_path(digest)
        if path is not None:
            # Sync both folders of the path objects/ab/DIGEST: the folder `ab` may be new too.
            with self._lock:
                self._unsynced_folders |= {path.parent, path.parent.parent}

    def finish(self) -> None:
        """Publish every object under its digest, so that it survives a power cut. Raises UnavailableError."""
        map_in_threads(self._publish, list(self._pending), _MAX_PARALLEL_SYNCS)
        self._pending.clear()
        map_in_threads(_sync_folder, self._unsynced_folders, _MAX_PARALLEL_SYNCS)
        self._unsynced_folders.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._writeback_thread.shutdown(cancel_futures=True)
        for pending in self._pending:
            with suppress(OSError):
                _remove(pending.file, pending.temporary)

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            durable.make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
        with self._lock:  # also for an existing folder: another process may have created it a moment ago
            self._unsynced_folders.add(folder.parent)

    def _write(self, target: Path, content: bytes | memoryview) -> _PendingObject:
        temporary = target.with_name(f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        file = FileIO(temporary, "xb")
        try:
            remaining = memoryview(content).cast("B")
            while remaining:
                remaining = remaining[file.write(remaining) :]
            writeback = self._writeback_thread.submit(durable.start_writeback, file.fileno(), 0, len(content))
        except BaseException:
            _remove(file, temporary)
            raise
        return _PendingObject(file, temporary, target, writeback)

    def _publish(self, pending: _PendingObject) -> None:
        try:
            # The file must stay open until its writeback call has returned. A call that has not started is dropped.
            if not pending.writeback.cancel():
                pending.writeback.result()
            with map_exceptions("write", str(pending.target)):
                # Sync before the rename: a name must never refer to bytes that a power cut can lose.
                os.fsync(pending.file.fileno())
                pending.file.close()
                pending.temporary.rename(pending.target)
        except BaseException:
            _remove(pending.file, pending.temporary)
            raise
        mark_intact(pending.target)
        with self._lock:
            self._unsynced_folders.add(pending.target.parent)


def _remove(file: FileIO, temporary: Path) -> None:
    file.close()
    temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    with map_exceptions("write", str(folder)):
        durable.fsync_folder(folder)
