"""Lists the objects of a version, and copies those that another repository lacks, in threads; verifies digests.

An interrupted copy can be repeated: objects never change, and objects that the target already has are skipped. An
intent journal protects the copied objects from `gc` until the versions are committed: the transfer of a large model
over a slow network may take longer than the grace period.
"""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from typing import Any, BinaryIO, Final, cast

from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError
from datasvc.models.provenance.sample_query import split_tables, tables_of_uses
from datasvc.models.tensors.tensor_table import read_table
from datasvc.models.versions.entry_fields import objects_of_entry
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, ObjectInfo, Objects, Repository, Resolved
from datasvc.repository.objects.objects import digest_of
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.views.named import objects_of_view
from datasvc.threads import map_in_threads

AT_ONCE: Final = 8  # number of threads
# Larger objects are copied through a file, so that the threads together hold at most 64 MiB of objects in memory.
_IN_MEMORY_BYTES: Final = 8 << 20
# All transfers have the same work id. The fingerprint, a digest of the objects, tells their journals apart.
_WORK_ID: Final = digest_of(b"transfer of model versions")
_RENEW_INTERVAL_S: Final = 3600.0


# Exactly 64 hexadecimal digits: part of a longer number is not a digest.
_DIGEST: Final = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


def copy_missing(
    source: Objects,
    target: Objects,
    objects: Iterable[ObjectInfo],
    progress: Progress = NO_PROGRESS,
    *,
    reachable: Callable[[], Container[ObjectInfo]] = frozenset,
    renew: Callable[[], None] = lambda: None,
) -> list[ObjectInfo]:
    """Copy the objects that `target` lacks; reset the age of the others, so that `gc` of the target keeps them.

    Args:
        source: objects of the source repository.
        target: objects of the target repository.
        objects: distinct objects to copy.
        progress: counts the bytes of each object once the target has it, copied or not.
        reachable: function that returns the objects that the remaining (not removed) versions at the target need;
            `gc` keeps these objects at any age. It is called at most once, and only if the age of an object cannot
            be reset without writing the object again.
        renew: function that is called after each object, by one thread at a time; it renews the journal.

    Returns:
        The objects that were missing at the target.

    Raises:
        NotFoundError: the source lacks an object.
        CorruptDataError: an object is damaged at the source; it was not written to the target.
        UnavailableError: a store does not respond. Objects that were copied stay, and a repeated call skips them.
    """
    lock, reachable_once = threading.Lock(), list[Container[ObjectInfo]]()  # the result of `reachable`, once called

    def is_reachable(info: ObjectInfo) -> bool:
        with lock:
            if not reachable_once:
                reachable_once.append(reachable())
        return info in reachable_once[0]

    def copy_one(info: ObjectInfo) -> bool:
        is_copied = _copy(source, target, info, is_reachable)
        progress.advance(info.size_bytes)
        with lock:
            renew()
        return is_copied

    infos = list(objects)
    are_copied = map_in_threads(copy_one, infos, AT_ONCE)
    return list(compress(infos, are_copied))


def _copy(source: Objects, target: Objects, info: ObjectInfo, is_reachable: Callable[[ObjectInfo], bool]) -> bool:
    """Copy an object, unless the target has it and `gc` will keep it there; return whether it was copied."""
    if target.refresh(info) or (target.size(info.digest) == info.size_bytes and is_reachable(info)):
        return False
    _check_size(source, info)
    try:
        _copy_bytes(source, target, info)
    except CorruptDataError:
        if source.storage.is_local:
            raise
        # Read a remote store once more: the bytes may have been damaged only in transit.
        _copy_bytes(source, target, info)
    return True


def _copy_bytes(source: Objects, target: Objects, info: ObjectInfo) -> None:
    """Copy an object. `fetch` verifies its digest before the object is visible at the target."""
    if info.size_bytes <= _IN_MEMORY_BYTES:
        content = io.BytesIO()
        source.fetch(info.digest, info.size_bytes, content)
        target.write(info, content.getvalue())
        return
    with target.writing() as writer:
        source.fetch(info.digest, info.size_bytes, cast("BinaryIO", writer))


def _check_size(source: Objects, info: ObjectInfo) -> None:
    """Check that the object exists and has the recorded size: `_copy_bytes` reads small objects into memory.

    Raises NotFoundError: the object does not exist. Raises CorruptDataError: it has another size.
    """
    size_bytes = source.size(info.digest)
    if size_bytes is None:
        raise NotFoundError(f"object {source.location(info.digest)} is missing; restore it from another copy")
    if size_bytes != info.size_bytes:
        raise CorruptDataError(
            f"{source.location(info.digest)} has {size_bytes} bytes; its reference expects {info.size_bytes}"
        )


@contextmanager
def declare_intent(
    target: Repository, objects: Mapping[Resolved, Sequence[ObjectInfo]]
) -> Iterator[Callable[[], None]]:
    """Write the intent journal. During the `with` block, it protects `objects` (by version) from `gc`.

    Yields a function that renews the journal; call it regularly, from one thread at a time. It writes the journal at
    most once per hour. If the block fails, the journal stays, and expires like any other journal.

    Raises:
        UnavailableError, UnknownOutcomeError: the journal cannot be written.
    """
    if not objects:
        yield lambda: None
        return
    digests = {str(version): [info.digest for info in infos] for version, infos in objects.items()}
    journal = target.journal(_WORK_ID, digest_of(repr(sorted(digests.items())).encode()))
    journal.begin()
    for number, digests_of_version in enumerate(digests.values()):
        journal.write(f"{number:06d}", {"objects": digests_of_version})
    last_renewal_s = time.monotonic()

    def renew() -> None:
        nonlocal last_renewal_s
        if time.monotonic() - last_renewal_s >= _RENEW_INTERVAL_S:
            journal.begin()  # a journal expires by its age; this resets the age
            last_renewal_s = time.monotonic()

    # No `finally`: after a failure the journal must stay, so that a repeated transfer finds the copied objects.
    yield renew
    # All versions are committed, so the journal is no longer needed. If it cannot be removed, `gc` deletes it later.
    with suppress(UnavailableError):
        journal.remove()


def reachable_objects(repository: Repository, version: Resolved, content: Mapping[str, Any]) -> list[ObjectInfo]:
    """Return the distinct objects that a version of a model or data set needs, sorted by digest.

    Raises:
        CorruptDataError: the entry or one of its tables is damaged.
        NotFoundError: one of its objects is missing.
        ConfigError: a table has a format that this version of datasvc does not support.
        UnavailableError: the store does not respond.
    """
    try:
        if version.kind == "models":
            sizes = dict(_of_model(repository, version, content))
        else:
            sizes = dict(_of_dataset(repository, version, content))
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"the entry of {version} has no valid list of its objects: {error!r}") from error
    except NotFoundError as error:
        raise NotFoundError(f"{version} is incomplete: {error}") from error
    # A later release of datasvc may add fields that name objects: also include every other digest in the entry, if
    # the repository has an object for it. The digest in the field `content`, for example, has no object.
    for digest in set(_digests_in(content)) - sizes.keys():
        size_bytes = repository.objects.size(digest)
        if size_bytes is not None:
            sizes[digest] = size_bytes
    return [ObjectInfo(digest, size_bytes) for digest, size_bytes in sorted(sizes.items())]


def _of_model(repository: Repository, version: Resolved, content: Mapping[str, Any]) -> Iterator[tuple[Digest, int]]:
    """Yield the digest and size of each object of a model version; an object may occur several times."""
    refs = objects_of_entry(content, version)
    yield from _with_sizes(repository, refs.all)
    for record in read_table(repository.objects, refs.tensors):
        for chunk in record.chunks:
            for link in chunk.chain:
                yield link.object, link.object_bytes
    for digest in tables_of_uses(content, of_views=True):  # others have no objects that only a view has
        view: list[tuple[Digest, int]] = []
        # Of a view that it was trained on, so that the target can tell which samples. A model can be read without, so
        # a view that is lost is left out; one that is damaged is not, because it may be repaired.
        with suppress(NotFoundError):
            view = list(_with_sizes(repository, objects_of_view(repository.objects, digest)))
        yield from view


def _of_dataset(
    repository: Repository, version: Resolved, content: Mapping[str, Any]
) -> Iterator[tuple[Digest, int]]:
    """Like `_of_model`, for a data-set version: its shard tables, and the objects that these name."""
    for digest in split_tables(content, str(version)).values():
        table = ShardTable.read(repository.objects, digest)
        rows = table.rows.select(["digest", "bytes"]).to_pylist()
        # The table has the sizes of the shards. Ask the store only for the sizes of the other objects.
        shards = {Digest(row["digest"].hex()): int(row["bytes"]) for row in rows}
        yield from shards.items()
        yield from _with_sizes(repository, [digest, *(table.objects() - shards.keys())])


def objects_of_views(repository: Repository, tables: Iterable[Digest]) -> list[ObjectInfo]:
    """Return the objects that only some views have. Raises what `reachable_objects` raises."""
    digests = {digest for table in tables for digest in objects_of_view(repository.objects, table)}
    return [ObjectInfo(digest, size_bytes) for digest, size_bytes in _with_sizes(repository, sorted(digests))]


def _with_sizes(repository: Repository, digests: Iterable[Digest]) -> Iterator[tuple[Digest, int]]:
    """Yield each digest with the size that the store reports. Raises NotFoundError: an object is missing."""
    for digest in digests:
        size_bytes = repository.objects.size(digest)
        if size_bytes is None:
            raise NotFoundError(f"object {repository.objects.location(digest)} is missing")
        yield digest, size_bytes


def _digests_in(value: Any) -> Iterator[Digest]:
    """Yield every digest in the strings of a JSON value, at any depth."""
    if isinstance(value, str):
        yield from map(Digest, _DIGEST.findall(value))
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _digests_in(key)
            yield from _digests_in(child)
    elif isinstance(value, list):
        for child in value:
            yield from _digests_in(child)
