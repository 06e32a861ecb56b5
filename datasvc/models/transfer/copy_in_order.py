"""Copies versions, sorted so that parents come first, with their objects and tags: the common part of every transfer.

Each version becomes visible at the target atomically, after its objects. A version that the target has is not copied
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final

from datasvc.errors import ConfigError, ConflictError
from datasvc.models.provenance.sample_query import split_tables
from datasvc.models.registry.registry import ModelVersion, parse_version
from datasvc.models.transfer.carry_redactions import carry_redactions
from datasvc.models.transfer.copying import AT_ONCE, copy_missing, declare_intent, objects_of_views, reachable_objects
from datasvc.models.transfer.entries import TargetLogs
from datasvc.models.versions.artefacts import Artefact, read_artefacts, record_artefact
from datasvc.printable import count_text
from datasvc.progress import Progress
from datasvc.repository import Digest, Kind, ObjectInfo, Objects, Repository, Resolved
from datasvc.repository.logs.copies import TRANSFER, RecordedCopy, record_copies
from datasvc.repository.logs.redactions import redaction_log
from datasvc.repository.logs.references import check_name
from datasvc.repository.objects.presence import check_present
from datasvc.repository.resolved import KIND_NAMES
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.views.named import NamedView, read_views, record_view, tables_of_name
from datasvc.threads import map_in_threads

_BY_NAME: Final = attrgetter("name", "version")


@dataclass(frozen=True)
class Transferred:
    """A version of the source and its copy at the target; `is_new`: whether this transfer created the copy."""

    source: Resolved
    target: Resolved
    is_new: bool


@dataclass(frozen=True)
class TransferReport:
    """Result of a transfer, or with `is_dry_run` what it would be if no other process writes to the target.

    Attributes:
        versions: all versions in commit order: data sets first, parents before their children.
        num_objects: number of objects that were missing at the target.
        bytes: size of these objects.
        tags: tags of the copies, such as "pets@stable", that the target has now; only if they were to be copied.
        is_dry_run: whether nothing was written.
        branches: branches of data sets, such as "pets@experiment", that the target has now; only if they were asked
            for.
        views: named views of the copied versions, such as "pets[small]", that this transfer copied.
    """

    versions: tuple[Transferred, ...]
    num_objects: int
    bytes: int
    tags: tuple[str, ...] = ()
    is_dry_run: bool = False
    branches: tuple[str, ...] = ()
    views: tuple[str, ...] = ()


def open_both(source: Repository | str, target: Repository | str) -> tuple[Repository, Repository]:
    """Return two repositories, each given as such or by its URL. Raise ConfigError if they are the same."""
    source = source if isinstance(source, Repository) else Repository.open(source)
    target = target if isinstance(target, Repository) else Repository.open(target)
    if source.url == target.url:
        raise ConfigError(f"{redact_url(source.url)} is both source and target; give two different repositories")
    return source, target


def name_at_target(requested: Sequence[Resolved], name: str | None) -> dict[tuple[Kind, str], str]:
    """Return the name at the target of the only requested data set or model, by its kind and name at the source.

    The result is {} if `name` is None. Raises ConfigError: several are requested, or `name` is not valid.
    """
    if name is None:
        return {}
    names = {(version.kind, version.name) for version in requested}
    kind = requested[0].kind
    if len(names) != 1:
        raise ConfigError(
            f"{len(names)} {KIND_NAMES[kind]}s cannot all get the name {check_name(name, KIND_NAMES[kind])!r}: "
            f"{', '.join(sorted(name for _, name in names))}; copy them one by one"
        )
    return {names.pop(): check_name(name, KIND_NAMES[kind])}


def copy_in_order(
    logs: TargetLogs,
    versions: Sequence[Resolved],
    *,
    tagged_kind: Kind | None = None,
    with_artefacts: bool = False,
    dry_run: bool = False,
    progress: Progress,
) -> TransferReport:
    """Copy versions with their objects to the target.

    Args:
        logs: logs of the target.
        versions: versions of the source, parents before their children.
        tagged_kind: kind of the versions whose tags are copied too; None: no tags.
        with_artefacts: whether artefacts of model versions are copied too.
        dry_run: whether to write nothing.
        progress: counts the bytes of each object once the target has it, copied or not.

    Raises:
        NotFoundError: a version or one of its objects does not exist, or an object disappeared at the target.
        CorruptDataError: an entry, table or object is damaged at the source; its version is not committed.
        ConfigError: see `TargetLogs.check_related`.
        ConflictError: a tag points at another version of the target, or it has another artefact of the same name; or
            see `Log.append`.
        UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    existing = {version: logs.find(version) for version in versions}
    objects = {
        version: reachable_objects(logs.source, version, logs.content(version))
        for version in versions
        if not existing[version]
    }
    # Check for unrelated data sets and other tags before the first byte is copied; the commits check again.
    for version in objects:
        logs.check_related(version)
    tags = _tags(logs, versions, tagged_kind)
    _check_tags(logs, tags, existing)
    attached = find_missing_artefacts(logs.source, logs.target, existing) if with_artefacts else {}
    views = find_missing_views(logs, versions)
    needed = {version: list(infos) for version, infos in objects.items()}
    for version, artefacts in attached.items():
        needed.setdefault(version, []).extend(info for artefact in artefacts for info in artefact.files.values())
    for version, named in views.items():
        tables = [view.table for view in named]
        needed.setdefault(version, []).extend(objects_of_views(logs.source, tables))
    if dry_run:
        return _dry_run(logs, existing, needed, tags, views)
    data = [version for version in versions if version.kind == "datasets"]
    data_tables = {version: split_tables(logs.content(version), str(version)) for version in data}
    # Before the redactions are carried: what was purged until now is not copied.
    redactions = redaction_log(logs.source.objects).read().head if data_tables else 0
    replaced = carry_redactions(logs.source, logs.target, _distinct(data_tables))
    needed = {version: [info for info in infos if info.digest not in replaced] for version, infos in needed.items()}
    done: list[Transferred] = []
    try:
        copied = _copy(logs, versions, existing, needed, attached, views, done, progress)
    finally:
        complete = {copy.source for copy in done}  # if a later one cannot be copied, these stay at the target
        data_tables = {version: tables for version, tables in data_tables.items() if version in complete}
        _record(logs, data_tables, redactions)
    _carry_what_ended_since(logs, data_tables, redactions)
    copies = {copy.source: copy.target for copy in done}
    num_bytes, moved = sum(info.size_bytes for info in copied), _set_tags(logs, tags, copies)
    return TransferReport(tuple(done), len(copied), num_bytes, moved, views=_names_of(logs, views))


def _carry_what_ended_since(
    logs: TargetLogs, tables: Mapping[Resolved, Mapping[str, Digest]], redactions: int
) -> None:
    """Carry the redactions of a purge that has ended during the copy; one that ends later finds the recorded copy."""
    while tables and (head := redaction_log(logs.source.objects).read().head) != redactions:
        redactions = head
        carry_redactions(logs.source, logs.target, _distinct(tables))
        _record(logs, tables, redactions)


def _distinct(tables: Mapping[Resolved, Mapping[str, Digest]]) -> set[Digest]:
    """Return the shard tables of versions, each once."""
    return {table for of_splits in tables.values() for table in of_splits.values()}


def _record(logs: TargetLogs, tables: Mapping[Resolved, Mapping[str, Digest]], redactions: int) -> None:
    """Record the copied versions of data sets at the source, also those that the target had, see `RecordedCopy`."""
    copies = []
    for version, of_splits in tables.items():
        num_samples = sum(int(split.get("samples", 0)) for split in logs.content(version)["splits"].values())
        copies.append(RecordedCopy(str(version), TRANSFER, logs.target.url, num_samples, of_splits, redactions))
    record_copies(logs.source.storage, copies)


def _copy(
    logs: TargetLogs,
    versions: Sequence[Resolved],
    existing: Mapping[Resolved, Resolved | None],
    needed: Mapping[Resolved, Sequence[ObjectInfo]],
    attached: Mapping[Resolved, Sequence[Artefact]],
    views: Mapping[Resolved, Sequence[NamedView]],
    done: list[Transferred],
    progress: Progress,
) -> list[ObjectInfo]:
    """Copy the objects that each version needs, then commit it, then record its artefacts and views.

    Each version is added to `done` as soon as it is complete.

    Returns:
        The objects that the target lacked.
    """
    distinct_objects = {info for infos in needed.values() for info in infos}
    progress.begin(sum(info.size_bytes for info in distinct_objects))
    source, target = logs.source, logs.target
    copied, seen = list[ObjectInfo](), set[ObjectInfo]()
    with declare_intent(target, needed) as renew:
        for version in versions:
            # Versions share objects: copy each only once.
            new = [info for info in dict.fromkeys(needed.get(version, ())) if info not in seen]
            copied += copy_missing(
                source.objects, target.objects, new, progress, reachable=logs.reachable, renew=renew
            )
            seen.update(new)
            committed, is_new = existing[version], False
            if committed is None:
                # An object may have been deleted at the target since it was copied.
                check_present(target.objects, (info.digest for info in needed[version]), str(version))
                # Commit point of this version: only now does the target have all objects that its entry names.
                committed, is_new = logs.commit(version)
            for artefact in attached.get(version, ()):
                record_artefact(target, replace(artefact, version=committed))
            for view in views.get(version, ()):
                record_view(target, committed, view)
            done.append(Transferred(version, committed, is_new))
    return copied


def _dry_run(
    logs: TargetLogs,
    existing: Mapping[Resolved, Resolved | None],
    objects: Mapping[Resolved, Sequence[ObjectInfo]],
    tags: Mapping[tuple[Resolved, str], int | None],
    views: Mapping[Resolved, Sequence[NamedView]],
) -> TransferReport:
    """Return the report of a transfer that is not made; new versions get the next numbers."""
    distinct_objects = sorted({info for infos in objects.values() for info in infos}, key=lambda info: info.digest)
    missing = _missing(logs.target.objects, distinct_objects)
    num_new = Counter[tuple[Kind, str]]()
    versions = []
    for version, found in existing.items():
        if found is None:
            name = logs.target_name(version)
            num_new[version.kind, name] += 1
            head = logs.target.versions(version.kind, name).head()
            found = Resolved(version.kind, name, head + num_new[version.kind, name])  # noqa: PLW2901
        versions.append(Transferred(version, found, existing[version] is None))
    names = tuple(f"{logs.target_name(version)}@{tag}" for version, tag in tags)
    num_bytes = sum(info.size_bytes for info in missing)
    return TransferReport(
        tuple(versions), len(missing), num_bytes, names, is_dry_run=True, views=_names_of(logs, views)
    )


def _names_of(logs: TargetLogs, views: Mapping[Resolved, Sequence[NamedView]]) -> tuple[str, ...]:
    """Return the references of named views at the target."""
    return tuple(f"{logs.target_name(version)}[{view.name}]" for version, named in views.items() for view in named)


def _missing(target: Objects, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Return the objects that the target lacks, or has with another size."""
    sizes = map_in_threads(lambda info: target.size(info.digest), objects, AT_ONCE)
    return [info for info, size_bytes in zip(objects, sizes, strict=True) if size_bytes != info.size_bytes]


def _tags(
    logs: TargetLogs, versions: Sequence[Resolved], kind: Kind | None
) -> dict[tuple[Resolved, str], int | None]:
    """Return the tags of the versions at the source, each with the version that it points at at the target."""
    tags: dict[tuple[Resolved, str], int | None] = {}
    of_kind = [version for version in versions if version.kind == kind]
    for name in sorted({version.name for version in of_kind}):
        own = {version.version: version for version in of_kind if version.name == name}
        at_source = logs.source.tags(of_kind[0].kind, name)
        at_target = logs.target.tags(of_kind[0].kind, logs.target_name(next(iter(own.values()))))
        tags |= {(own[number], tag): at_target.get(tag) for tag, number in sorted(at_source.items()) if number in own}
    return tags


def _check_tags(
    logs: TargetLogs,
    tags: Mapping[tuple[Resolved, str], int | None],
    existing: Mapping[Resolved, Resolved | None],
) -> None:
    """Raise ConflictError if a tag of the target points at a version that is not the copy."""
    for (version, tag), number in tags.items():
        copy = existing[version]
        if number is not None and (copy is None or copy.version != number):
            name = logs.target_name(version)
            raise ConflictError(
                f"cannot tag the copy of {version} with {tag!r}: at {redact_url(logs.target.url)} the tag points at "
                f"{name}@{number}; move or remove it there, or copy without tags"
            )


def _set_tags(
    logs: TargetLogs, tags: Mapping[tuple[Resolved, str], int | None], copies: Mapping[Resolved, Resolved]
) -> tuple[str, ...]:
    """Point the tags of the target at the copies, and return them."""
    for (version, tag), number in tags.items():
        copy = copies[version]
        logs.target.tag(copy.kind, str(copy), tag, expect=number or 0)
    return tuple(f"{copies[version].name}@{tag}" for version, tag in tags)


def sort_topologically(parents: Mapping[Resolved, Sequence[Resolved]]) -> list[Resolved]:
    """Return the versions with parents before children; ties are broken by name and number.

    `parents` has the parents of each version. A parent is ignored if it is not a key, or if it closes a cycle.
    """
    ordered: dict[Resolved, None] = {}  # an ordered set
    for version in sorted(parents, key=_BY_NAME):
        # Use an explicit stack, because a history may be longer than Python's recursion limit.
        stack, seen = [version], {version}
        while stack:
            unvisited = [
                parent
                for parent in parents[stack[-1]]
                if parent in parents and parent not in seen and parent not in ordered
            ]
            if unvisited:
                stack.append(unvisited[0])
                seen.add(unvisited[0])
            else:
                ordered[stack.pop()] = None
    return list(ordered)


def read_parents(
    repository: Repository,
    versions: Iterable[Resolved],
    content: Callable[[Resolved], Mapping[str, Any]],
    *,
    with_ancestors: bool,
) -> dict[Resolved, list[Resolved]]:
    """Return the parents of each version, and of its ancestors if `with_ancestors`. For errors, see `Log.read`.

    `content` returns the content of a version's entry. Parents that do not exist or were removed are left out.
    """
    living: dict[tuple[Kind, str], frozenset[int]] = {}  # of each data set and model: the versions not removed
    parents: dict[Resolved, list[Resolved]] = {}
    pending = list(versions)
    while pending:
        parents |= {version: _parents(repository, version, content(version), living) for version in pending}
        older = {parent for version in pending for parent in parents[version]} if with_ancestors else set()
        pending = sorted(older - parents.keys(), key=_BY_NAME)
    return parents


def _parents(
    repository: Repository,
    version: Resolved,
    entry: Mapping[str, Any],
    living: dict[tuple[Kind, str], frozenset[int]],
) -> list[Resolved]:
    """Return the parents of a version that are not removed; `living` caches the listing of each name."""
    parents = []
    references = ModelVersion(version.name, version.version, (), entry).parents  # its tags are not needed: ()
    # `parse_version` returns None for a reference without a version number.
    for name, number in filter(None, map(parse_version, references)):
        # List a name once, not once for each of its versions.
        key = version.kind, name
        if key not in living:
            living[key] = frozenset(repository.living(*key))
        if number in living[key]:
            parents.append(Resolved(version.kind, name, number))
    return parents


def find_missing_artefacts(
    source: Repository, target: Repository, copies: Mapping[Resolved, Resolved | None]
) -> dict[Resolved, list[Artefact]]:
    """Return the artefacts of versions of the source that the target lacks; versions without any are left out.

    `copies` has the version at the target for each version of the source, None if there is none yet.

    Raises:
        ConflictError: the target has another artefact of the same name.
        CorruptDataError, UnavailableError: the log of the artefacts cannot be read in one of the repositories.
    """
    models = [version for version in copies if version.kind == "models"]
    at_source = {name: read_artefacts(source, name) for name in {version.name for version in models}}
    target_names = {copy.name for version in models if (copy := copies[version]) is not None}
    at_target = {name: read_artefacts(target, name) for name in target_names}
    missing: dict[Resolved, list[Artefact]] = {}
    for version in models:
        copy = copies[version]
        present = {} if copy is None else at_target[copy.name].get(copy.version, {})
        for artefact in at_source[version.name].get(version.version, {}).values():
            other = present.get(artefact.name)
            if other is None:
                missing.setdefault(version, []).append(artefact)
            elif other.files != artefact.files:
                raise ConflictError(
                    f"{copy} at the target has another artefact {artefact.name!r} than {version}: detach one of them"
                )
    return missing


def find_missing_views(logs: TargetLogs, versions: Iterable[Resolved]) -> dict[Resolved, list[NamedView]]:
    """Return the named views of some versions of the source that the target lacks; versions without are left out.

    A name that was copied before and names another view at the source now is among them.

    Raises:
        ConflictError: the target has another view of the same name.
        CorruptDataError, ConfigError, UnavailableError: the views cannot be read in one of the repositories.
    """
    copied = {str(version): version for version in versions if version.kind == "datasets"}
    missing: dict[Resolved, list[NamedView]] = {}
    for name in sorted({version.name for version in copied.values()}):
        of_versions = [view for view in read_views(logs.source, name).values() if view.dataset in copied]
        if not of_versions:
            continue
        target_name = logs.target_name(copied[of_versions[0].dataset])
        at_target = read_views(logs.target, target_name)
        for view in of_versions:
            present = at_target.get(view.name)
            if present is None or present.table != view.table:
                if present is not None and present.table not in tables_of_name(logs.source, name, view.name):
                    raise ConflictError(
                        f"cannot copy the view {name}[{view.name}]: {redact_url(logs.target.url)} has another view "
                        f"{target_name}[{view.name}], of {count_text(present.samples, 'sample')}; remove its name "
                        f"there: `datasvc view {target_name} {view.name} --remove`"
                    )
                missing.setdefault(copied[view.dataset], []).append(view)
    return missing
