"""gc: remove the objects that no log names, and what killed writers left.

Never runs by itself. Its order is what makes it safe beside running writers: see `gc`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from datasvc import durable
from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError, UnavailableError
from datasvc.models.registry.removal import kept_of_removed, swept_versions
from datasvc.models.tensors.dedup_index import pointed_digest
from datasvc.models.tensors.tensor_table import read_table
from datasvc.models.versions.entry_refs import objects_of_entry
from datasvc.repository import Digest, Entry, ObjectInfo, Objects, Repository, Storage
from datasvc.repository.logs.journal import JOURNALS
from datasvc.repository.objects.objects import parse_digest
from datasvc.shards.format.shard_table import ShardTable

GRACE_S: Final = 7 * 24 * 3600
# Twice the age at which a writer makes a remote object young: what it did not have to is still safe for a day.
MIN_GRACE_S: Final = 48 * 3600
_OBJECT_PATH = re.compile(r"objects/([0-9a-f]{2})/(\1[0-9a-f]{62})")
_DIGESTS = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_DELETES_AT_ONCE = 8
_MAX_CLOCK_DIFFERENCE_S: Final = 3600


@dataclass
class Garbage:
    """What may be removed.

    Attributes:
        objects: size in bytes of each object.
        pointers: paths of pointers, by the digest of the chunk that they point to.
        temporary_files: paths of files that killed writers left.
        journals: folders of unfinished work that nobody came back to.
        num_young: objects that are kept for their age alone, or were not looked at for it.
    """

    objects: dict[Digest, int] = field(default_factory=dict)
    pointers: dict[Digest, str] = field(default_factory=dict)
    temporary_files: list[str] = field(default_factory=list)
    journals: list[str] = field(default_factory=list)
    num_young: int = 0


@dataclass(frozen=True)
class GcReport:
    """What gc removed, or would remove.

    Attributes:
        dry_run: whether nothing was removed.
        objects: names and sizes, by name.
        pointers: paths below the repository's root, of files that said where chunks of tensors lay; see
            `models.pointers`.
        temporary_files: paths likewise.
        journals: paths likewise.
        num_kept: objects of the repository that stay.
        clock_warning: of a dry run on a store that cannot be written: that ages are by this machine's clock, and why.
    """

    dry_run: bool
    objects: tuple[ObjectInfo, ...]
    pointers: tuple[str, ...]
    temporary_files: tuple[str, ...]
    journals: tuple[str, ...]
    num_kept: int
    clock_warning: str | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the objects."""
        return sum(info.size_bytes for info in self.objects)


def gc(
    repository: Repository,
    *,
    grace_s: float = GRACE_S,
    dry_run: bool = True,
    no_writers: bool = False,
    now_s: float | None = None,
) -> GcReport:
    """Remove every object that no entry of any log names, unfinished files and forgotten journals: the old ones.

    Safe while others read and write. A writer's objects are young, or named by the journal of its work; one that it
    found in the store and means to name is made young (`Objects.reuse`).

    Args:
        repository: data sets and models.
        grace_s: what is younger, in seconds, is kept. Work without a journal must commit in less time than that.
        dry_run: remove nothing, only say what would be removed.
        no_writers: the caller knows that nobody writes: any grace is allowed.
        now_s: the time, seconds since 1970; default that of the store, see `Storage.now_s`. A dry run on a store
            that cannot be written takes this machine's, and its report has a `clock_warning`.

    Raises:
        ConfigError: the grace is too short for running writers; or this machine's clock and the store's differ by
            more than an hour; or an entry or table has a later format; or the store cannot be written, unless in a
            dry run.
        CorruptDataError, NotFoundError: an entry or a table cannot be read, so nobody knows what it names; nothing
            was removed.
        UnavailableError: the store did not answer; what was removed until then was garbage.
    """
    if grace_s < 0 or (grace_s < MIN_GRACE_S and not no_writers):
        raise ConfigError(
            f"a grace of {grace_s:.0f} s could remove what a running writer is about to name; take at least "
            f"{MIN_GRACE_S // 3600} h, or say that nobody writes: --no-writers"
        )
    clock_warning = None
    if now_s is None:
        now_s, clock_warning = _time_s(repository.storage, dry_run=dry_run)
    before_s = now_s - grace_s
    # Objects are listed before the marks are read. An entry committed in between is seen by the marks; one committed
    # later names objects that were written or made young after the list, and sweeping looks at their age again.
    garbage = list_old(repository, before_s)
    num_listed = len(garbage.objects) + garbage.num_young
    try:
        unmark(garbage, named_objects(repository, before_s))
    except DatasvcError as error:
        raise type(error)(f"{error}. Nothing was removed: gc must know everything that is named") from error
    if not dry_run:
        garbage = sweep(repository, garbage, before_s)
    objects = tuple(ObjectInfo(digest, size) for digest, size in sorted(garbage.objects.items()))
    return GcReport(
        dry_run,
        objects,
        tuple(sorted(garbage.pointers.values())),
        tuple(sorted(garbage.temporary_files)),
        tuple(sorted(garbage.journals)),
        num_listed - len(objects),
        clock_warning,
    )


def _time_s(storage: Storage, *, dry_run: bool) -> tuple[float, str | None]:
    """Return the time by the clock that dates the files: this machine's may be fast, and all files be old to it.

    And a warning where that is not it: the store's clock is read off a file that is written for it, and to say what
    would be removed has to be possible without the right to write.
    """
    own_s = time.time()
    try:
        store_s = storage.now_s()
    except (ConfigError, UnavailableError) as error:
        if not dry_run:
            raise
        return own_s, (
            f"ages are by the clock of this machine, for the clock of the store cannot be read ({error}): where this "
            "one is wrong, so is the list; `gc --yes` needs the store's"
        )
    if abs(store_s - own_s) > _MAX_CLOCK_DIFFERENCE_S:
        store, own = (datetime.fromtimestamp(each, UTC).isoformat(timespec="seconds") for each in (store_s, own_s))
        raise ConfigError(
            f"the clock of this machine shows {own}, that of {storage.location('')} {store}. One of them is wrong, "
            "and gc goes by the age of files: nothing was removed. Set the clock, such as by NTP, and run gc again"
        )
    return store_s, None


def list_old(repository: Repository, before_s: float) -> Garbage:
    """Return all objects, unfinished files and journals that were touched last before `before_s`, named or not."""
    storage = repository.storage
    found = Garbage(journals=[plan for plan, newest_s in _journals(storage).items() if newest_s < before_s])
    for file in storage.walk(""):
        path = _OBJECT_PATH.fullmatch(file.path)
        is_old = file.modified_s < before_s
        if path and is_old:
            found.objects[Digest(path[2])] = file.size_bytes
        elif path:
            found.num_young += 1
        elif is_old and (chunk := pointed_digest(file.path)):
            found.pointers[chunk] = file.path
        elif is_old and file.path.rpartition("/")[2].startswith(durable.TEMPORARY_PREFIX):
            found.temporary_files.append(file.path)
    return found


def unmark(garbage: Garbage, named: Iterable[Digest]) -> None:
    """Take what is named off the garbage."""
    for digest in named:
        garbage.objects.pop(digest, None)
        garbage.pointers.pop(digest, None)


def named_objects(repository: Repository, before_s: float) -> Iterator[Digest]:
    """Yield every object that an entry of any log names, some more than once, and those of unfinished work.

    And the digest of every chunk of a tensor, by which pointers are named.

    Args:
        repository: data sets and models.
        before_s: journals that were touched last before do not count.

    Raises:
        CorruptDataError, NotFoundError, ConfigError: an entry or table cannot be read.
        UnavailableError: the store did not answer.
    """
    # Journals before entries: a journal that is gone by now was removed after its work's entry was committed.
    yield from _named_by_journals(repository.storage, before_s)
    tables: set[Digest] = set()
    for name in repository.names("datasets"):
        for entry in repository.versions("datasets", name).entries():
            yield from _digests_in(entry.content)
            yield from _named_by_dataset(repository.objects, f"{name}@{entry.number}", entry, tables)
    for name in repository.names("models"):
        # A save may build on a version that is removed meanwhile: as long as a writer may run it counts as if it were
        # there, so that what the save found in it stays until it has named it itself.
        removed = swept_versions(repository, name, before_s)
        for entry in repository.versions("models", name).entries():
            if entry.number in removed:
                yield from _digests_in(kept_of_removed(entry.content))
                continue
            yield from _digests_in(entry.content)
            yield from _named_by_model(repository.objects, f"{name}@{entry.number}", entry, tables)


def sweep(repository: Repository, garbage: Garbage, before_s: float) -> Garbage:
    """Remove the garbage that is old still; returns what was removed.

    Raises:
        UnavailableError: the store did not answer; some of the garbage is left.
    """
    storage, removed = repository.storage, Garbage()
    # Journals first: none may promise objects that are gone.
    newest = _journals(storage)
    for plan in garbage.journals:
        if newest.get(plan, before_s) < before_s:
            storage.delete_folder(plan)
            removed.journals.append(plan)
    paths = {Objects.path(digest): digest for digest in garbage.objects}
    with ThreadPoolExecutor(_DELETES_AT_ONCE, thread_name_prefix="datasvc-gc") as pool:

        def delete(paths: Iterable[str]) -> Iterator[str]:
            listed = list(paths)
            done = pool.map(lambda path: storage.delete_if_older(path, before_s), listed)
            return (path for path, deleted in zip(listed, done, strict=True) if deleted)

        removed.objects = {paths[path]: garbage.objects[paths[path]] for path in delete(paths)}
        removed.temporary_files = list(delete(garbage.temporary_files))
        deleted = set(delete(garbage.pointers.values()))
        removed.pointers = {chunk: path for chunk, path in garbage.pointers.items() if path in deleted}
    return removed


def _named_by_dataset(objects: Objects, version: str, entry: Entry, tables: set[Digest]) -> Iterator[Digest]:
    try:
        named = [parse_digest(split["table"]) for split in entry.content["splits"].values()]
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"the entry of {version} does not say what its splits are: {error!r}") from error
    for table in named:
        if table not in tables:
            tables.add(table)
            yield table
            yield from ShardTable.decode(_read(objects, version, table), objects.location(table)).objects()


def _named_by_model(objects: Objects, version: str, entry: Entry, tables: set[Digest]) -> Iterator[Digest]:
    named = objects_of_entry(entry.content, version)
    table = named.tensors
    yield from named.all
    if table not in tables:
        tables.add(table)
        try:
            records = read_table(objects, table)
        except NotFoundError as error:
            raise NotFoundError(f"the tensor table of {version} is missing: {error}") from error
        for chunk in (chunk for record in records for chunk in record.chunks):
            yield chunk.digest
            yield from (link.object for link in chunk.chain)


def _read(objects: Objects, version: str, table: Digest) -> bytes:
    try:
        return objects.read(table)
    except NotFoundError as error:
        raise NotFoundError(f"a shard table of {version} is missing: {error}") from error


def _digests_in(value: Any) -> Iterator[Digest]:
    """Yield every text that may be a digest, so that what a later datasvc names is kept by this one too."""
    if isinstance(value, str):
        yield from (Digest(found.decode()) for found in _DIGESTS.findall(value.encode("utf-8", "replace")))
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _digests_in(name)
            yield from _digests_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from _digests_in(each)


def _journals(storage: Storage) -> dict[str, float]:
    """Return when each journal was touched last, by its folder."""
    newest: dict[str, float] = {}
    for file in storage.walk(JOURNALS):
        plan = "/".join(file.path.split("/")[:2])
        newest[plan] = max(newest.get(plan, 0.0), file.modified_s)
    return newest


def _named_by_journals(storage: Storage, before_s: float) -> Iterator[Digest]:
    for plan, newest_s in _journals(storage).items():
        if newest_s < before_s:
            continue
        for file in storage.walk(plan):
            try:
                content = storage.read(file.path)
            except NotFoundError:
                continue  # its work was committed just now
            # Whatever looks like a digest, in damaged records too: keeping too much does no harm.
            yield from (Digest(found.decode()) for found in _DIGESTS.findall(content))
