"""Promotes a version on the nodes to a version of the repository: the nodes store its chunks there, rank 0 commits.

A manager does this at its end, if its newest version is on the nodes only. Each node reads chunks that it has, so
that each chunk is read once, and the state need not be in memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from datasvc.errors import CorruptDataError, DatasvcError, NotFoundError
from datasvc.models.local.local_saves import LocalVersion
from datasvc.models.saving.distributed_save import RankWrites, gather_parts, share_outcome
from datasvc.models.saving.nodes.local_restore import LocalRestore
from datasvc.models.saving.nodes.local_tier import LocalTier
from datasvc.models.saving.writer import VersionWriter
from datasvc.models.tensors.read import load_chunk
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord, encode_table, join_chunks
from datasvc.models.tensors.write import Codec, TensorBlock, store_chunks
from datasvc.models.versions.commit import base_records
from datasvc.models.versions.entry_fields import MAX_CODE_BYTES, EntryObjects, objects_of_entry
from datasvc.repository import Digest, Repository, Resolved
from datasvc.repository.objects.presence import check_present

logger = logging.getLogger(__name__)

_BYTES_AT_ONCE: Final = 256 << 20  # of chunks in the memory of a node
# The first are written by `Log.append`; the last is about the nodes.
_OWN_FIELDS: Final = frozenset({"format", "commit", "created", "checksum", "nodes"})


def promote_newest(tier: LocalTier, writer: VersionWriter, *, is_allowed: bool) -> None:
    """Commit the newest version of a job to the repository, if it is on the nodes only; every rank calls this.

    Args:
        tier: tier of the job, which does not save meanwhile.
        writer: writer of the job, which does not write meanwhile; it then has the new version.
        is_allowed: False: only log that it is on the nodes.

    Raises:
        DatasvcError: the version cannot be committed (the message says where it is); or the last save to the nodes
            has failed, and the repository does not have its step.
    """
    version = tier.newest
    if version is not None and version.step > writer.newest_step:
        if not is_allowed:
            logger.warning("%s, is not in the repository: the next run restores it", version)
            return
        try:
            writer.check_store()
            committed = _promote_intact(tier, version, writer)
        except DatasvcError as error:
            raise type(error)(
                f"{version}, is not in the repository: {error}. It stays in {tier.settings.folder} of the nodes; the "
                "next run restores it"
            ) from error
        writer.set_newest(committed, version.step)
    if is_allowed:
        tier.check_newest(writer.newest_step)


def _promote_intact(tier: LocalTier, version: LocalVersion, writer: VersionWriter) -> Resolved:
    try:
        return _promote(tier, version, writer)
    except CorruptDataError as error:  # the same on all ranks
        # Remove what is damaged: other nodes may have a good copy.
        logger.warning("%s is read again from other nodes: %s", version, error)
        tier.nodes.on_leaders(lambda: tier.nodes.folder.remove_damaged(version))
        return _promote(tier, version, writer)


def _promote(tier: LocalTier, version: LocalVersion, writer: VersionWriter) -> Resolved:
    """Store and commit a version, whose entry has the parent if the writer has none."""
    repository, codec = writer.repository, writer.codec
    parent = None if writer.newest is None else str(writer.newest)
    nodes = tier.nodes
    objects = LocalRestore(tier).share(version)
    part, refs, error = None, None, None
    entry: Mapping[str, Any] = {}
    records: tuple[TensorRecord, ...] = ()
    try:
        needed = nodes.folder.needed_objects(version)
        if needed is None:
            raise NotFoundError(f"{version}: its entry or tensor table is gone from {nodes.folder}")  # noqa: TRY301
        entry, records = needed.entry, needed.records
        refs = objects_of_entry(entry, version)
        own = _own_chunks(records, objects, nodes.node) if nodes.is_leader else []
        base = base_records(repository, tier.name, parent) if own and codec == "delta" else ()
        part = _store(nodes.folder.repository(version), repository, own, base, codec)
    except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
        error = failure
    parts = gather_parts(nodes.channel, part, error)
    committed = None
    try:
        if nodes.channel.rank == 0:
            assert refs is not None
            content = {**entry, "parent": parent or entry.get("parent")}
            committed = _commit(
                nodes.folder.repository(version), repository, tier.name, content, refs, records, parts
            )
    except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
        error = failure
    return share_outcome(nodes.channel, committed, error)


def _own_chunks(
    records: Iterable[TensorRecord], objects: list[dict[Digest, int]], node: int
) -> list[tuple[TensorRecord, Chunk]]:
    """Return the chunks that a node stores: of those it has, as many bytes as other nodes that have them too."""
    assigned = Counter[int]()
    own = []
    for record in records:
        for chunk in record.chunks:
            holders = [
                number for number, found in enumerate(objects) if all(link.object in found for link in chunk.chain)
            ]
            # All objects are on some node, see `LocalRestore.share`; a chunk here has one link.
            chosen = min(holders, key=lambda number: (assigned[number], number))
            assigned[chosen] += chunk.stored_bytes
            if chosen == node:
                own.append((record, chunk))
    return own


def _store(
    local: Repository,
    repository: Repository,
    own: list[tuple[TensorRecord, Chunk]],
    base: tuple[TensorRecord, ...],
    codec: Codec,
) -> RankWrites:
    chunks: list[tuple[str, Chunk]] = []
    new_bytes, num_nonfinite = 0, Counter[str]()
    for group in _groups(own):
        blocks = [
            TensorBlock(record.name, chunk.start, load_chunk(local.objects, record.dtype, chunk, name=record.name))
            for record, chunk in group
        ]
        stored = store_chunks(repository.objects, blocks, base=base, codec=codec)
        chunks += stored.chunks
        new_bytes += stored.new_bytes
        num_nonfinite.update(stored.num_nonfinite)
    return RankWrites(chunks, {}, None, new_bytes, num_nonfinite)


def _groups(own: list[tuple[TensorRecord, Chunk]]) -> Iterator[list[tuple[TensorRecord, Chunk]]]:
    """Yield the chunks in groups of at most `_BYTES_AT_ONCE` in memory, or of one chunk."""
    group: list[tuple[TensorRecord, Chunk]] = []
    group_bytes = 0
    for record, chunk in own:
        size_bytes = record.chunk_bytes(chunk)
        if group and group_bytes + size_bytes > _BYTES_AT_ONCE:
            yield group
            group, group_bytes = [], 0
        group.append((record, chunk))
        group_bytes += size_bytes
    if group:
        yield group


def _commit(
    local: Repository,
    repository: Repository,
    name: str,
    entry: Mapping[str, Any],
    refs: EntryObjects,
    records: Iterable[TensorRecord],
    parts: list[RankWrites],
) -> Resolved:
    chunks: dict[str, list[Chunk]] = {}
    for part in parts:
        for tensor, chunk in part.chunks:
            chunks.setdefault(tensor, []).append(chunk)
    stored = [join_chunks(old.name, old.dtype, old.shape, chunks.get(old.name, [])) for old in records]
    table = repository.objects.put(encode_table(stored)).digest
    others = [(refs.state, MAX_STATE_BYTES), *([] if refs.code is None else [(refs.code, MAX_CODE_BYTES)])]
    for digest, max_bytes in others:
        repository.objects.put(local.objects.read(digest, max_bytes))
    content = {field: value for field, value in entry.items() if field not in _OWN_FIELDS}
    content |= {"tensors": table, "stored_bytes": sum(part.new_bytes for part in parts)}
    named = {link.object for record in stored for chunk in record.chunks for link in chunk.chain}
    check_present(repository.objects, {*named, table, *(digest for digest, _ in others)}, f"{name!r}")
    committed = repository.versions("models", name).append(lambda _head: content)
    return Resolved("models", name, committed.number)
