"""Deletion bitmaps, which mark the deleted samples in the shards of a split.

Shards are immutable. A version stores one deletions object per split, with one bit per stored sample of the shards
that have deletions. So a delete writes little, and older versions still read the same shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import CorruptDataError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, Objects
from datasvc.shards.format.ipc_reader import column_to_numpy, decode_table, encode_table
from datasvc.shards.format.overlaid_shard import open_table_shard
from datasvc.shards.format.schema import LABEL
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.packing.row_cache import RowCache, RowMap

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
_BITMAPS_AT_ONCE: Final = 1 << 14

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
        # All bitmaps one after the other, because an array per bitmap takes ten times the memory of a small bitmap.
        bitmaps = self._table.column("bitmap").combine_chunks()
        _, offsets, content = bitmaps.buffers()
        first, stop = bitmaps.offset, bitmaps.offset + len(bitmaps) + 1
        # Arrow leaves out the offsets of an empty array.
        self._offsets = np.frombuffer(offsets, np.int64)[first:stop] if len(bitmaps) else np.zeros(1, np.int64)
        self._bits = np.frombuffer(content, np.uint8) if content else np.empty(0, np.uint8)
        self._kept_rows = RowCache(_MAX_CACHED_ROWS)

    @classmethod
    def build(cls, flags: Mapping[int, Flags]) -> Deletions:
        """Return the deletions of `flags`: `bool[stored samples]` by shard, in any order; True where deleted."""
        affected = sorted(shard for shard, deleted in flags.items() if deleted.any())
        samples = [len(flags[shard]) for shard in affected]
        bitmaps = [np.packbits(flags[shard], bitorder="little").tobytes() for shard in affected]
        return cls.of_bitmaps(affected, samples, bitmaps)

    @classmethod
    def of_bitmaps(cls, shards: Sequence[int], samples: Sequence[int], bitmaps: Sequence[bytes]) -> Deletions:
        """Return the deletions of shards with `samples` stored samples each; `shards` ascend, each has deletions."""
        return cls(pa.table([shards, samples, bitmaps], schema=_SCHEMA))

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
        samples, offsets = deletions.samples, deletions._offsets
        is_inside = offsets[0] >= 0 and offsets[-1] <= len(deletions._bits)
        # A damaged number of samples must not make `flags` allocate much: each sample needs a bit that was stored.
        if not is_inside or ((samples < 1) | (np.diff(offsets) != (samples - 1) // 8 + 1)).any():
            raise CorruptDataError(f"{name} is not a {what}: a bitmap does not have one bit for each sample")
        return deletions

    @property
    def counts(self) -> Integers:
        """Number of deleted samples of each of `shards`: `int64[n]`."""
        parts = [np.empty(0, np.int64)]
        # In parts, because `reduceat` converts all of its input to int64 first.
        for first in range(0, len(self.shards), _BITMAPS_AT_ONCE):
            offsets = self._offsets[first : first + _BITMAPS_AT_ONCE + 1]
            bits = np.bitwise_count(self._bits[offsets[0] : offsets[-1]]).astype(np.int64)
            parts.append(np.add.reduceat(bits, offsets[:-1] - offsets[0]))
        return np.concatenate(parts)

    def bitmap(self, shard: int) -> bytes:
        """Return the bitmap of one shard; b"" if the shard has no deletions."""
        index = self._find(shard)
        return b"" if index is None else self._bitmap_at(index).tobytes()

    def flags(self, shard: int) -> Flags:
        """Return the flags of a shard with deletions: `bool[stored samples]`, True where the sample is deleted."""
        index = self._find(shard)
        assert index is not None, shard
        count = int(self.samples[index])
        return np.unpackbits(self._bitmap_at(index), count=count, bitorder="little").view(np.bool_)

    def kept_rows(self, shard: int) -> Integers:
        """Return the live rows of a shard with deletions: `int64[live]`, ascending. Do not modify the array."""
        return self._kept_rows.get(shard, lambda: np.flatnonzero(~self.flags(shard)))

    def row_map(self, stored_per_shard: Integers) -> RowMap:
        """Return the map from rows that do not count deleted samples to those in the shards' files."""
        counts = stored_per_shard.copy()
        counts[self.shards] -= self.counts

        def find(shard: int) -> Integers | None:
            return None if self._find(shard) is None else self.kept_rows(shard)

        return RowMap(counts, find, _MAX_CACHED_ROWS)

    def _bitmap_at(self, index: int) -> npt.NDArray[np.uint8]:
        return self._bits[self._offsets[index] : self._offsets[index + 1]]

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


def stored_rows_of(objects: Objects, table: ShardTable, shards: Integers, rows: Integers) -> Integers:
    """Return the rows in their shards' files of samples at `rows` that do not count deleted samples: `int64[n]`.

    Raises what `load_deletions` raises.
    """
    return load_deletions(objects, table).row_map(table.stored_per_shard)(shards, rows)


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
    return _without_values(objects, table, with_deletions(objects, counted_table, flags))


def _without_values(objects: Objects, before: ShardTable, after: ShardTable) -> ShardTable:
    """Return a table whose overlays do not have the values of shards that it has left out.

    A purge finds samples by the shards of tables, and would miss these values if no other version has the shard.
    """
    kept = set(after.overlay_numbers.tolist())
    places = before.overlay_numbers.tolist()
    left_out = [number for number, place in enumerate(places) if place >= 0 and place not in kept]
    if not left_out:
        return after
    # A static import would make versions depend on their history.
    overlays = import_module("datasvc.shards.history.purged_overlays")
    gone = replace(before, rows=before.rows.take(left_out))
    counts = gone.stored_per_shard.tolist()
    rows = {shard.digest: np.arange(count) for shard, count in zip(gone.shards(), counts, strict=True)}
    emptied = overlays.empty_overlays(objects, [gone], rows).objects
    return replace(after, overlays=after.overlays.replaced({old.digest: new for old, new in emptied.items()}))


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


def count_live(objects: Objects, table: ShardTable, rows: Mapping[Digest, Integers]) -> int:
    """Return how many of `rows`, distinct rows of shards by digest, are live samples of a split.

    Raises what `load_deletions` raises.
    """
    numbers = [number for number, shard in enumerate(table.shards()) if shard.digest in rows] if rows else []
    deleted = table.deleted_per_shard
    deletions = load_deletions(objects, table) if any(deleted[number] for number in numbers) else None
    num_live = 0
    for number in numbers:
        chosen = rows[table.shard(number).digest]
        num_deleted = np.count_nonzero(deletions.flags(number)[chosen]) if deletions and deleted[number] else 0
        num_live += len(chosen) - int(num_deleted)
    return num_live


def count_purged(objects: Objects, table: ShardTable) -> int:
    """Return the number of live samples of a split that were purged. Raises what `load_deletions` raises."""
    rows = {digest: np.array(list(each.payloads), np.int64) for digest, each in table.redacted.items()}
    return count_live(objects, table, rows)


def _labels(objects: Objects, table: ShardTable, number: int, rows: Integers) -> list[int]:
    """Return the labels of some rows of a shard, without nulls; [] if the shard has no labels."""
    shard = open_table_shard(objects, table, number)
    rows = np.setdiff1d(rows, shard.redacted)  # the label of a purged sample is lost, and stays in the counts
    labels = shard.column(LABEL).take(pa.array(rows)) if LABEL in shard.schema.names else pa.nulls(0)
    return [label for label in labels.to_pylist() if label is not None]
