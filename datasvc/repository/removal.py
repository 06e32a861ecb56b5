"""Remove versions of data sets and models: a commit marks them as removed, and a later `gc` deletes their bytes.

The number of a removed version is never used again. Its entry stays, so that lineage remains complete. A version with
a tag, or at which a branch begins, is never removed: if another process tags a version during its removal, or makes
a branch there, the removal is reverted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, DatasvcError, NotFoundError
from datasvc.repository.branching import branches_at, refuse_branch
from datasvc.repository.logs.references import parse_reference, refuse_text
from datasvc.repository.repository import Repository
from datasvc.repository.resolved import KIND_NAMES, Kind, Resolved


@dataclass(frozen=True)
class RemovalReport:
    """Result of `remove_versions`: versions, by name and number, and tags that it deleted, such as "cnn@prod"."""

    versions: tuple[Resolved, ...]
    untagged: tuple[str, ...]


def remove_versions(
    repository: Repository,
    kind: Kind,
    refs: Sequence[str],
    *,
    force: bool = False,
    dry_run: bool = False,
    message: str = "",
) -> RemovalReport:
    """Remove versions, with one commit per data set or model.

    Args:
        repository: repository of the versions.
        kind: "datasets" or "models".
        refs: references with a version or a tag. A name alone is refused, because it could mean one version or all.
        force: delete the tags of these versions first.
        dry_run: check all, and change nothing.
        message: message of the commit.

    Raises:
        ConfigError: `refs` is a string, a reference is a name alone or a branch, a version is tagged and `force` is
            not set, or a branch begins at a version; nothing was removed.
        NotFoundError: a version does not exist or was removed earlier; nothing was removed now.
        ConflictError: another process moved a tag of one of the versions during the removal. The message lists the
            removed versions. The tags of the other versions are restored.
        UnknownOutcomeError, UnavailableError: see `Log.append`. The tags are restored if the store allows it.
    """
    return RemovalReport(*_remove(repository, kind, refs, force=force, dry_run=dry_run, message=message, lost=False))


def _remove(
    repository: Repository, kind: Kind, refs: Sequence[str], *, force: bool, dry_run: bool, message: str, lost: bool
) -> tuple[tuple[Resolved, ...], tuple[str, ...]]:
    """Remove versions, or mark them as lost; return the versions and the tags that were deleted first."""
    refuse_text(refs, "refs")
    numbers: dict[str, set[int]] = {}
    for ref in refs:
        reference = parse_reference(ref, KIND_NAMES[kind])
        if reference.version is None and reference.tag is None:
            raise ConfigError(f"{ref!r} names no version; expected a version or a tag for each, such as {ref}@3")
        if kind == "datasets":
            branch = f"`datasvc branch {reference.name} {reference.tag} --remove` removes the branch"
            refuse_branch(repository, reference.name, reference.tag, f"give the numbers of versions; {branch}")
        version = repository.resolve(kind, ref, removed=lost)
        if lost:
            _check_unreadable(repository, version)
        numbers.setdefault(version.name, set()).add(version.version)
    tags = {name: tags_on(repository, kind, name, versions) for name, versions in numbers.items()}
    for name, versions in numbers.items():
        refuse_branched(repository, kind, name, versions)
    # Check the tags of all names before the first commit, so that a refusal changes nothing.
    if not force:
        _refuse_tagged(tags)
    done: list[str] = []
    for name, versions in () if dry_run else numbers.items():
        try:
            remove_tagged(repository, kind, name, versions, tags[name], message, lost=lost)
        except ConflictError as error:
            before = f"; removed before, with their tags: {', '.join(done)}" if done else ""
            raise ConflictError(f"{error}{before}") from error
        done += [f"{name}@{number}" for number in sorted(versions)]
    return (
        tuple(Resolved(kind, name, number) for name in sorted(numbers) for number in sorted(numbers[name])),
        tuple(f"{name}@{tag}" for name, tags_of_one in tags.items() for tag in tags_of_one),
    )


def remove_tagged(
    repository: Repository,
    kind: Kind,
    name: str,
    versions: Iterable[int],
    tags: Mapping[str, int],
    message: str,
    *,
    lost: bool = False,
) -> None:
    """Delete the tags of some versions of one name, then remove the versions; restore the tags on failure.

    With `lost`, also mark the versions as lost.

    Raises:
        ConflictError: another process moved one of `tags`, and no version was removed; or see `remove_untagged`.
        UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    deleted: dict[str, int] = {}
    try:
        for tag, number in tags.items():
            # Note the tag before its deletion: Ctrl-C, or a lost answer of the store, may follow the commit.
            deleted[tag] = number
            try:
                # With `expect`, the deletion fails if another process has moved the tag.
                repository.untag(kind, name, tag, expect=number)
            except (ConflictError, NotFoundError) as error:
                del deleted[tag]
                raise ConflictError(
                    f"another process moved {name}@{tag}: check the tag; no version of {name} was removed"
                ) from error
        remove_untagged(repository, kind, name, versions, message, lost=lost)
    except BaseException:  # also Ctrl-C
        for tag, number in deleted.items():
            with suppress(DatasvcError):  # the version is removed, or another process has set the tag
                repository.tag(kind, f"{name}@{number}", tag, expect=0)
        raise


def remove_untagged(
    repository: Repository, kind: Kind, name: str, versions: Iterable[int], message: str, *, lost: bool = False
) -> None:
    """Remove versions of one name that have no tag; with `lost`, also mark them as lost.

    Raises:
        ConflictError: another process tagged one of them meanwhile; the tagged ones are not removed, the others are.
        UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    removals = repository.removals(kind, name)
    if lost:
        removals.declare_lost(versions, message)
    else:
        removals.add(versions, message)
    # This function reads the tags after it wrote the removal. `Repository.tag` reads the removals after it wrote the
    # tag. Of two concurrent calls, at least one therefore reads the change of the other.
    protected = tags_on(repository, kind, name, versions)
    if kind == "datasets":
        protected |= {
            branch: found.start for branch, found in branches_at(repository, name, frozenset(versions)).items()
        }
    if protected:
        # Only the tagged versions: others may have been removed before this call.
        restored = set(protected.values())
        removals.restore(restored, f"tagged meanwhile: {', '.join(sorted(protected))}")
        raise ConflictError(
            f"another process moved tags of {name} or made branches during the removal: {protected} stay, the other "
            f"versions are {'marked as lost' if lost else 'removed'}"
        )


def swept_versions(repository: Repository, kind: Kind, name: str, before_s: float) -> frozenset[int]:
    """Return the versions of a name whose objects `gc` may delete; for errors, see `Log.read`.

    Versions that were removed after `before_s`, in seconds since 1970, are left out: a process may still read them.
    """
    removed = repository.removals(kind, name).removed_before(before_s)
    # Read the tags after the removals: a tag that causes the reversal of a removal was set before the reversal.
    return removed - repository.protected(kind, name, strict=True) if removed else removed


def tags_on(repository: Repository, kind: Kind, name: str, versions: Iterable[int]) -> dict[str, int]:
    """Return the tags that point at one of the versions; for errors, see `Repository.tags` with `strict`."""
    numbers = set(versions)
    tags = repository.tags(kind, name, strict=True)
    return {tag: version for tag, version in tags.items() if version in numbers}


def refuse_branched(repository: Repository, kind: Kind, name: str, versions: Iterable[int]) -> None:
    """Raise ConfigError if a branch begins at one of the versions; for other errors, see `branches_at`."""
    at = branches_at(repository, name, frozenset(versions)) if kind == "datasets" else {}
    for branch, found in at.items():
        raise ConfigError(
            f"the branch {name}@{branch} begins at {name}@{found.start}; nothing was removed: remove the branch "
            f"first: `datasvc branch {name} {branch} --remove`"
        )


def _refuse_tagged(tags: Mapping[str, Mapping[str, int]]) -> None:
    tagged = [
        f"{name}@{number} is {name}@{tag}" for name, versions in tags.items() for tag, number in versions.items()
    ]
    if tagged:
        raise ConfigError(
            f"{', '.join(tagged)}; nothing was removed: move the tags first, or delete them as well with --force"
        )


# An entry names the objects of its version. While an entry cannot be read, it is unknown which objects it names, so
# `gc` deletes nothing. Only a backup of the same repository can restore the entry: another repository may have
# another version under the same number. If there is no backup, the version can be marked as lost, by a removal with
# the field `lost`. Readers then treat the version as removed, and `gc` deletes objects again when the removal is
# older than the grace period of `gc`. If the entry is restored later, the version stays removed.


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

    For the arguments and errors, see `remove_versions`; removed versions are accepted. Also raises ConfigError if the
    entry of a version can be read, or has a later format.
    """
    message = message or "entry unreadable"
    return LostVersions(*_remove(repository, kind, refs, force=force, dry_run=dry_run, message=message, lost=True))


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
