"""Garbage collection: deletes objects that no log entry references, and files left by killed writers.

It runs only on request, by `repo.gc` or `datasvc gc`. Concurrent writers are safe: only old objects are deleted, and
the objects of a writer are young, or referenced by its journal. A writer resets the age of an existing object before
it references the object (`Objects.reuse`).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from datasvc import durable
from datasvc.api.referenced_objects import journal_times, referenced_objects
from datasvc.errors import ConfigError, DatasvcError, UnavailableError
from datasvc.ledger.signals import SIGNALS
from datasvc.models.tensors.chunk_writer import POINTERS, pointed_digest
from datasvc.repository import Digest, ObjectInfo, Objects, Repository, Storage
from datasvc.repository.logs.journal import JOURNALS
from datasvc.repository.objects.in_place import IN_PLACE, recipe_of
from datasvc.repository.removal import swept_versions
from datasvc.runs.run_folders import RUNS, choose_old_runs, delete_run, newest_changes
from datasvc.threads import map_in_threads

GRACE_S: Final = 7 * 24 * 3600
# A writer that reuses a remote object rewrites the object if it is older than a day. A younger object keeps its age,
# so two days of grace leave the writer at least one day to commit.
MIN_GRACE_S: Final = 48 * 3600
_OBJECT_PATH = re.compile(r"objects/([0-9a-f]{2})/(\1[0-9a-f]{62})")
_FOLDERS: Final = ("objects", IN_PLACE, "datasets", "models", POINTERS, JOURNALS, RUNS)
_DELETES_AT_ONCE: Final = 8
_MAX_CLOCK_DIFFERENCE_S: Final = 3600


@dataclass
class Garbage:
    """Old files that may be deleted, and objects that are too young for it.

    Attributes:
        objects: size in bytes of each object.
        pointers: paths of pointers (see `chunk_writer.write_pointer`), by the digest of the chunk that they point to.
        temporary_files: paths of files left by killed writers.
        journals: folders of unfinished work that was not resumed.
        recipes: paths of recipes (see `in_place`), each with the digest of its shard.
        runs: references of runs whose logs are not needed, see `choose_old_runs`.
        young: size in bytes of each young object.
        folders: old folders, each after those below it; those that are empty in the end are removed. A killed writer,
            or names and runs that are made in great number, would otherwise use up the inodes of the disk.
    """

    objects: dict[Digest, int] = field(default_factory=dict)
    pointers: dict[Digest, str] = field(default_factory=dict)
    temporary_files: list[str] = field(default_factory=list)
    journals: list[str] = field(default_factory=list)
    recipes: dict[str, Digest] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    young: dict[Digest, int] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GcReport:
    """Files that gc has deleted, or with `dry_run` would delete; paths are relative to the repository's root.

    Attributes:
        dry_run: whether the files were only listed.
        objects: digests and sizes of objects, sorted by digest.
        pointers: paths of pointers, see `chunk_writer.write_pointer`.
        temporary_files: paths of files left by killed writers.
        journals: folders of unfinished work that was not resumed.
        runs: references of runs whose logs are not needed.
        num_kept: number of objects that are kept.
        num_young: number of objects that nothing references, but that are younger than the grace period.
        young_bytes: total size of the young objects in bytes.
        recipes: paths of recipes of attached shards, see `in_place`.
        clock_warning: if a dry run on a read-only store measured ages by the clock of this machine: why; else None.
    """

    dry_run: bool
    objects: tuple[ObjectInfo, ...]
    pointers: tuple[str, ...]
    temporary_files: tuple[str, ...]
    journals: tuple[str, ...]
    runs: tuple[str, ...]
    num_kept: int
    num_young: int = 0
    young_bytes: int = 0
    clock_warning: str | None = None
    recipes: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Total size of the objects in bytes."""
        return sum(info.size_bytes for info in self.objects)


def gc(
    repository: Repository,
    *,
    grace_s: float = GRACE_S,
    dry_run: bool = True,
    no_writers: bool = False,
    runs_older_than_s: float | None = None,
) -> GcReport:
    """Delete old objects that no log entry references, old temporary files, and journals that were not resumed.

    Also delete old logs of runs that have saved model versions, all of which are removed, and old empty folders.

    Other processes may read and write while gc runs.

    Args:
        repository: repository to clean.
        grace_s: minimum age in seconds; younger files are kept. Work without a journal must commit within this time.
        dry_run: only list the files, delete nothing. On a read-only store, the clock of this machine then measures
            ages, and the report has a `clock_warning`.
        no_writers: assert that no process writes to the repository, which allows any `grace_s`.
        runs_older_than_s: also delete the logs of all runs that were not written for so many seconds, at least
            `grace_s`, with or without versions. None: keep them.

    Raises:
        ConfigError: the grace is too short for running writers; `runs_older_than_s` is shorter than the grace; the
            clocks of this machine and the store differ by more than an hour; an entry or table has a later format;
            the store is read-only (not in a dry run).
        CorruptDataError, NotFoundError: entries or tables cannot be read, so their references are unknown; nothing
            was deleted. The message names all such versions. A version whose entry is damaged and has no copy can be
            marked as lost, see `removal.mark_lost`; gc runs again once that was `grace_s` ago.
        UnavailableError: the store does not respond; a part of the garbage may be deleted.
    """
    if grace_s < 0 or (grace_s < MIN_GRACE_S and not no_writers):
        raise ConfigError(
            f"a grace of {grace_s:.0f} s could delete objects that a running writer is about to reference; use at "
            f"least {MIN_GRACE_S // 3600} h, or --no-writers if no process writes to the repository"
        )
    if runs_older_than_s is not None and runs_older_than_s < grace_s:
        raise ConfigError(
            f"runs_older_than_s is {runs_older_than_s:.0f} s, and the grace is {grace_s:.0f} s; give an age of at "
            "least the grace, in which a run may be continued"
        )
    now_s, clock_warning = _time_s(repository.storage, dry_run=dry_run)
    report = gc_at(repository, now_s, grace_s=grace_s, dry_run=dry_run, runs_older_than_s=runs_older_than_s)
    return replace(report, clock_warning=clock_warning)


def gc_at(
    repository: Repository,
    now_s: float,
    *,
    grace_s: float = GRACE_S,
    dry_run: bool = True,
    runs_older_than_s: float | None = None,
) -> GcReport:
    """Do what `gc` does, at a given time in seconds since 1970 and with any grace."""
    before_s = now_s - grace_s
    # List objects before reading references: an entry that is committed in between is read. A later entry references
    # objects that were written, or whose age was reset, after the listing; `sweep` finds that they are young.
    garbage = list_old(repository, before_s)
    num_listed = len(garbage.objects) + len(garbage.young)
    try:
        discard_referenced(garbage, referenced_objects(repository, before_s))
        any_before_s = -math.inf if runs_older_than_s is None else now_s - runs_older_than_s
        garbage.runs = _old_runs(repository, before_s, any_before_s)
    except DatasvcError as error:
        raise type(error)(f"{error}. Nothing was deleted: gc must be able to read all references") from error
    reported = garbage if dry_run else sweep(repository, garbage, before_s)
    objects = tuple(ObjectInfo(digest, size) for digest, size in sorted(reported.objects.items()))
    return GcReport(
        dry_run=dry_run,
        objects=objects,
        pointers=tuple(sorted(reported.pointers.values())),
        temporary_files=tuple(sorted(reported.temporary_files)),
        journals=tuple(sorted(reported.journals)),
        runs=tuple(reported.runs),
        num_kept=num_listed - len(objects),
        num_young=len(garbage.young),
        young_bytes=sum(garbage.young.values()),
        recipes=tuple(sorted(reported.recipes)),
    )


def _time_s(storage: Storage, *, dry_run: bool) -> tuple[float, str | None]:
    """Return the present time, and a warning if it is not from the store's clock, which dates the files.

    Raises ConfigError or UnavailableError: see `gc`.
    """
    # Use the store's clock: if the clock of this machine is fast, all files look old by it. But reading the store's
    # clock needs a write, and a dry run must be possible without write access.
    own_s = time.time()
    try:
        store_s = storage.now_s()
    except (ConfigError, UnavailableError) as error:
        if not dry_run:
            raise
        return own_s, (
            f"ages are measured by the clock of this machine, because that of the store cannot be read ({error}). "
            "If the clock of this machine is wrong, so is this list; `gc --yes` needs the clock of the store"
        )
    if abs(store_s - own_s) > _MAX_CLOCK_DIFFERENCE_S:
        store, own = (
            datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds") for time_s in (store_s, own_s)
        )
        raise ConfigError(
            f"the clock of this machine shows {own}, that of {storage.location('')} {store}. One of them is wrong, "
            "and gc depends on the age of files, so nothing was deleted. Correct the clock, for example by NTP, and "
            "run gc again"
        )
    return store_s, None


def list_old(repository: Repository, before_s: float) -> Garbage:
    """Return the objects, pointers, temporary files and journals changed before `before_s`, referenced or not."""
    storage = repository.storage
    old = Garbage(journals=[folder for folder, newest_s in journal_times(storage).items() if newest_s < before_s])
    for file in storage.walk(""):
        path = _OBJECT_PATH.fullmatch(file.path)
        is_old = file.modified_s < before_s
        if path and is_old:
            old.objects[Digest(path[2])] = file.size_bytes
        elif path:
            old.young[Digest(path[2])] = file.size_bytes
        elif is_old and (shard := recipe_of(file.path)):
            old.recipes[file.path] = Digest(shard)
        elif is_old and (chunk := pointed_digest(file.path)):
            old.pointers[chunk] = file.path
        elif is_old and file.path.rpartition("/")[2].startswith(durable.TEMPORARY_PREFIX):
            old.temporary_files.append(file.path)
    # Not the folders in the root, and not folders of others in it.
    old.folders = [folder for kind in _FOLDERS for folder in storage.old_folders(kind, before_s)]
    return old


def discard_referenced(garbage: Garbage, referenced: Iterable[Digest]) -> None:
    """Take the referenced objects, and the pointers of referenced chunks, out of the garbage."""
    found = set(referenced) if garbage.recipes else referenced
    garbage.recipes = {path: shard for path, shard in garbage.recipes.items() if shard not in found}
    for digest in found:
        garbage.objects.pop(digest, None)
        garbage.young.pop(digest, None)
        garbage.pointers.pop(digest, None)


def sweep(repository: Repository, garbage: Garbage, before_s: float) -> Garbage:
    """Delete the garbage that is still older than `before_s`; return the deleted files."""
    storage, swept = repository.storage, Garbage()
    # Delete journals first: a journal must never reference deleted objects.
    newest = journal_times(storage)
    for folder in garbage.journals:
        # A journal that its writer has removed since is not in `newest`; the default skips it.
        if newest.get(folder, before_s) < before_s:
            storage.delete_folder(folder)
            swept.journals.append(folder)
    if garbage.runs:
        swept.runs = [ref for ref in garbage.runs if delete_run(storage, ref, before_s)]
        for ref in swept.runs:
            storage.delete_folder(f"{SIGNALS}/{ref}")
    digest_of_path = {Objects.path(digest): digest for digest in garbage.objects}

    def delete(paths: Collection[str]) -> list[str]:
        results = map_in_threads(lambda path: storage.delete_if_older(path, before_s), paths, _DELETES_AT_ONCE)
        return [path for path, is_deleted in zip(paths, results, strict=True) if is_deleted]

    deleted_objects = [digest_of_path[path] for path in delete(digest_of_path)]
    swept.objects = {digest: garbage.objects[digest] for digest in deleted_objects}
    swept.temporary_files = delete(garbage.temporary_files)
    swept.recipes = {path: garbage.recipes[path] for path in delete(garbage.recipes)}
    deleted_pointers = set(delete(garbage.pointers.values()))
    swept.pointers = {chunk: path for chunk, path in garbage.pointers.items() if path in deleted_pointers}
    for folder in garbage.folders:  # last: by now, their files are deleted
        storage.delete_if_empty(folder)
    return swept


def _old_runs(repository: Repository, before_s: float, any_before_s: float) -> list[str]:
    """Return the references of the runs whose logs are not needed; for errors, see `gc`."""
    newest = {ref: changed_s for ref, changed_s in newest_changes(repository.storage).items() if changed_s < before_s}
    versions: dict[str, bool] = {}
    # Reading all entries again takes time, so only if there are old runs.
    for name in repository.names("models") if newest else ():
        swept = swept_versions(repository, "models", name, before_s)
        entries, _ = repository.versions("models", name).try_entries()
        for entry in entries:
            ref = entry.content.get("run")
            if isinstance(ref, str):
                versions[ref] = versions.get(ref, False) or entry.number not in swept
    return choose_old_runs(newest, versions, before_s=before_s, any_before_s=any_before_s)
