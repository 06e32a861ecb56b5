"""Copy missing objects from one repository to another, in parallel, and verify their digests.

Objects never change, so an interrupted copy can simply be repeated: objects that the target has are skipped.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import BinaryIO, Final, cast

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import ObjectInfo, Objects

AT_ONCE: Final = 8
_IN_MEMORY_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class Copied:
    """Amount of data copied.

    Attributes:
        num_objects: number of objects that were missing at the target.
        bytes: size of these objects.
    """

    num_objects: int
    bytes: int

    def __add__(self, other: Copied) -> Copied:
        return Copied(self.num_objects + other.num_objects, self.bytes + other.bytes)


def copy_missing(
    source: Objects,
    target: Objects,
    objects: Iterable[ObjectInfo],
    progress: Progress = NO_PROGRESS,
    *,
    reachable: Callable[[], Container[ObjectInfo]] = frozenset,
    keep: Callable[[], None] = lambda: None,
) -> Copied:
    """Copy the objects that `target` lacks; refresh the time stamp of the others, so that `gc` there keeps them.

    Args:
        source: objects of the source repository.
        target: objects of the target repository.
        objects: distinct objects to copy.
        progress: counts the bytes of each object that the target now has.
        reachable: function that returns the objects reachable from living versions at the target, which `gc` keeps
            at any age. It is called once at most: only if the time stamp of an object cannot be refreshed without a
            copy.
        keep: called after each object, from this thread.

    Raises:
        NotFoundError: the source lacks an object.
        CorruptDataError: an object is damaged at the source; it was not written to the target.
        UnavailableError: a store does not answer. Objects that were copied stay, and a repeated call skips them.
    """
    lock, cached = threading.Lock(), list[Container[ObjectInfo]]()

    def is_reachable(info: ObjectInfo) -> bool:
        with lock:
            if not cached:
                cached.append(reachable())
        return info in cached[0]

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="datasvc-transfer") as pool:
        futures = [pool.submit(_copy, source, target, info, progress, is_reachable) for info in objects]
        moved = 0, 0
        try:
            for done in as_completed(futures):
                size_bytes = done.result()
                moved = (moved[0] + (size_bytes is not None), moved[1] + (size_bytes or 0))
                keep()
        except BaseException:
            # After an error, start no further copies.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Copied(*moved)


def _copy(
    source: Objects,
    target: Objects,
    info: ObjectInfo,
    progress: Progress,
    is_reachable: Callable[[ObjectInfo], bool],
) -> int | None:
    """Copy an object if necessary; return its size, or None if the target had it."""
    is_there = target.refresh(info) or (target.size(info.digest) == info.size_bytes and is_reachable(info))
    if not is_there:
        _check_size(source, info)
        # Try twice from a remote store, because the bytes may have been damaged in transit only.
        for is_last in (True,) if source.storage.is_local else (False, True):
            try:
                _move(source, target, info)
                break
            except CorruptDataError:
                if is_last:
                    raise
    progress.advance(info.size_bytes)
    return None if is_there else info.size_bytes


def _move(source: Objects, target: Objects, info: ObjectInfo) -> None:
    # `fetch` verifies the digest before the object is published at the target.
    if info.size_bytes <= _IN_MEMORY_BYTES:
        content = io.BytesIO()
        source.fetch(info.digest, info.size_bytes, content)
        target.write(info, content.getvalue())
        return
    with target.writing() as writer:
        source.fetch(info.digest, info.size_bytes, cast("BinaryIO", writer))


def _check_size(source: Objects, info: ObjectInfo) -> None:
    """Compare the size of an object with the recorded size, before memory or disk is allocated for it.

    Raises:
        NotFoundError: the object is missing.
        CorruptDataError: its size differs.
    """
    size_bytes = source.size(info.digest)
    if size_bytes is None:
        raise NotFoundError(f"object {source.location(info.digest)} is missing; restore it from another copy")
    if size_bytes != info.size_bytes:
        raise CorruptDataError(
            f"{source.location(info.digest)} has {size_bytes} bytes; its reference expects {info.size_bytes}"
        )
