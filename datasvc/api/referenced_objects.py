"""The objects that a repository needs: those that a log entry, or a young journal of unfinished work, references.

Garbage collection keeps them. A reference that cannot be read is an error, because what it names is unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError
from datasvc.models.provenance.sample_query import split_tables, tables_of_uses
from datasvc.models.registry.retention import kept_of_removed
from datasvc.models.tensors.tensor_table import read_table
from datasvc.models.versions.artefacts import artefact_log, parse_artefact
from datasvc.models.versions.entry_fields import has_valid_fields, objects_of_entry
from datasvc.repository import Digest, Entry, Kind, Objects, Repository, Resolved, Storage
from datasvc.repository.logs.copies import read_copy_log
from datasvc.repository.logs.journal import JOURNALS
from datasvc.repository.logs.redactions import redaction_log
from datasvc.repository.removal import swept_versions
from datasvc.repository.resolved import describe_damage
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.views.named import view_tables

_DIGESTS = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


def referenced_objects(repository: Repository, before_s: float) -> Iterator[Digest]:
    """Yield the digest of every object that a log entry or a young journal references; some more than once.

    Also yield the digest of every chunk of a tensor, because pointers are named by chunks. A journal is young if it
    was changed after `before_s`.

    Raises the errors of `gc`. UnavailableError is raised at once, because the store does not respond. The others are
    raised at the end, in one error that names all unreadable versions.
    """
    # Read journals before entries: a journal is removed after its work is committed, so the entry is then read below.
    yield from referenced_by_journals(repository.storage, before_s)
    yield from redaction_log(repository.objects).read().certificates
    seen_tables: set[Digest] = set()
    problems: list[DatasvcError] = []
    for name in repository.names("datasets"):
        # A running save or ingest may reuse objects of a version that is then removed. So a removed version keeps its
        # objects for the grace period, in which the save or ingest commits its own references.
        removed = swept_versions(repository, "datasets", name, before_s)
        for entry in _entries(repository, "datasets", name, before_s, problems):
            yield from _digests_in(entry.content)
            if entry.number in removed:
                yield from _kept_of_removed_dataset(repository.objects, f"{name}@{entry.number}", entry)
                continue
            try:
                yield from _referenced_by_dataset(repository.objects, f"{name}@{entry.number}", entry, seen_tables)
            except (CorruptDataError, NotFoundError, ConfigError) as error:
                if not _is_deleted(repository, Resolved("datasets", name, entry.number), error):
                    problems.append(error)
        try:
            named = view_tables(repository, name)
        except (CorruptDataError, ConfigError) as error:
            problems.append(type(error)(f"{error}; it may name a view of {name}"))
        else:
            yield from named
            yield from _kept_of_tables(repository.objects, named)
    try:
        # Of views that were exported: they show which samples a copy has.
        copied = {table for copy in read_copy_log(repository.storage) for table in copy.tables.values()}
    except (CorruptDataError, ConfigError) as error:
        problems.append(error)
    else:
        yield from copied
        yield from _kept_of_tables(repository.objects, copied - seen_tables)
    for name in repository.names("models"):
        removed = swept_versions(repository, "models", name, before_s)
        yield from _referenced_by_artefacts(repository, name, removed, problems)
        for entry in _entries(repository, "models", name, before_s, problems):
            kept = kept_of_removed(entry.content) if entry.number in removed else entry.content
            yield from _digests_in(kept)
            yield from _referenced_by_views(repository.objects, kept, seen_tables)
            if entry.number in removed:
                continue
            try:
                yield from _referenced_by_model(repository.objects, f"{name}@{entry.number}", entry, seen_tables)
                has_valid_fields(name, entry, "no list has this version, but gc keeps its objects")
            except (CorruptDataError, NotFoundError, ConfigError) as error:
                if not _is_deleted(repository, Resolved("models", name, entry.number), error):
                    problems.append(error)
    if problems:
        raise type(problems[0])("; ".join(map(str, problems))) from problems[0]


def _is_deleted(repository: Repository, version: Resolved, error: DatasvcError) -> bool:
    """Return whether an object is missing because another gc has deleted it: its version is removed.

    That gc had a shorter grace period, or began later. If a version that is not removed needs a missing object, its
    own error is raised.
    """
    # Read the removals now: the version may have been removed since this gc began.
    return isinstance(error, NotFoundError) and version.version in swept_versions(
        repository, version.kind, version.name, math.inf
    )


def _entries(
    repository: Repository, kind: Kind, name: str, before_s: float, problems: list[DatasvcError]
) -> list[Entry]:
    """Return the readable entries; add an error to `problems` for each other one, unless it was marked as lost."""
    entries, errors = repository.versions(kind, name).try_entries()
    if not errors:
        return entries
    removals = repository.removals(kind, name)
    lost = removals.lost()
    # What a lost version references is unknown. Within the grace period, running processes may still need it.
    lost_before_grace = lost & removals.removed_before(before_s)
    for number in sorted(errors.keys() - lost_before_grace):
        version, error = Resolved(kind, name, number), errors[number]
        if number in lost:
            problems.append(
                CorruptDataError(
                    f"{version} was declared lost less than the grace period ago, and running processes may use "
                    "its objects: run gc when it has ended, or with --grace 0s --no-writers if no process writes"
                )
            )
        else:
            is_damaged = isinstance(error, CorruptDataError)
            problems.append(CorruptDataError(describe_damage(version, error)) if is_damaged else error)
    return entries


def _referenced_by_dataset(
    objects: Objects, version: str, entry: Entry, seen_tables: set[Digest]
) -> Iterator[Digest]:
    """Yield the objects of a data-set version. Tables in `seen_tables` were read already."""
    for table in split_tables(entry.content, version).values():
        if table not in seen_tables:
            yield table
            try:
                # With redactions: shards that were replaced are not referenced, and may be deleted.
                referenced = ShardTable.read(objects, table).objects()
            except NotFoundError as error:
                raise NotFoundError(f"a shard table of {version} is missing: {error}") from error
            yield from referenced
            # Only now: each version whose table cannot be read must be reported.
            seen_tables.add(table)


def _kept_of_removed_dataset(objects: Objects, version: str, entry: Entry) -> Iterator[Digest]:
    """Yield the objects of a removed version except its shards."""
    with suppress(CorruptDataError):
        yield from _kept_of_tables(objects, split_tables(entry.content, version).values())


def _referenced_by_model(objects: Objects, version: str, entry: Entry, seen_tables: set[Digest]) -> Iterator[Digest]:
    """Yield the objects of a model version, and its chunks. Tables in `seen_tables` were read already."""
    refs = objects_of_entry(entry.content, version)
    table = refs.tensors
    yield from refs.all
    if table not in seen_tables:
        try:
            records = read_table(objects, table)
        except NotFoundError as error:
            raise NotFoundError(f"the tensor table of {version} is missing: {error}") from error
        seen_tables.add(table)  # only now: each version whose table cannot be read must be reported
        for record in records:
            for chunk in record.chunks:
                yield chunk.digest
                yield from (link.object for link in chunk.chain)  # the objects that the chunk is decoded from


def _referenced_by_views(objects: Objects, content: Mapping[str, Any], seen_tables: set[Digest]) -> Iterator[Digest]:
    """Yield what the views that a model version read refer to, except the shards, which are those of the data set.

    No entry but those of the model versions names an unnamed view. A table that cannot be read names nothing more.
    """
    tables = tables_of_uses(content) - seen_tables
    yield from _kept_of_tables(objects, tables)
    seen_tables |= tables


def _kept_of_tables(objects: Objects, digests: Iterable[Digest]) -> Iterator[Digest]:
    """Yield what shard tables refer to, except the shards. They show on which keys a model was trained."""
    # They are small, and not needed to read other versions, so a missing or damaged one is no reason to stop.
    for digest in digests:
        with suppress(CorruptDataError, NotFoundError, ConfigError):
            table = ShardTable.read(objects, digest)
            shards = {shard.digest for shard in table.shards()}
            packs = {pack.digest for part in table.overlays.parts() for pack in part.packs}
            yield from table.objects() - shards - packs


def _referenced_by_artefacts(
    repository: Repository, name: str, removed: Collection[int], problems: list[DatasvcError]
) -> Iterator[Digest]:
    """Yield the files of the artefacts that are attached to versions of a model, except to `removed` ones."""
    log = artefact_log(repository, name)
    entries, errors = log.try_entries()
    for number, error in errors.items():
        location = repository.storage.location(log.path_of(number))
        problems.append(
            type(error)(
                f"{error}; it may name artefacts of {name}. Copy {location} from another copy of the repository, or "
                "delete it: the artefacts that it names are then lost"
            )
        )
    attached: dict[tuple[int, str], Entry] = {}
    for entry in entries:
        try:
            number, artefact = parse_artefact(name, entry)
        except CorruptDataError as error:
            problems.append(error)
            continue
        key = (number, entry.content["name"])
        if artefact is None:
            attached.pop(key, None)
        elif number not in removed:
            attached[key] = entry
    for entry in attached.values():
        yield from _digests_in(entry.content)


def _digests_in(value: Any) -> Iterator[Digest]:
    """Yield every text that may be a digest, so that objects referenced by fields of later formats are kept."""
    if isinstance(value, str):
        yield from (Digest(match.decode()) for match in _DIGESTS.findall(value.encode("utf-8", "replace")))
    elif isinstance(value, Mapping):
        yield from _digests_in([*value.keys(), *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _digests_in(item)


def journal_times(storage: Storage) -> dict[str, float]:
    """Return the time of the last change of each journal, by its folder."""
    newest: dict[str, float] = {}
    for file in storage.walk(JOURNALS):
        folder = "/".join(file.path.split("/")[:2])  # a file of a journal is JOURNALS/ID/...
        newest[folder] = max(newest.get(folder, 0.0), file.modified_s)
    return newest


def referenced_by_journals(storage: Storage, before_s: float) -> Iterator[Digest]:
    """Yield the digests in the journals of unfinished work that were changed at `before_s` or later."""
    for folder, newest_s in journal_times(storage).items():
        if newest_s < before_s:
            continue
        for file in storage.walk(folder):
            try:
                content = storage.read(file.path)
            except NotFoundError:
                continue  # the journal was removed after the commit of its work
            # Yield every text that may be a digest, also in damaged records: keeping too many objects is harmless.
            yield from (Digest(match.decode()) for match in _DIGESTS.findall(content))
