"""Marks versions as lost if their entries cannot be read, so that `gc` works again.

An entry names the objects of its version. While an entry cannot be read, it is unknown which objects it names, so
`gc` deletes nothing. Only a backup of the same repository can restore the entry: another repository may have another
version under the same number. If there is no backup, the version can be marked as lost, by a removal with the field
`lost`. Readers then treat the version as removed, and `gc` deletes objects again when the removal is older than the
grace period of `gc`. If the entry is restored later, the version stays removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository.branching import refuse_branch
from datasvc.repository.logs.references import parse_reference, refuse_text
from datasvc.repository.removal import refuse_branched, remove_tagged, tags_on
from datasvc.repository.repository import Repository
from datasvc.repository.resolved import Kind, Resolved


@dataclass(frozen=True)
class LostVersions:
    """Result of `mark_lost`: versions that it marked as lost, and tags that it deleted, such as "digits@prod"."""

    versions: tuple[Resolved, ...]
    untagged: tuple[str, ...]


def mark_lost(
    repository: Repository,
    kind: Kind,
    refs: Sequence[str],
    *,
    force: bool = False,
    dry_run: bool = False,
    message: str = "",
) -> LostVersions:
    """Mark versions as lost if their entries cannot be read, with one commit per data set or model.

    Args:
        repository: repository of the versions.
        kind: "datasets" or "models".
        refs: references with a version or a tag; removed versions are accepted.
        force: delete the tags of these versions first.
        dry_run: check all, and change nothing.
        message: message of the commit.

    Raises:
        ConfigError: the entry of a version can be read, or has a later format; a reference is a name alone or a
            branch; a version is tagged and `force` is not set; or a branch begins at a version. Nothing was changed.
        NotFoundError: a version does not exist. Nothing was changed.
        ConflictError: another process moved a tag of one of the versions meanwhile. Versions that it tagged are not
            lost, and keep their tags.
        UnknownOutcomeError, UnavailableError: see `Log.append`. The tags are restored if the store allows it.
    """
    refuse_text(refs, "refs")
    numbers: dict[str, set[int]] = {}
    for ref in refs:
        reference = parse_reference(ref)
        if reference.version is None and reference.tag is None:
            raise ConfigError(f"{ref!r} names no version; expected a version or a tag, such as {ref}@3")
        if kind == "datasets":
            refuse_branch(repository, reference.name, reference.tag, "give the numbers of versions")
        version = repository.resolve(kind, ref, removed=True)
        _check_unreadable(repository, version)
        numbers.setdefault(version.name, set()).add(version.version)
    tags = {name: tags_on(repository, kind, name, versions) for name, versions in numbers.items()}
    for name, versions in numbers.items():
        refuse_branched(repository, kind, name, versions)
    tagged = [f"{name}@{tag}" for name, tags_of_name in tags.items() for tag in tags_of_name]
    if tagged and not force:
        raise ConfigError(
            f"{', '.join(tagged)} points at a version to give up; nothing was changed: move the tag first, or delete "
            "it as well with --force (force=True)"
        )
    for name, versions in () if dry_run else numbers.items():
        remove_tagged(repository, kind, name, versions, tags[name], message or "entry unreadable", lost=True)
    lost = (Resolved(kind, name, number) for name in sorted(numbers) for number in sorted(numbers[name]))
    return LostVersions(tuple(lost), tuple(tagged))


def _check_unreadable(repository: Repository, version: Resolved) -> None:
    """Raise ConfigError if the entry of a version can be read, or if its format is a later one."""
    try:
        repository.entry(version)
    except CorruptDataError:
        return
    command = "datasvc models rm" if version.kind == "models" else "datasvc rm"
    raise ConfigError(
        f"the entry of {version} is intact, so the version is not lost; nothing was changed; to remove it, use "
        f"`{command} {version}`"
    )
