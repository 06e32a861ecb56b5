"""Proof of a purge: all objects that no version references are searched for the payload digests of the samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from datasvc import durable
from datasvc.api.referenced_objects import referenced_by_journals, referenced_objects
from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, Repository
from datasvc.repository.logs.redactions import redaction_log
from datasvc.repository.objects.intact import QUARANTINE
from datasvc.repository.objects.objects import digest_of
from datasvc.shards.format.ipc_reader import read_table
from datasvc.shards.format.reader import Shard
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY
from datasvc.shards.history.purged_overlays import has_values
from datasvc.shards.history.purged_rows import StoredTable, delete_objects, payloads_of

_ARROW: Final = b"ARROW1"
_PACK: Final = b"\xff\xff\xff\xff"  # of an Arrow IPC stream


@dataclass(frozen=True)
class Proof:
    """What was searched for the payload digests of the purged samples, and what was found.

    Attributes:
        num_shards: number of distinct shards whose samples were compared, by their indexes.
        num_overlays: number of objects with values beside shards, which have none of the purged samples.
        num_unreferenced: number of objects that no version references, which were read.
        deleted: those of them that had the bytes of a purged sample, and were deleted.
        unfinished: those that a running ingest or transfer, or a change of columns, may still reference: they have
            the bytes, or values of purged samples beside shards.
        temporary_files: number of files that writers have not finished; they were not read.
        unreadable: objects that no version references and that are damaged, in quarantine, or of a later format: what
            they have is unknown.
    """

    num_shards: int = 0
    num_unreferenced: int = 0
    deleted: tuple[Digest, ...] = ()
    unfinished: tuple[Digest, ...] = ()
    temporary_files: int = 0
    unreadable: tuple[Digest, ...] = ()
    num_overlays: int = 0


def search_objects(
    repository: Repository,
    tables: Mapping[Digest, StoredTable],
    payloads: frozenset[str],
    rows: Mapping[Digest, Integers],
) -> Proof:
    """Read the objects that no version references, and delete those with the bytes of purged samples.

    `rows` has the rows of the purged samples, `int64[n]`, by shard. No overlay of `tables` has a value of them.
    """
    infos = {info.digest for stored in tables.values() for info in stored.table.shards()}
    # All journals count as old, so that what only they reference is read too.
    referenced = {*infos, *tables, *referenced_objects(repository, math.inf)}
    listed: list[Digest] = []
    num_temporary = 0
    for file in repository.storage.walk("objects"):
        name = file.path.rpartition("/")[2]
        if name.startswith(durable.TEMPORARY_PREFIX):
            num_temporary += 1
        elif len(name) == len(digest_of(b"")) and name not in referenced:
            listed.append(Digest(name))
    held = set(referenced_by_journals(repository.storage, -math.inf))
    wanted = {bytes.fromhex(payload) for payload in payloads}
    has_payload = {digest: _has_payload(repository, digest, wanted) for digest in listed}
    hits = [digest for digest, is_hit in has_payload.items() if is_hit]
    # An object of an overlay names shards as they were when it was written.
    by_shard = redaction_log(repository.objects).read().by_shard
    replaced = {old: rows[each.shard.digest] for old, each in by_shard.items() if each.shard.digest in rows}
    # Not deleted: a change of columns has no journal, and may be about to commit them. If it was killed, gc does.
    beside = [
        digest
        for digest in listed
        if not has_payload[digest] and _has_values(repository, digest, {**replaced, **rows})
    ]
    quarantined = {Digest(name.partition(".")[0]) for name in repository.storage.list(QUARANTINE)}
    damaged = {digest for digest, is_hit in has_payload.items() if is_hit is None}
    unreadable = tuple(sorted(damaged | quarantined.difference(referenced, listed)))
    unfinished = tuple(sorted(held.intersection(hits).union(beside)))
    deleted = tuple(sorted(set(hits) - held))
    delete_objects(repository, deleted)
    overlays = {info for stored in tables.values() for info in stored.table.overlays.objects()}
    return Proof(len(infos), len(listed), deleted, unfinished, num_temporary, unreadable, len(overlays))


def _has_payload(repository: Repository, digest: Digest, wanted: set[bytes]) -> bool | None:
    """Return whether an object is a shard or a sample index with one of the payload digests; None: it is unknown."""
    objects, name = repository.objects, repository.objects.location(digest)
    try:
        if not repository.storage.read_start(objects.path(digest), len(_ARROW)).startswith(_ARROW):
            return False
        content = objects.read(digest)
    except NotFoundError:
        return False  # deleted since the objects were listed
    except CorruptDataError:
        return None
    try:
        try:
            found = set(payloads_of(Shard.from_bytes(content, name)))
        except (ConfigError, CorruptDataError):
            found = set(SampleIndex.decode(content, name).table.column("payload").to_pylist())
    except (ConfigError, CorruptDataError):
        try:
            # Another kind of table has no keys. A damaged shard or index, or one of a later format, has.
            return None if KEY in read_table(content, name).schema.names else False
        except CorruptDataError:
            return None
    return not wanted.isdisjoint(found)


def _has_values(repository: Repository, digest: Digest, rows: Mapping[Digest, Integers]) -> bool:
    """Return whether an object has values beside shards of purged samples."""
    objects = repository.objects
    try:
        if not repository.storage.read_start(objects.path(digest), len(_ARROW)).startswith((_ARROW, _PACK)):
            return False
        return has_values(objects.read(digest), objects.location(digest), rows)
    except (NotFoundError, CorruptDataError):
        return False  # deleted since, or `_has_payload` has reported it as unreadable
