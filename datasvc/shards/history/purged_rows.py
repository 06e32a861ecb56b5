"""Finds the samples to purge in the shards of all versions of all data sets, and redacts them, shard by shard.

An entry of the log of redactions makes the new shards of some old ones visible at once, and with them the overlays
without the values of their samples. Then the old are deleted. A process that is killed in between leaves objects that
no reader opens any more: `delete_retired` deletes them later.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, ObjectInfo, Objects, Repository, Resolved
from datasvc.repository.logs.redactions import REDACT, Redaction, Redactions, redaction_log
from datasvc.repository.objects.in_place import delete_recipes
from datasvc.repository.objects.intact import QUARANTINE
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.resolved import describe_damage
from datasvc.shards.format.digests import DIGEST_BYTES, digest_batch, digest_blob
from datasvc.shards.format.reader import Shard, open_shard
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.history.purged_overlays import EmptiedOverlays, empty_overlays
from datasvc.shards.versions.redact import hashed_key, redact_shard
from datasvc.threads import map_in_threads

# Empty blobs, and what the index of a lost shard has for purged samples: they identify no bytes.
_NO_PAYLOADS: Final = frozenset({digest_blob(b""), bytes(DIGEST_BYTES)})
_READS_AT_ONCE: Final = 8
# Shards of one entry: few enough that an interrupted purge repeats little, and that the entry stays small.
_SHARDS_PER_ENTRY: Final = 16
_MAX_PER_ENTRY: Final = 25_000  # samples, of which an entry has some hundred bytes each


@dataclass
class StoredTable:
    """A shard table with its redactions, and the splits that have it: version, name of the split."""

    table: ShardTable
    splits: list[tuple[Resolved, str]] = field(default_factory=list)


class StoredRow(NamedTuple):
    """A sample in a shard: its row, its key, and its payload digest before any purge, as hexadecimal digits."""

    row: int
    key: str
    payload: str


@dataclass(frozen=True)
class StoredShard:
    """A shard with samples that were searched for.

    Attributes:
        info: digest and size of the shard.
        index: digest of its sample index; None if it has none.
        splits: the splits that have it.
        rows: the samples that were found, without those that are redacted.
        redacted: those that are redacted already.
    """

    info: ObjectInfo
    index: Digest | None
    splits: tuple[tuple[Resolved, str], ...]
    rows: tuple[StoredRow, ...]
    redacted: tuple[StoredRow, ...] = ()

    def all_rows(self) -> Integers:
        """Return the rows that were found, redacted ones too: `int64[n]`."""
        return np.array([row.row for row in (*self.rows, *self.redacted)], np.int64)

    def to_hash(self) -> StoredShard:
        """Return the shard with all rows to redact that still have their key."""
        clear = tuple(row for row in self.redacted if hashed_key(row.key) != row.key)
        return replace(self, rows=self.rows + clear, redacted=tuple(set(self.redacted) - set(clear)))


def read_all_tables(repository: Repository) -> dict[Digest, StoredTable]:
    """Return the shard tables of all versions of all data sets, removed ones too, by digest.

    Raises:
        CorruptDataError, ConfigError: an entry or a table cannot be read, so it is not known which samples it has.
        NotFoundError: the table of a version that is not removed is missing.
        UnavailableError: the store does not respond.
    """
    tables: dict[Digest, StoredTable] = {}
    for name in repository.names("datasets"):
        entries, errors = repository.versions("datasets", name).try_entries()
        removals = repository.removals("datasets", name)
        removed, lost = removals.removed(), removals.lost() if errors else frozenset()
        for number in sorted(errors.keys() - lost):
            raise CorruptDataError(describe_damage(Resolved("datasets", name, number), errors[number]))
        for entry in entries:
            version = Resolved("datasets", name, entry.number)
            for split, described in entry.content.get("splits", {}).items():
                digest = parse_digest(described["table"])
                if digest not in tables:
                    try:
                        tables[digest] = StoredTable(ShardTable.read(repository.objects, digest))
                    except NotFoundError:
                        if entry.number not in removed:
                            raise
                        continue
                tables[digest].splits.append((version, split))
    return tables


def find_rows(
    objects: Objects,
    tables: Iterable[StoredTable],
    *,
    keys: Mapping[tuple[str, str], Collection[str]],
    payloads: Collection[str] = (),
) -> list[StoredShard]:
    """Return the shards with samples of given keys or payload digests. Each shard is searched once.

    Args:
        objects: objects of the repository.
        tables: tables whose shards are searched.
        keys: keys by data set and name of the split; the empty name stands for all splits.
        payloads: payload digests, as hexadecimal digits, in all splits.

    Raises:
        CorruptDataError, UnavailableError: a sample index, or a shard without one, cannot be read.
    """
    shards: dict[ObjectInfo, tuple[Digest | None, Redaction | None, dict[tuple[Resolved, str], None]]] = {}
    for stored in tables:
        for number, info in enumerate(stored.table.shards()):
            if info not in shards:
                shards[info] = stored.table.index(number), stored.table.redacted.get(info.digest), {}
            shards[info][2].update(dict.fromkeys(stored.splits))
    wanted_payloads = pa.array(sorted(map(bytes.fromhex, payloads)), pa.binary(DIGEST_BYTES))

    def search(info: ObjectInfo) -> StoredShard | None:
        index, redaction, splits = shards[info]
        names = {(version.name, name) for version, split in splits for name in ("", split)}
        wanted = set[str]().union(*(keys[name] for name in names if name in keys))
        if not wanted and not payloads:
            return None
        try:
            stored_keys, stored_payloads = _identities(objects, info, index)
        except NotFoundError:
            return None  # the shard was deleted with its version
        is_found = pc.or_(
            pc.is_in(stored_keys, value_set=pa.array(sorted(wanted), pa.string())),
            pc.is_in(stored_payloads, value_set=wanted_payloads),
        )
        old = redaction.payloads if redaction is not None else {}
        rows = [
            StoredRow(row, stored_keys[row].as_py(), old.get(row) or stored_payloads[row].as_py().hex())
            for row in np.flatnonzero(is_found.to_numpy(zero_copy_only=False)).tolist()
        ]
        # Of a shard that was lost, only the index is redacted: a copy that came back has the bytes.
        came_back = redaction is not None and redaction.old == info.digest and objects.size(info.digest) is not None
        new = tuple(row for row in rows if came_back or row.row not in old)
        redacted = tuple(row for row in rows if not came_back and row.row in old)
        return StoredShard(info, index, tuple(splits), new, redacted) if rows else None

    return list(filter(None, map_in_threads(search, list(shards), _READS_AT_ONCE)))


def _identities(objects: Objects, info: ObjectInfo, index: Digest | None) -> tuple[pa.Array, pa.Array]:
    """Return the keys and the payload digests of a shard."""
    if index is None:
        shard = open_shard(objects, info)
        return _combined(shard.column(KEY)), pa.array(payloads_of(shard), pa.binary(DIGEST_BYTES))
    table = SampleIndex.decode(objects.read(index), objects.location(index)).table
    return _combined(table.column("key")), _combined(table.column("payload"))


def payloads_of(shard: Shard) -> list[bytes]:
    """Return the payload digest of each sample of a shard, computed from its values."""
    return [payload for batch in shard.batches for payload in digest_batch(batch)[1]]


def _combined(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def identifying(payloads: Iterable[str]) -> frozenset[str]:
    """Return the payload digests that identify bytes: not those of empty blobs."""
    return frozenset(payload for payload in payloads if bytes.fromhex(payload) not in _NO_PAYLOADS)


class _ChangedError(Exception):
    """Ends `Log.append` without an entry: another purge has redacted shards since these were found."""


def rows_by_shard(shards: Iterable[StoredShard]) -> dict[Digest, Integers]:
    """Return all found rows of shards, redacted ones too: `int64[n]` by digest of the shard."""
    return {shard.info.digest: shard.all_rows() for shard in shards}


def redact(
    repository: Repository,
    shards: Sequence[StoredShard],
    tables: Sequence[ShardTable],
    *,
    hash_keys: bool = False,
    message: str = "",
    progress: Progress = NO_PROGRESS,
) -> bool:
    """Redact the rows that were found, also in the overlays of `tables`, and delete the old objects.

    Returns:
        False if another purge has changed the log since it was read: find the samples again, in the new shards.

    Raises:
        CorruptDataError: a shard is damaged: repair it, or delete its samples with `datasvc delete --damaged`.
        UnknownOutcomeError, UnavailableError: see `Log.append`. Shards of earlier entries are redacted.
    """
    objects, log = repository.objects, redaction_log(repository.objects)
    # Without a row to redact, overlays still have values of redacted rows, such as those of a newer version.
    pending = [shard for shard in shards if shard.rows] or list(shards)
    while pending:
        known = log.read()
        group, num_rows = [pending.pop(0)], 0
        while pending and len(group) < _SHARDS_PER_ENTRY and num_rows < _MAX_PER_ENTRY:
            num_rows += len(group[-1].all_rows())
            group.append(pending.pop(0))
        if any(shard.info.digest in known.by_shard for shard in group if shard.info.digest not in known.redacted):
            return False
        records = []
        for shard in (each for each in group if each.rows):
            rows: Integers = np.array([row.row for row in shard.rows], np.int64)
            try:
                info, index = redact_shard(objects, shard.info, shard.index, rows, hash_keys=hash_keys)
            except NotFoundError:
                if log.read().head == known.head:
                    raise
                return False
            payloads = {row.row: row.payload for row in shard.rows}
            records.append(Redaction(shard.info.digest, shard.index, info, index, payloads, hash_keys))
            progress.advance(shard.info.size_bytes)
        present = [table.with_redactions(known) for table in tables]  # an entry before may have replaced overlays
        emptied = empty_overlays(objects, present, rows_by_shard(group))
        if not append_redactions(repository, records, emptied, known=known, message=message):
            return False
        progress.advance(sum(info.size_bytes for info in emptied.objects))
        # At once, without the grace of gc: the purpose of a purge is that the bytes are gone when it ends.
        replaced = [digest for each in records for digest in (each.old, each.old_index) if digest]
        delete_retired(repository, [*replaced, *(info.digest for info in emptied.objects)])
    return True


def append_redactions(
    repository: Repository,
    records: Sequence[Redaction],
    overlays: EmptiedOverlays,
    *,
    known: Redactions,
    message: str = "",
) -> bool:
    """Make new objects visible in place of the old ones; False: others have changed the log since `known`.

    Raises what `Log.append` raises.
    """

    def build(head: int) -> Mapping[str, Any]:
        if head != known.head:
            raise _ChangedError
        entry = {"kind": REDACT, "shards": [each.to_json() for each in records], "message": message}
        return entry | overlays.to_json()

    log = redaction_log(repository.objects)
    try:
        # The commit point of these shards: from here on, readers open the new ones.
        log.log.append(build, head=known.head)
    except _ChangedError:
        return False
    log.read()
    return True


def delete_retired(repository: Repository, digests: Iterable[Digest] | None = None) -> None:
    """Delete shards, sample indexes, objects of overlays and certificates that were replaced.

    Args:
        repository: the repository.
        digests: only these; None: all, such as those that an old copy of the repository has brought back.
    """
    retired = redaction_log(repository.objects).read().retired
    delete_objects(repository, retired if digests is None else retired.intersection(digests))


def delete_objects(repository: Repository, digests: Collection[Digest]) -> None:
    """Delete objects, whatever their age, also in quarantine."""
    storage = repository.storage
    paths = [Objects.path(digest) for digest in sorted(digests)]
    quarantined = storage.list(QUARANTINE) if paths else []
    paths += [f"{QUARANTINE}/{name}" for name in quarantined if name.partition(".")[0] in digests]

    def delete(path: str) -> None:
        if storage.size(path) is not None:
            storage.delete_if_older(path, math.inf)

    map_in_threads(delete, paths, _READS_AT_ONCE)
    for digest in digests:
        delete_recipes(storage, digest)
