"""Deletion bitmaps, which mark the deleted samples in the shards of a split.

Shards are immutable. A version stores one deletions object per split, with one bit per stored sample of the shards
that have deletions. So a delete writes little, and older versions still read the same shards.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import CorruptDataError
from datasvc.keyed_random import Integers
from datasvc.repository import Objects
from datasvc.shards.format.digests import blob_views
from datasvc.shards.format.ipc_reader import column_to_numpy, decode_table, encode_table
from datasvc.shards.format.reader import open_shard
from datasvc.shards.format.schema import LABEL
from datasvc.shards.format.shard_table import ShardTable

DELETIONS_FORMAT = 1
_FORMAT_KEY: Final = b"datasvc.deletions.format"
_SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int64(), nullable=False),
        pa.field("samples", pa.int64(), nullable=False),
        pa.field("bitmap", pa.large_binary(), nullable=False),
    ],
    metadata={_FORMAT_KEY: str(DELETIONS_FORMAT).encode()},
)
# Maximum number of row numbers that `kept_rows` caches for a split; with 8 bytes each, they take 32 MiB.
_MAX_CACHED_ROWS = 4 << 20

Flags = npt.NDArray[np.bool_]


class Deletions:
    """The deleted samples of one split, as bitmaps of its shards. Safe for use by several threads.

    A bitmap has one bit per stored sample (live or deleted), lowest bit first; 1 means deleted.

    Args:
        table: Arrow table with the columns of docs/reference/formats.md, by ascending shard number.

    Attributes:
        shards: `int64[n]`, numbers of the shards with deletions, ascending.
        samples: `int64[n]`, number of stored samples of each of `shards`.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table.combine_chunks()
        self.shards = np.asarray(column_to_numpy(self._table.column("shard")), np.int64)
        self.samples = np.asarray(column_to_numpy(self._table.column("samples")), np.int64)
        # `blob_views` returns None for a null, which this column cannot have: the test is for the type checker.
        views = [view for chunk in self._table.column("bitmap").chunks for view in blob_views(chunk)]
        self._bitmaps = [np.frombuffer(view, np.uint8) for view in views if view is not None]
        # Results of `kept_rows` by shard, least recently used first, and the number of rows in all of them.
        self._cached: OrderedDict[int, Integers] = OrderedDict()
        self._num_cached_rows = 0
        self._lock = threading.Lock()

    @classmethod
    def build(cls, flags: Mapping[int, Flags]) -> Deletions:
        """Return the deletions of `flags`: `bool[stored samples]` by shard, in any order; True where deleted."""
        affected = sorted(shard for shard, deleted in flags.items() if deleted.any())
        samples = [len(flags[shard]) for shard in affected]
        bitmaps = [np.packbits(flags[shard], bitorder="little").tobytes() for shard in affected]
        return cls(pa.table([affected, samples, bitmaps], schema=_SCHEMA))

    def encode(self) -> bytes:
        """Return the deletions as an Arrow IPC file; equal deletions give equal bytes."""
        return encode_table(self._table)

    @classmethod
    def decode(cls, content: bytes, name: str) -> Deletions:
        """Return the deletions that `encode` wrote. Raise CorruptDataError, or ConfigError for a newer format."""
        what = "deletions object"
        table = decode_table(
            content, name, what=what, format_key=_FORMAT_KEY, latest=DELETIONS_FORMAT, columns=_SCHEMA
        )
        deletions = cls(table)
        samples, num_bytes = deletions.samples, np.array([bitmap.size for bitmap in deletions._bitmaps], np.int64)
        # A damaged number of samples must not make `flags` allocate much: each sample needs a bit that was stored.
        if ((samples < 1) | (num_bytes != (samples - 1) // 8 + 1)).any():
            raise CorruptDataError(f"{name} is not a {what}: a bitmap does not have one bit for each sample")
        return deletions

    @property
    def counts(self) -> Integers:
        """Number of deleted samples of each of `shards`: `int64[n]`."""
        if not self._bitmaps:
            return np.empty(0, np.int64)
        # `starts`: index of the first byte of each bitmap in the concatenated bitmaps.
        starts = np.cumsum([0, *map(len, self._bitmaps[:-1])])
        bits = np.bitwise_count(np.concatenate(self._bitmaps)).astype(np.int64)
        return np.asarray(np.add.reduceat(bits, starts), np.int64)

    def bitmap(self, shard: int) -> bytes:
        """Return the bitmap of one shard; b"" if the shard has no deletions."""
        index = self._find(shard)
        return b"" if index is None else self._bitmaps[index].tobytes()

    def flags(self, shard: int) -> Flags:
        """Return the flags of a shard with deletions: `bool[stored samples]`, True where the sample is deleted."""
        index = self._find(shard)
        assert index is not None, shard
        count = int(self.samples[index])
        return np.unpackbits(self._bitmaps[index], count=count, bitorder="little").view(np.bool_)

    def kept_rows(self, shard: int) -> Integers:
        """Return the live rows of a shard with deletions: `int64[live]`, ascending. Do not modify the array."""
        with self._lock:
            if shard in self._cached:
                self._cached.move_to_end(shard)
                return self._cached[shard]
        # Computed without the lock: two threads may compute the same rows, but no thread waits for another shard's.
        rows = np.flatnonzero(~self.flags(shard))
        with self._lock:
            if shard not in self._cached:
                self._cached[shard] = rows
                self._num_cached_rows += len(rows)
            # The newest entry stays even if it exceeds the limit alone: otherwise every call would compute it again.
            while self._num_cached_rows > _MAX_CACHED_ROWS and len(self._cached) > 1:
                self._num_cached_rows -= len(self._cached.popitem(last=False)[1])
        return rows

    def _find(self, shard: int) -> int | None:
        """Return the index of a shard in `shards`; None if the shard has no deletions."""
        index = int(np.searchsorted(self.shards, shard))
        return index if index < len(self.shards) and self.shards[index] == shard else None


def load_deletions(objects: Objects, table: ShardTable) -> Deletions:
    """Return the deletions of a split, with no shards if the split has none.

    Raises:
        CorruptDataError: the object is corrupt, or does not match the shard table.
        ConfigError: the object has a newer format than this datasvc reads.
        NotFoundError, UnavailableError: see `Objects.read`.
    """
    if table.deletions is None:
        return Deletions.build({})
    name = objects.location(table.deletions)
    deletions = Deletions.decode(objects.read(table.deletions), name)
    # The shard table has the number of deleted samples of each shard too. The two objects must agree.
    affected = np.flatnonzero(table.deleted_per_shard)
    if not (
        np.array_equal(deletions.shards, affected)
        and np.array_equal(deletions.samples, table.stored_per_shard[affected])
        and np.array_equal(deletions.counts, table.deleted_per_shard[affected])
    ):
        raise CorruptDataError(f"{name} does not match its shard table: restore both from another copy")
    return deletions


def delete_samples(objects: Objects, table: ShardTable, rows: Mapping[int, Integers]) -> ShardTable:
    """Delete samples of a split: store a new deletions object, and return the table that refers to it.

    `rows` has, by shard, the row numbers to delete in the shard's file: `int64[n]`. Rows that are deleted already
    are ignored. If there are no others, the result is `table`. Shards without live samples are left out of the new
    table, and the other shards are renumbered.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: the labels of a shard, or the present deletions, cannot
            be read.
    """
    present = load_deletions(objects, table)
    flags = {int(shard): present.flags(int(shard)) for shard in present.shards}
    num_stored = table.stored_per_shard
    deleted_labels: Counter[int] = Counter()
    num_new = 0
    for shard, shard_rows in sorted(rows.items()):
        deleted = flags.setdefault(shard, np.zeros(int(num_stored[shard]), np.bool_))
        new_rows = np.unique(shard_rows[~deleted[shard_rows]])
        # Labels are read from the shard only if the table has label counts to update.
        if len(new_rows) and table.label_counts:
            deleted_labels.update(_labels(objects, table, shard, new_rows))
        deleted[new_rows] = True
        num_new += len(new_rows)
    if not num_new:
        return table
    live_counts = {label: count - deleted_labels[label] for label, count in table.label_counts.items()}
    counted_table = replace(table, label_counts={label: count for label, count in live_counts.items() if count})
    return with_deletions(objects, counted_table, flags)


def only_samples(objects: Objects, table: ShardTable, rows: Mapping[int, Integers]) -> ShardTable:
    """Delete all samples of a split except `rows`, which must be live. Otherwise like `delete_samples`."""
    flags = {shard: np.ones(count, np.bool_) for shard, count in enumerate(table.stored_per_shard.tolist())}
    kept_labels: Counter[int] = Counter()
    for shard, kept_rows in rows.items():
        flags[shard][kept_rows] = False
        if table.label_counts:
            kept_labels.update(_labels(objects, table, shard, kept_rows))
    return with_deletions(objects, replace(table, label_counts=dict(sorted(kept_labels.items()))), flags)


def with_deletions(objects: Objects, table: ShardTable, flags: Mapping[int, Flags]) -> ShardTable:
    """Replace the deletions of `table` by the given ones, and leave out shards that then have no live samples.

    `flags` has `bool[stored samples]` by shard, True where deleted. The label counts of `table` must already be
    those of the result.
    """
    num_deleted = np.zeros(table.num_shards, np.int64)  # by shard
    for shard, shard_flags in flags.items():
        num_deleted[shard] = np.count_nonzero(shard_flags)
    # Shards without live samples are dropped. The others get new numbers, also in the deletions object.
    kept = np.flatnonzero(num_deleted < table.stored_per_shard)
    deletions = Deletions.build(
        {new_number: flags[shard] for new_number, shard in enumerate(kept.tolist()) if shard in flags}
    )
    digest = objects.put(deletions.encode()).digest if len(deletions.shards) else None
    all_shards = table.with_column("deleted", num_deleted)
    return replace(all_shards, rows=all_shards.rows.take(kept), deletions=digest)


def _labels(objects: Objects, table: ShardTable, number: int, rows: Integers) -> list[int]:
    """Return the labels of some rows of a shard, without nulls; [] if the shard has no labels."""
    shard = table.check_shard(number, open_shard(objects, table.shard(number)))
    labels = shard.column(LABEL).take(pa.array(rows)) if LABEL in shard.schema.names else pa.nulls(0)
    return [label for label in labels.to_pylist() if label is not None]
