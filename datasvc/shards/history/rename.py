"""Rename a data set: its whole history gets a new name, and the versions of the old name are removed.

Entries are immutable, so they are copied byte by byte. Objects are shared. The steps:

1. *Commit* an entry with the new name to the log of the old name. Nothing has the new name before. Of concurrent
   renames one commits. The others, and later calls, find its entry: with the same new name they finish the rename,
   with another one they are refused. Other writers find the entry too, and so that the data set was renamed.
2. *Copy* the removals first, so that no removed version is visible; then the branches, so that no version of a
   branch is taken for one of the main line; then the versions, newest first, so that an append to the new name never
   takes the number of an older version.
3. *End the tags and branches*: copy the moves of each, then append a move that ends it and records the number of the
   rename.
4. *Remove* the versions of the old name and the rename's entry, by one removal.

Each step may be repeated, also by several processes at once. A process does step 4 only after it has found each
version under the new name. The removal of step 4 (the first one that lists the rename's entry) and the end of a tag
are never copied. An entry of the new name that differs from the one to copy is of a later use of the new name, and
stays. But a version that another process committed to the new name during step 1 cannot stay beside the copies. The
rename is undone then, by a removal of its entry alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository import Entry, Repository, Resolved
from datasvc.repository.branching import create_branch, fields_on_line
from datasvc.repository.logs.branches import BRANCHES, MAIN
from datasvc.repository.logs.log import MAX_ENTRY_BYTES, Log, decode_log_entry, decode_numbers, list_logs
from datasvc.repository.logs.references import check_name, is_name, refuse_text
from datasvc.repository.logs.tags import version_of
from datasvc.repository.removal import remove_untagged
from datasvc.repository.resolved import describe_damage
from datasvc.shards.lines.commit import check_newest, commit_on_line, find_line, renamed_to
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.labels import name_tables
from datasvc.shards.versions.version_entry import changed_entry, derived_entry

# Field of the move that ends a tag of the old name: the number of the rename's entry.
_ENDED_BY: Final = "rename"


class _NothingToCommitError(Exception):
    """Ends `Log.append` without a commit."""


def rename(repository: Repository, name: str, new_name: str, *, dry_run: bool = False, message: str = "") -> Resolved:
    """Give a data set a new name, with all its versions, their numbers, its tags, branches and removals.

    The versions of the old name are then removed, and its tags and branches end. Entries of models that name them
    stay, and so does the history of the old name. After an interruption, the same call continues. Until then, the new
    name may lack versions and tags.

    Args:
        repository: the repository that stores the data set.
        name: the present name.
        new_name: a name that has no version yet, not even a removed one.
        dry_run: check the names and the versions, and change nothing.
        message: text stored with the rename.

    Returns:
        The newest version, with its new name.

    Raises:
        ConfigError: a name is not valid, or `new_name` has versions.
        NotFoundError: there is no data set `name`, or all its versions are removed.
        ConflictError: another process committed to the new name, or tagged a version of the old name, meanwhile; or a
            rename to another name was interrupted. The message says what to do.
        CorruptDataError: an entry or a tag cannot be read.
        UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    check_name(name, "data set")
    check_name(new_name, "data set")
    if name == new_name:
        raise ConfigError(f"the data set has the name {name!r} already; give another name")

    committed: Entry | None = None

    def build(head: int) -> Mapping[str, Any]:
        nonlocal committed
        committed = _find_rename(repository, name, new_name, head)
        if committed:
            raise _NothingToCommitError
        repository.resolve("datasets", name)  # raises NotFoundError, which lists the existing names
        if repository.versions("datasets", new_name).head():
            raise ConfigError(
                f"the name {new_name!r} has versions, and their numbers are never used again; choose a name that "
                "never had a version"
            )
        _check_readable(repository, name, head)
        entry = derived_entry({}, {"kind": "rename", "to": new_name}, message=message, parent=None, source=new_name)
        return {**entry, **fields_on_line(repository, name, MAIN, head)}

    if dry_run:
        with suppress(_NothingToCommitError):
            build(repository.versions("datasets", name).head())
        return replace(repository.resolve("datasets", name), name=new_name)
    with suppress(_NothingToCommitError):
        committed = repository.versions("datasets", name).append(build)
    if committed:
        _finish(repository, name, new_name, committed)
    return repository.resolve("datasets", new_name)


def _find_rename(repository: Repository, name: str, new_name: str, head: int) -> Entry | None:
    """Return the newest entry up to `head` that renames the data set to `new_name`, and may be unfinished."""
    numbers = range(1, head + 1)
    entries, _ = repository.versions("datasets", name).try_entries(numbers)
    renames = [(entry, target) for entry in entries if (target := renamed_to(entry))]
    if not renames:
        return None
    removals = repository.removals("datasets", name)
    removed = removals.removed(numbers)
    for entry, target in reversed(renames):
        if entry.number not in removed:
            if target == new_name:
                return entry
            raise ConflictError(
                f"{name} is being renamed to {target}; if that rename was interrupted, finish it first: `datasvc "
                f"rename {name} {target}`"
            )
        # A removed rename counts only if it is the newest entry: its tags may be unfinished.
        if entry.number == head and target == new_name:
            removal = removals.find(head)
            # Step 4 removes all versions together with the entry. A removal of the entry alone took the rename back.
            removed_together = decode_numbers(removal.content["removed"], among=numbers) if removal else frozenset()
            return entry if removed_together == set(numbers) else None
    return None


def _check_readable(repository: Repository, name: str, head: int) -> None:
    """Raise CorruptDataError or ConfigError if what the rename must read after its commit cannot be read."""
    repository.tags("datasets", name, strict=True)
    repository.branches(name, strict=True)
    Log(repository.storage, f"datasets/{name}/removals").entries()
    # Without the listing: it may lack the newest entries.
    _, errors = repository.versions("datasets", name).try_entries(range(1, head + 1))
    lost = repository.removals("datasets", name).lost() if errors else frozenset()
    for number in sorted(errors.keys() - lost):
        version, error = Resolved("datasets", name, number), errors[number]
        raise type(error)(f"{describe_damage(version, error)}; nothing was renamed") from error


def _finish(repository: Repository, name: str, new_name: str, entry: Entry) -> None:
    """Do the steps after the commit, see the module."""
    numbers = range(1, entry.number + 1)
    removals = repository.removals("datasets", name)
    # A process removes the entry only after it has copied everything.
    if entry.number not in removals.removed(numbers):
        _copy_removals(repository, name, new_name, entry.number)
        for path in _branch_paths(repository, name):
            log = Log(repository.storage, f"datasets/{name}/{path}")
            _copy_moves(repository, name, new_name, path, log.head(), entry.number)
        _copy_versions(repository, name, new_name, entry.number)
    for view, kept in list_logs(repository.storage, f"datasets/{name}/views").items():
        for number in kept:
            _copy_entry(repository, name, new_name, f"views/{view}/{number:08d}.json")
    for tag in filter(is_name, list_logs(repository.storage, f"datasets/{name}/tags")):
        _end_moves(repository, name, new_name, f"tags/{tag}", entry.number)
    for path in _branch_paths(repository, name):
        _end_moves(repository, name, new_name, path, entry.number)
    _copy_removals(repository, name, new_name, entry.number)  # those that were committed meanwhile
    if left := sorted(set(numbers) - removals.removed(numbers)):
        message = entry.content.get("message")
        reason = f"renamed to {new_name}" + (f": {message}" if message else "")
        remove_untagged(repository, "datasets", name, numbers if entry.number in left else left, reason)


def _copy_removals(repository: Repository, name: str, new_name: str, rename_number: int) -> None:
    """Copy the removals before the one that lists the rename's entry."""
    log = Log(repository.storage, f"datasets/{name}/removals")
    for entry in log.entries():
        is_of_rename = bool(decode_numbers(entry.content["removed"], among=[rename_number]))
        if is_of_rename or not _copy_entry(repository, name, new_name, f"removals/{entry.number:08d}.json"):
            return


def _copy_versions(repository: Repository, name: str, new_name: str, rename_number: int) -> None:
    """Copy all versions before the rename, newest first; take the rename back if the new name has other versions."""
    lost = repository.removals("datasets", name).lost()
    for number in range(rename_number - 1, 0, -1):
        path = f"versions/{number:08d}.json"
        if _copy_entry(repository, name, new_name, path, check=number not in lost):
            continue
        # Numbers have no gaps, so versions 1 to `number` are those of the other process.
        removals = repository.removals("datasets", new_name)
        removals.restore(range(1, number + 1), f"not versions of {name}")
        if number + 1 < rename_number:
            removals.add(range(number + 1, rename_number), f"copies from {name}, which keeps its name")
        for branch in repository.branches(name):
            with suppress(NotFoundError):
                repository.branch_logs(new_name).end(branch, message=f"not a branch of {name}")
        repository.removals("datasets", name).add([rename_number], f"the name {new_name} was taken meanwhile")
        raise ConflictError(
            f"another process committed to {new_name!r} meanwhile (datasets/{new_name}/{path}); {name!r} keeps its "
            "name: choose another new name"
        )


def _branch_paths(repository: Repository, name: str) -> list[str]:
    """Return the paths of the logs of all branches in the folder of a data set."""
    return [f"{BRANCHES}/{branch}" for branch in repository.branch_logs(name).list_moves()]


def _end_moves(repository: Repository, name: str, new_name: str, path: str, rename_number: int) -> None:
    """Copy the moves of a tag or branch; then end it, unless it points at a version after the rename."""
    log = Log(repository.storage, f"datasets/{name}/{path}")
    folder, _, label = path.rpartition("/")

    def build(head: int) -> Mapping[str, Any]:
        # Copied in each attempt: another process may have moved the tag since the last one.
        ended = _copy_moves(repository, name, new_name, path, head, rename_number)
        current = version_of(log.read(head)) if head else 0
        if not 1 <= current <= rename_number:
            raise _NothingToCommitError
        if ended and current < rename_number:
            # The tag was set again after its end, so set it under the new name, unless that name has a newer one.
            # ConfigError: the tag is called "latest", which can be copied but not set.
            with suppress(ConflictError, ConfigError):
                if folder == BRANCHES:
                    create_branch(repository, f"{new_name}@{current}", label)
                else:
                    repository.tag("datasets", f"{new_name}@{current}", label, expect=0)
        return {"version": None, _ENDED_BY: rename_number}

    with suppress(_NothingToCommitError):
        log.append(build)


def _copy_moves(repository: Repository, name: str, new_name: str, path: str, last: int, rename_number: int) -> bool:
    """Copy moves 1 to `last` of a tag or branch, up to its end or a newer data set; return whether it ended."""
    log = Log(repository.storage, f"datasets/{name}/{path}")
    for number in range(1, last + 1):
        # A damaged move of the past is copied as it is.
        with suppress(CorruptDataError):
            move = log.read(number)
            if move.content.get(_ENDED_BY) == rename_number:
                return True
            if version_of(move) >= rename_number:
                return False
        if not _copy_entry(repository, name, new_name, f"{path}/{number:08d}.json", check=False):
            return False
    return False


def _copy_entry(repository: Repository, name: str, new_name: str, path: str, *, check: bool = True) -> bool:
    """Copy one entry; return False if the new name has another one at its place."""
    storage = repository.storage

    def checked(raw: bytes, location: str) -> bytes:
        if check:
            decode_log_entry(raw, location)
        return raw

    raw = storage.read_checked(f"datasets/{name}/{path}", checked, max_bytes=MAX_ENTRY_BYTES)
    target = f"datasets/{new_name}/{path}"
    try:
        storage.create(target, raw)
    except ConflictError:
        return storage.read(target, MAX_ENTRY_BYTES) == raw
    return True


def name_classes(repository: Repository, ref: str, names: Sequence[str], *, message: str = "") -> Resolved:
    """Commit the next version of a data set with names for its integer labels. No shard is written.

    Args:
        repository: the repository that stores the data set.
        ref: the version to continue, which must be the newest of its line.
        names: class names; label i belongs to the class `names[i]`.
        message: text stored with the version.

    Raises:
        ConfigError: see `name_tables`.
        ConflictError: `ref` is not the newest version of its line; or see `Log.append`.
        NotFoundError, CorruptDataError, UnknownOutcomeError, UnavailableError: see `Log.append`, `open_dataset`.
    """
    refuse_text(names, "names", "names")
    base, line = find_line(repository, ref)

    def build(newest: Resolved | None) -> dict[str, Any]:
        # Called again after a commit by another writer, and `base` is then no longer the newest version.
        check_newest(base, line, newest)
        dataset = open_dataset(repository, str(base))
        tables = {name: split.table for name, split in dataset.items()}
        return changed_entry(dataset, name_tables(tables, names), {"kind": "classes"}, message=message)

    committed = commit_on_line(repository, line, build)
    return Resolved("datasets", base.name, committed.number)
