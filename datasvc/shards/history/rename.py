"""Rename a data set: its whole history gets a new name, and the versions of the old name are removed.

Entries are immutable, so they are copied byte by byte, and objects are shared. The commit of a rename is one entry in
the log of the old name, which says the new name. A writer that commits to the old name before it is copied too, and
a writer that loses against it builds its version again and finds that the data set was renamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository import Repository, Resolved, Storage
from datasvc.repository.logs.log import MAX_ENTRY_BYTES, Log, decode_entry, list_logs
from datasvc.repository.logs.references import check_name
from datasvc.repository.removal import remove_untagged
from datasvc.repository.repository import describe_damage
from datasvc.shards.versions.dataset import renamed_to
from datasvc.shards.versions.version_entry import derived_entry


def rename(repository: Repository, name: str, new_name: str, *, message: str = "") -> Resolved:
    """Give a data set a new name, with all its versions, their numbers, its tags and its removals.

    The versions of the old name are then removed, and its tags are deleted. Entries of models that name them stay,
    and so does the history of the old name. After an interruption, the same call continues.

    Args:
        repository: the repository that stores the data set.
        name: the present name.
        new_name: a name that has no version yet, not even a removed one.
        message: text stored with the rename.

    Returns:
        The newest version, with its new name.

    Raises:
        ConfigError: a name is not valid, or `new_name` has versions.
        NotFoundError: there is no data set `name`, or all its versions are removed.
        ConflictError: another process committed to the new name, or moved a tag, meanwhile: call again.
        CorruptDataError: an entry or a tag cannot be read.
        UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    check_name(name, "data set")
    check_name(new_name, "data set")
    if name == new_name:
        raise ConfigError(f"the data set has the name {name!r} already; give another name")
    log = repository.versions("datasets", name)
    head = log.head()
    newest, _ = log.try_entries([head] if head else [])
    # An interrupted rename is committed already: only tags and removals are left to do.
    if not newest or renamed_to(newest[0]) != new_name:
        repository.resolve("datasets", name)  # raises NotFoundError, which lists the existing names
        repository.tags("datasets", name, strict=True)
        _check_free(repository, name, new_name)
        change = {"kind": "rename", "to": new_name}

        def build(head: int) -> Mapping[str, Any]:
            # Before the commit, so that a reader finds the new name complete as soon as the old one ends.
            _copy_logs(repository, name, new_name, head)
            return derived_entry({}, change, message=message, parent=None, source=new_name)

        head = log.append(build, head=head).number
    _move_tags(repository, name, new_name, last=head - 1)
    reason = f"renamed to {new_name}" + (f": {message}" if message else "")
    remove_untagged(repository, "datasets", name, range(1, head + 1), reason)
    return repository.resolve("datasets", new_name)


def _check_free(repository: Repository, name: str, new_name: str) -> None:
    """Raise ConfigError if the new name has versions, except those that an interrupted rename has copied."""
    old, existing = (repository.versions("datasets", each) for each in (name, new_name))
    if not existing.head():
        return
    # The old name may have got versions again after an earlier rename to the same name.
    was_renamed = any(renamed_to(entry) == new_name for entry in old.try_entries()[0])
    if was_renamed or not _is_copy(repository.storage, old, existing):
        raise ConfigError(
            f"the name {new_name!r} has versions, and their numbers are never used again; choose a name that never "
            "had a version"
        )


def _is_copy(storage: Storage, old: Log, existing: Log) -> bool:
    """Return whether all entries of `existing` are copies of those of `old`."""
    with suppress(NotFoundError):
        paths = [(old.path_of(number), existing.path_of(number)) for number in existing.numbers()]
        return all(storage.read(one, MAX_ENTRY_BYTES) == storage.read(other, MAX_ENTRY_BYTES) for one, other in paths)
    return False


def _copy_logs(repository: Repository, name: str, new_name: str, head: int) -> None:
    """Copy the removals, the versions up to `head` and the tags that the new name lacks."""
    logs = list_logs(repository.storage, f"datasets/{name}")
    # Removals first: a removed version must not be visible without its removal.
    for number in logs.get("removals", ()):
        _copy_entry(repository, name, new_name, f"removals/{number:08d}.json")
    lost = repository.removals("datasets", name).lost() if "removals" in logs else frozenset()
    # Without the listing: it may lack the newest entries.
    for number in range(1, head + 1):
        try:
            _copy_entry(repository, name, new_name, f"versions/{number:08d}.json", check=number not in lost)
        except CorruptDataError as error:
            version = Resolved("datasets", name, number)
            raise CorruptDataError(f"{describe_damage(version, error)}; nothing was renamed") from error
    for log, numbers in logs.items():
        for number in numbers if log.startswith("tags/") else ():
            _copy_entry(repository, name, new_name, f"{log}/{number:08d}.json")


def _copy_entry(repository: Repository, name: str, new_name: str, path: str, *, check: bool = True) -> None:
    storage = repository.storage

    def checked(raw: bytes, location: str) -> bytes:
        if check:
            decode_entry(raw, location)
        return raw

    raw = storage.read_checked(f"datasets/{name}/{path}", checked, max_bytes=MAX_ENTRY_BYTES)
    target = f"datasets/{new_name}/{path}"
    try:
        storage.create(target, raw)
    except ConflictError as error:
        if storage.read(target, MAX_ENTRY_BYTES) != raw:
            raise ConflictError(
                f"another process committed to {new_name!r} meanwhile ({target}); {name!r} keeps its name: choose "
                "another new name"
            ) from error


def _move_tags(repository: Repository, name: str, new_name: str, *, last: int) -> None:
    """Point the tags of the new name at the versions of the old tags, and delete the old ones."""
    for tag, version in repository.tags("datasets", name, strict=True).items():
        # A tag that was set after the rename may point at its entry, which the new name does not have.
        repository.tag("datasets", f"{new_name}@{min(version, last)}", tag)
        repository.untag("datasets", name, tag, expect=version)
