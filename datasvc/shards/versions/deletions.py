"""Deletion bitmaps: which stored samples of a split are deleted. Shards themselves never change.

One object per version and split, one bit per stored sample of the shards that are affected, so that a delete costs
next to nothing and every older version goes on reading the same shards.
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
from datasvc.shards.format.arrow_object import decode_table, encode_table
from datasvc.shards.format.digests import blob_views
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
# Row numbers that `kept_rows` keeps for the next call: 32 MiB of them.
_CACHED_ROWS = 4 << 20

Flags = npt.NDArray[np.bool_]


class Deletions:
    """The deleted samples of one split. May be used by several threads.

    Args:
        table: Arrow table with the columns of docs/formats.md; shards ascending.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table.combine_chunks()
        self._shards = np.asarray(self._table.column("shard").to_numpy(), np.int64)
        parts = [blob_views(part) for part in self._table.column("bitmap").chunks]
        self._bitmaps = [np.frombuffer(view, np.uint8) for part in parts for view in part if view is not None]
        self._kept: OrderedDict[int, Integers] = OrderedDict()
        self._kept_rows = 0
        self._lock = threading.Lock()

    @classmethod
    def build(cls, flags: Mapping[int, Flags]) -> Deletions:
        """Return the deletions given by shard: `bool[stored samples]`, True where deleted. Any order of shards."""
        affected = sorted(shard for shard, deleted in flags.items() if deleted.any())
        columns = [
            pa.array(affected, pa.int64()),
            pa.array([len(flags[shard]) for shard in affected], pa.int64()),
            pa.array(
                [np.packbits(flags[shard], bitorder="little").tobytes() for shard in affected], pa.large_binary()
            ),
        ]
        return cls(pa.Table.from_arrays(columns, schema=_SCHEMA))

    def encode(self) -> bytes:
        """Return the deletions as an Arrow IPC file; equal deletions give equal bytes."""
        return encode_table(self._table)

    @classmethod
    def decode(cls, content: bytes, name: str) -> Deletions:
        """Return the deletions that `encode` gave. Raises CorruptDataError, ConfigError for a later format."""
        return cls(
            decode_table(content, name, what="deletions object", format_key=_FORMAT_KEY, latest=DELETIONS_FORMAT)
        )

    @property
    def shards(self) -> Integers:
        """Numbers of the shards with deleted samples, ascending: `int64[n]`."""
        return self._shards

    @property
    def samples(self) -> Integers:
        """Samples stored in each of `shards`: `int64[n]`."""
        return np.asarray(self._table.column("samples").to_numpy(), np.int64)

    @property
    def counts(self) -> Integers:
        """Deleted samples of each of `shards`: `int64[n]`."""
        if not self._bitmaps:
            return np.empty(0, np.int64)
        starts = np.cumsum([0, *map(len, self._bitmaps[:-1])])
        bits = np.bitwise_count(np.concatenate(self._bitmaps)).astype(np.int64)
        return np.asarray(np.add.reduceat(bits, starts), np.int64)

    def bitmap(self, shard: int) -> bytes:
        """Return the bitmap of one shard, one bit a stored sample, lowest bit first; b"" where nothing is deleted."""
        place = self._find(shard)
        return b"" if place is None else self._bitmaps[place].tobytes()

    def flags(self, shard: int) -> Flags:
        """Return which samples of an affected shard are deleted: `bool[stored samples]`."""
        place = self._find(shard)
        assert place is not None, shard
        count = int(self.samples[place])
        return np.unpackbits(self._bitmaps[place], count=count, bitorder="little").view(np.bool_)

    def kept_rows(self, shard: int) -> Integers:
        """Return the rows of an affected shard that are not deleted, ascending: `int64[live]`. Do not change it."""
        with self._lock:
            if shard in self._kept:
                self._kept.move_to_end(shard)
                return self._kept[shard]
        rows = np.flatnonzero(~self.flags(shard))
        with self._lock:
            if shard not in self._kept:
                self._kept[shard] = rows
                self._kept_rows += len(rows)
            while self._kept_rows > _CACHED_ROWS and len(self._kept) > 1:
                self._kept_rows -= len(self._kept.popitem(last=False)[1])
        return rows

    def _find(self, shard: int) -> int | None:
        place = int(np.searchsorted(self._shards, shard))
        return place if place < len(self._shards) and self._shards[place] == shard else None


def load_deletions(objects: Objects, table: ShardTable) -> Deletions:
    """Return the deletions of a split; empty ones where nothing is deleted.

    Raises:
        CorruptDataError: the object is changed, or does not belong to this table.
        ConfigError, NotFoundError, UnavailableError: a later format, or as `Objects.read`.
    """
    if table.deletions is None:
        return Deletions.build({})
    name = objects.location(table.deletions)
    deletions = Deletions.decode(objects.read(table.deletions), name)
    affected = np.flatnonzero(table.deleted_per_shard)
    if not (
        np.array_equal(deletions.shards, affected)
        and np.array_equal(deletions.samples, table.stored_per_shard[affected])
        and np.array_equal(deletions.counts, table.deleted_per_shard[affected])
    ):
        raise CorruptDataError(f"{name} does not say what its shard table says: restore both from another copy")
    return deletions


def delete_samples(objects: Objects, table: ShardTable, rows: Mapping[int, Integers]) -> ShardTable:
    """Return the table of the next version of a split, with more samples deleted; stores what it names.

    Shards in which nothing is left are not in it any more, so it numbers its shards anew.

    Args:
        objects: of the repository.
        table: the split.
        rows: by shard, the stored rows to delete, `int64[n]`; rows that are deleted already change nothing.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a shard's labels, or the deletions so far, cannot be read.
    """
    before = load_deletions(objects, table)
    flags = {int(shard): before.flags(int(shard)) for shard in before.shards}
    stored = table.stored_per_shard
    labels: Counter[int] = Counter()
    num_new = 0
    for shard, chosen in sorted(rows.items()):
        deleted = flags.setdefault(shard, np.zeros(int(stored[shard]), np.bool_))
        new = np.unique(chosen[~deleted[chosen]])
        if len(new) and table.label_counts:
            labels.update(_labels(objects, table, shard, new))
        deleted[new] = True
        num_new += len(new)
    if not num_new:
        return table
    left = {label: count - labels[label] for label, count in table.label_counts.items()}
    counted = replace(table, label_counts={label: count for label, count in left.items() if count})
    return with_deletions(objects, counted, flags)


def only_samples(objects: Objects, table: ShardTable, rows: Mapping[int, Integers]) -> ShardTable:
    """Return the table with no samples but these, which are live; `rows` and errors as of `delete_samples`."""
    flags = {shard: np.ones(count, np.bool_) for shard, count in enumerate(table.stored_per_shard.tolist())}
    labels: Counter[int] = Counter()
    for shard, chosen in rows.items():
        flags[shard][chosen] = False
        if table.label_counts:
            labels.update(_labels(objects, table, shard, chosen))
    return with_deletions(objects, replace(table, label_counts=dict(sorted(labels.items()))), flags)


def with_deletions(objects: Objects, table: ShardTable, flags: Mapping[int, Flags]) -> ShardTable:
    """Return `table` with exactly these samples deleted, without the shards that are empty then.

    Args:
        objects: where the new deletions are stored.
        table: its label counts are those of the result.
        flags: by shard, `bool[stored samples]`, True where deleted.
    """
    deleted = np.zeros(table.num_shards, np.int64)
    for shard, each in flags.items():
        deleted[shard] = np.count_nonzero(each)
    kept = np.flatnonzero(deleted < table.stored_per_shard)
    left = Deletions.build({number: flags[shard] for number, shard in enumerate(kept.tolist()) if shard in flags})
    digest = objects.put(left.encode()).digest if len(left.shards) else None
    marked = table.with_column("deleted", deleted)
    return replace(marked, rows=marked.rows.take(kept), deletions=digest)


def _labels(objects: Objects, table: ShardTable, number: int, rows: Integers) -> list[int]:
    shard = open_shard(objects, table.shard(number))
    labels = shard.column(LABEL).take(pa.array(rows)) if LABEL in shard.schema.names else pa.nulls(0)
    return [label for label in labels.to_pylist() if label is not None]
