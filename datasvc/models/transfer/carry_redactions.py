"""Carries redactions with the data that is copied: a copy must not bring back the bytes of purged samples.

A shard is redacted at the target if it is at the source or at the target. Where each has purged other samples of a
shard, the target gets a shard without either; and so it is with values beside shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from datasvc.errors import ConflictError
from datasvc.keyed_random import Integers
from datasvc.models.transfer.copying import copy_missing
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.repository.logs.redactions import Redaction, Redactions, redaction_log
from datasvc.repository.objects.presence import stored_size
from datasvc.shards.format.overlays import ColumnOverlay
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.history.purged_overlays import EmptiedOverlays, empty_overlays
from datasvc.shards.history.purged_rows import append_redactions, delete_retired
from datasvc.shards.versions.redact import redact_shard


def carry_redactions(source: Repository, target: Repository, tables: Iterable[Digest]) -> frozenset[Digest]:
    """Redact the shards of some tables at the target, and return the objects of the source that are not copied.

    Args:
        source: the repository that has the tables.
        target: the repository that they will be copied to, or have been.
        tables: digests of shard tables.

    Raises:
        ConflictError: the target is purged at the same time; try again.
        CorruptDataError, NotFoundError, UnavailableError: an object cannot be read or written.
    """
    at_source, at_target = redaction_log(source.objects).read(), redaction_log(target.objects).read()
    if not (at_source.by_shard or at_target.by_shard):
        return frozenset()
    replaced: set[Digest] = set()
    added: dict[Digest, Redaction] = {}
    only_there: dict[Digest, Integers] = {}
    found: list[tuple[ShardTable, ShardTable]] = []
    for digest in tables:
        stored = ShardTable.decode(source.objects.read(digest), source.objects.location(digest))
        present = stored.with_redactions(at_source)
        found.append((stored, present))
        for number, old in enumerate(stored.shards()):
            here, there = at_source.by_shard.get(old.digest), at_target.by_shard.get(old.digest)
            payloads = {**(here.payloads if here else {}), **(there.payloads if there else {})}
            if not payloads:
                continue
            info, index = present.shard(number), present.index(number)
            if there:
                only_there[info.digest] = np.array(
                    sorted(payloads.keys() - (here.payloads if here else {})), np.int64
                )
            if old.digest in added:
                continue
            if there and payloads == there.payloads and target.objects.size(there.shard.digest) is not None:
                new, new_index = there.shard, there.index
            else:
                hash_keys = any(each.hash_keys for each in (here, there) if each)
                if here and payloads == here.payloads and hash_keys == here.hash_keys:
                    new, new_index = here.shard, here.index
                    size_bytes = stored_size(source.objects, new_index)
                    copy_missing(source.objects, target.objects, [new, ObjectInfo(new_index, size_bytes)])
                else:
                    rows = np.array(sorted(payloads), np.int64)
                    new, new_index = redact_shard(
                        source.objects, info, index, rows, hash_keys=hash_keys, into=target.objects
                    )
                old_indexes = {old.digest: stored.index(number)} | (
                    {there.shard.digest: there.index} if there else {}
                )
                for each, each_index in old_indexes.items():
                    if each != new.digest:
                        added[each] = Redaction(each, each_index, new, new_index, payloads, hash_keys)
            replaced.update({info.digest, *([index] if index else [])} - {new.digest, new_index})
    emptied = empty_overlays(source.objects, [table for _, table in found], only_there, into=target.objects)
    replaced.update(old.digest for old in emptied.objects)
    overlays = _carry_overlays(source, target, found, emptied, at_target, replaced)
    if (added or overlays.objects) and not append_redactions(target, list(added.values()), overlays, known=at_target):
        raise ConflictError(f"{target.url} was purged at the same time: copy again")
    delete_retired(target)
    return frozenset(replaced)


def _carry_overlays(
    source: Repository,
    target: Repository,
    tables: Sequence[tuple[ShardTable, ShardTable]],
    emptied: EmptiedOverlays,
    at_target: Redactions,
    replaced: set[Digest],
) -> EmptiedOverlays:
    """Return what replaces the overlays of some tables at the target, and copy what the source has replaced.

    Args:
        source: the repository that has the tables.
        target: the repository that they are copied to.
        tables: tables as they are stored, and with the redactions of the source.
        emptied: what replaces objects of the source because only the target has purged samples; the target has it.
        at_target: redactions of the target.
        replaced: gets the objects that are not copied because the target has purged samples of shards that the tables
            do not have: it keeps its own.
    """
    carried = EmptiedOverlays(payloads=emptied.payloads)
    for stored, present in tables:
        for parts in zip(stored.overlays.parts(), present.overlays.parts(), strict=True):
            for olds, heres in zip(*map(_units, parts), strict=True):
                news = [emptied.objects.get(here, here) for here in heres]
                theres = [at_target.by_overlay.get(old.digest, old) for old in olds]
                if news == olds != theres:
                    replaced.update({old.digest for old in olds} - {there.digest for there in theres})
                    continue
                for old, here, new, there in zip(olds, heres, news, theres, strict=True):
                    if new == here != old:
                        copy_missing(source.objects, target.objects, [here])
                    if there != new:
                        # What the target has instead of the old one may have values that only the source has purged.
                        carried.objects |= {each: new for each in (old, here, there) if each != new}
    return carried


def _units(part: ColumnOverlay) -> list[list[ObjectInfo]]:
    """Return the objects of a part that replace each other together: a directory and its packs do."""
    return [list(filter(None, each)) for each in ([part.sparse], [part.directory, *part.packs])]
