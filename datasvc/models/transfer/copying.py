"""Objects from one repository to another: those that are missing there, verified on the way, side by side.

Objects never change, so a copy that was interrupted is simply begun again: what is there already is not moved twice.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import BinaryIO, Final, cast

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.repository import ObjectInfo, Objects

AT_ONCE: Final = 8
_IN_MEMORY_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class Copied:
    """What was moved.

    Attributes:
        num_objects: that were missing.
        bytes: of them.
    """

    num_objects: int
    bytes: int

    def __add__(self, other: Copied) -> Copied:
        return Copied(self.num_objects + other.num_objects, self.bytes + other.bytes)


def copy_missing(
    source: Objects,
    target: Objects,
    wanted: Iterable[ObjectInfo],
    report: Callable[[int], None] | None = None,
    *,
    named: Callable[[], Container[ObjectInfo]] = frozenset,
    keep: Callable[[], None] = lambda: None,
) -> Copied:
    """Copy the objects that `target` lacks; those that it has are made young, so that its gc leaves them alone.

    Args:
        source: has them all.
        target: shall have them.
        wanted: each once.
        report: called with bytes of objects that are there by now, from any thread.
        named: returns what living versions at the target name: there its gc leaves alone, however old it is. Called
            only where an old object cannot be made young without sending it again.
        keep: called after each object, from this thread.

    Raises:
        NotFoundError: the source lacks one.
        CorruptDataError: one was changed at the source; it was not written to the target.
        UnavailableError: a store did not answer. What was copied stays, and is not copied again.
    """
    count = report or (lambda _bytes: None)
    lock, found = threading.Lock(), list[Container[ObjectInfo]]()

    def is_named(info: ObjectInfo) -> bool:
        with lock:
            if not found:
                found.append(named())
        return info in found[0]

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="datasvc-transfer") as pool:
        futures = [pool.submit(_copy, source, target, info, count, is_named) for info in wanted]
        moved = 0, 0
        try:
            for done in as_completed(futures):
                size_bytes = done.result()
                moved = (moved[0] + (size_bytes is not None), moved[1] + (size_bytes or 0))
                keep()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Copied(*moved)


def _copy(
    source: Objects,
    target: Objects,
    info: ObjectInfo,
    report: Callable[[int], None],
    is_named: Callable[[ObjectInfo], bool],
) -> int | None:
    """Return the bytes of an object that was copied, None for one that was there."""
    is_there = target.refresh(info) or (target.size(info.digest) == info.size_bytes and is_named(info))
    if not is_there:
        _check_size(source, info)
        # Twice from a remote store: a bit that flipped on the way does not do so again.
        for is_last in (True,) if source.storage.is_local else (False, True):
            try:
                _move(source, target, info)
                break
            except CorruptDataError:
                if is_last:
                    raise
    report(info.size_bytes)
    return None if is_there else info.size_bytes


def _move(source: Objects, target: Objects, info: ObjectInfo) -> None:
    # `fetch` compares the digest, and only then the object gets its name.
    if info.size_bytes <= _IN_MEMORY_BYTES:
        content = io.BytesIO()
        source.fetch(info.digest, info.size_bytes, content)
        target.write(info, content.getvalue())
        return
    with target.writing() as writer:
        source.fetch(info.digest, info.size_bytes, cast("BinaryIO", writer))


def _check_size(source: Objects, info: ObjectInfo) -> None:
    """Raise where an object is not as large as what names it says: before memory or disk is taken for it."""
    found_bytes = source.size(info.digest)
    if found_bytes is None:
        raise NotFoundError(f"object {source.location(info.digest)} is missing; restore it from another copy")
    if found_bytes != info.size_bytes:
        raise CorruptDataError(
            f"{source.location(info.digest)} has {found_bytes} bytes; what names it says {info.size_bytes}"
        )
