"""Keys, digests and places (shard and row) of a split's live (not deleted) samples, and the join of two splits.

Append, merge, diff, delete and the searches for overlaps and contradicting labels use it. Both sides of a join are
read shard by shard. Memory holds one 8-byte hash per sample of the smaller side. Only samples with equal hashes are
held as Arrow and NumPy arrays, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.keyed_random import Integers
from datasvc.repository import Objects
from datasvc.shards.format.digests import DIGEST_BYTES, digest_batch, has_units
from datasvc.shards.format.overlaid_shard import open_table_shard, read_index
from datasvc.shards.format.reader import Shard
from datasvc.shards.format.schema import KEY
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.deletions import Deletions, Flags, load_deletions
from datasvc.shards.versions.labels import labels_at, relabel_batch
from datasvc.threads import iterate_in_threads

_READS_AT_ONCE: Final = 16


@dataclass(frozen=True)
class ShardKeys:
    """The live samples of one shard.

    Attributes:
        shard: number of the shard in its table.
        rows: `int64[n]`, row numbers in the shard's file, ascending.
        keys: Arrow array of `n` keys.
        read_digests: returns an Arrow array of their sample digests; reads the shard if the index does not have them.
    """

    shard: int
    rows: Integers
    keys: pa.Array
    read_digests: Callable[[], pa.Array]


class SplitKeys:
    """The live samples of some shards of a split; iteration reads them shard by shard.

    Args:
        objects: objects of the repository.
        table: shard table of the split.
        shards: numbers of the shards, ascending; None for all.
        labels: new number of each label. Sample digests are computed with the new numbers; stored labels are not
            changed. None: all labels keep their numbers.
        without: by shard, live rows to leave out, ascending. These shards must be in `shards`.

    Attributes:
        num_samples: number of live samples of these shards, less those in `without`.
    """

    def __init__(
        self,
        objects: Objects,
        table: ShardTable,
        shards: Sequence[int] | Integers | None = None,
        labels: Mapping[int, int] | None = None,
        without: Mapping[int, Integers] | None = None,
    ) -> None:
        self.table = table
        self.shards = np.arange(table.num_shards) if shards is None else np.asarray(shards, np.int64)
        self._without = without or {}
        self.num_samples = int(table.samples_per_shard[self.shards].sum()) - sum(map(len, self._without.values()))
        self._objects = objects
        self._labels = labels
        self._deleted, self._stored = table.deleted_per_shard, table.stored_per_shard

    def __iter__(self) -> Iterator[ShardKeys]:
        """Yield the shards in order. Raise CorruptDataError, NotFoundError or UnavailableError if a read fails."""
        shards = self.shards.tolist()
        # A version that grows reads an index of every shard: from a bucket, one after the other takes minutes.
        # Without an index, a whole shard is read, and memory has to hold only one of them.
        if self._objects.storage.is_local or self.table.rows.column("index").null_count:
            return map(self.read, shards)
        return iterate_in_threads(self.read, shards, _READS_AT_ONCE)

    def read(self, shard: int) -> ShardKeys:
        """Return the live samples of one shard, except those in `without`. Raise what `__iter__` raises."""
        rows = self.live_rows(shard)
        decoded = read_index(self._objects, self.table, shard)
        if decoded is None:
            # The shard was written before sample indexes existed, so read keys and digests from the samples.
            opened = self._open(shard)
            keys = take_keys(opened.column(KEY), rows)
            return ShardKeys(shard, rows, keys, lambda: take_keys(self._digest(opened), rows))
        index = decoded.table
        keys = take_keys(index.column("key"), rows)
        is_comparable = not (decoded.hashes_text and any(map(has_units, self.table.sample_schema.types)))
        if self._labels is None and is_comparable:
            return ShardKeys(shard, rows, keys, lambda: take_keys(index.column("sample"), rows))
        # The digests in the index include the stored labels, and in old indexes they are those of the text of a date.
        # For other labels, and to compare with new indexes, compute digests from the samples.
        return ShardKeys(shard, rows, keys, lambda: take_keys(self._digest(self._open(shard)), rows))

    def _open(self, shard: int) -> Shard:
        return open_table_shard(self._objects, self.table, shard)

    def labels(self, shards: Integers, rows: Integers) -> list[str]:
        """Return the classes of stored samples, see `labels_at`."""
        return labels_at(self._objects, self.table, shards, rows)

    def live_rows(self, shard: int) -> Integers:
        """Return the rows in a shard's file that are live and not in `without`: `int64[n]`, ascending."""
        # `self._deletions` reads an object at its first use, so use it only if the shard has deletions.
        live = self._deletions.kept_rows(shard) if self._deleted[shard] else np.arange(self._stored[shard])
        excluded = self._without.get(shard)
        return live if excluded is None else np.setdiff1d(live, excluded, assume_unique=True)

    def present_rows(self, shard: int) -> Integers:
        """Return `live_rows` without purged samples, whose values are empty, such as the label 0."""
        live, purged = self.live_rows(shard), self.table.redacted_rows(shard)
        return np.setdiff1d(live, purged, assume_unique=True) if len(purged) else live

    def _digest(self, shard: Shard) -> pa.Array:
        """Return the sample digest of each stored sample, computed with the numbers of `labels`."""
        shard.check_texts()
        digests: list[bytes] = []
        for batch in shard.batches:
            digests += digest_batch(batch if self._labels is None else relabel_batch(batch, self._labels))[0]
        return pa.array(digests, pa.binary(DIGEST_BYTES))

    @cached_property
    def _deletions(self) -> Deletions:
        return load_deletions(self._objects, self.table)


@dataclass(frozen=True)
class SampleRows:
    """Places of samples in a split, both `int64[n]`: number of the shard, and row in the shard's file."""

    shards: Integers
    rows: Integers

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, chosen: Integers | Flags) -> SampleRows:
        return SampleRows(self.shards[chosen], self.rows[chosen])

    @classmethod
    def concatenate(cls, parts: Sequence[SampleRows]) -> SampleRows:
        """Return the places of all parts; there must be at least one part."""
        return cls(np.concatenate([part.shards for part in parts]), np.concatenate([part.rows for part in parts]))

    def by_shard(self) -> dict[int, Integers]:
        """Return the rows by shard; shards and rows ascend."""
        order = np.lexsort((self.rows, self.shards))
        shards, starts = np.unique(self.shards[order], return_index=True)
        rows = np.split(self.rows[order], starts[1:]) if len(shards) else []
        return dict(zip(shards.tolist(), rows, strict=True))


def take_keys(keys: pa.Array | pa.ChunkedArray, rows: Integers) -> pa.Array:
    """Return the keys (or digests) at `rows`, which must be ascending and distinct."""
    array = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
    # As many distinct rows as keys are all rows: return all keys without a copy.
    return array if len(rows) == len(array) else array.take(pa.array(rows))


class ShardValues(NamedTuple):
    """Samples of one shard with the values that they are matched by.

    Attributes:
        shard: number of the shard in its table.
        rows: `int64[n]`, row numbers in the shard's file, ascending.
        values: Arrow array of `n` keys (strings) or `n` digests (binaries of 16 bytes).
        read_attached: returns an Arrow array of `n` values to report with matches; called only if there may be any.
    """

    shard: int
    rows: Integers
    values: pa.Array
    read_attached: Callable[[], pa.Array]


class Side(NamedTuple):
    """One of the two sets of samples to join.

    Attributes:
        num_samples: number of samples, or an upper bound.
        read: yields the shards in ascending order; it may be called twice.
    """

    num_samples: int
    read: Callable[[], Iterator[ShardValues]]


@dataclass(frozen=True)
class Matches:
    """The samples of side `b` whose value occurs on side `a` too, in the order of `b`: `n` samples.

    Attributes:
        values: Arrow array of the common values.
        a: shard and row of the first sample of `a` with the value.
        b: shard and row of the sample of `b`.
        attached_a: Arrow array of the attached values of the samples of `a`.
        attached_b: Arrow array of the attached values of the samples of `b`.
    """

    values: pa.Array
    a: SampleRows
    b: SampleRows
    attached_a: pa.Array
    attached_b: pa.Array

    def __len__(self) -> int:
        return len(self.values)


def match_values(a: Side, b: Side) -> Matches:
    """Return the samples of `b` whose value occurs on side `a` too. Raise what `Side.read` raises.

    First, the smaller side is read for the hashes of its values. Then the larger side is read for the samples with
    one of these hashes (hits), and the smaller side again for the samples with the hash of a hit. Finally, the values
    of all hits are compared, because different values may have the same hash.
    """
    small, large = (a, b) if a.num_samples <= b.num_samples else (b, a)
    large_hits = _read_hits(large, _sorted_hashes(small))
    small_hits = _read_hits(small, np.unique(large_hits.column("hash").to_numpy()))
    hits_a, hits_b = (small_hits, large_hits) if small is a else (large_hits, small_hits)
    # Delete these names, so that a batch is released below as soon as its needed columns are copied.
    del large_hits, small_hits
    # A value may occur more than once on either side: `index_in` returns its first position in `hits_a`.
    positions = pc.index_in(hits_b.column("value"), value_set=hits_a.column("value"))
    hits_a = hits_a.select(["shard", "row", "attached"]).take(positions.drop_null())
    if positions.null_count:
        hits_b = hits_b.filter(positions.is_valid())
    return Matches(
        hits_b.column("value"),
        _sample_rows(hits_a),
        _sample_rows(hits_b),
        hits_a.column("attached"),
        hits_b.column("attached"),
    )


@dataclass(frozen=True)
class CommonKeys:
    """Pairs of samples of two splits, a and b, that have the same key; in the order of b.

    Attributes:
        keys: Arrow array of `n` keys.
        a: shard and row of each sample in the first split.
        b: shard and row of each sample in the second split.
        equal: `bool[n]`, True where the two samples are equal.
    """

    keys: pa.Array
    a: SampleRows
    b: SampleRows
    equal: Flags

    def __len__(self) -> int:
        return len(self.a)

    def take(self, chosen: Integers) -> CommonKeys:
        """Return the pairs at the given positions of the arrays."""
        return CommonKeys(self.keys.take(pa.array(chosen)), self.a[chosen], self.b[chosen], self.equal[chosen])


def find_common_keys(objects: Objects, a: ShardTable, b: ShardTable) -> CommonKeys:
    """Return the pairs of live (not deleted) samples with equal keys; for errors, see `match_keys`."""
    return match_keys(SplitKeys(objects, a), SplitKeys(objects, b))


def match_keys(a: SplitKeys, b: SplitKeys) -> CommonKeys:
    """Return the pairs of samples of `a` and `b` with equal keys.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a sample index, or a shard without one, cannot be read.
    """
    matches = match_values(_key_side(a), _key_side(b))
    # Without matches, the arrays of attached values (here sample digests) have the type null and cannot be compared.
    if not len(matches):
        return CommonKeys(matches.values, matches.a, matches.b, np.empty(0, np.bool_))
    equal = pc.equal(matches.attached_a, matches.attached_b).to_numpy(zero_copy_only=False)
    return CommonKeys(matches.values, matches.a, matches.b, equal)


def first_keys(keys: list[str] | pa.Array, count: int = 10) -> str:
    """Return the first `count` keys and the number of further ones, as text for a message."""
    listed = ", ".join(map(repr, keys[:count] if isinstance(keys, list) else keys[:count].to_pylist()))
    return f"{listed} and {len(keys) - count} more" if len(keys) > count else listed


def hash_values(values: pa.Array) -> Integers:
    """Return a hash of each value: `int64[n]`."""
    if pa.types.is_fixed_size_binary(values.type):
        # Digests are uniformly distributed already: the first of their two 8-byte words serves as the hash.
        words = np.frombuffer(values.buffers()[1] or b"", np.int64)[::2]
        return words[values.offset : values.offset + len(values)]
    # Python's hash of strings is keyed per process, so keys of a source cannot be crafted to collide.
    return np.fromiter(map(hash, values.to_pylist()), np.int64, len(values))


def _sorted_hashes(side: Side) -> Integers:
    """Return the hashes of all values of a side, ascending; a hash may occur several times."""
    hashes = np.empty(side.num_samples, np.int64)
    stop = 0
    for shard_values in side.read():
        start, stop = stop, stop + len(shard_values.rows)
        hashes[start:stop] = hash_values(shard_values.values)
    # `num_samples` may be only an upper bound; then the end of the array is unused.
    hashes = hashes[:stop]
    hashes.sort()
    return hashes


def _read_hits(side: Side, hashes: Integers) -> pa.RecordBatch:
    """Return the samples of a side with a hash in `hashes` (ascending), as a batch with the columns of `_NO_HITS`."""
    batches = []
    # Without hashes there are no hits, so the side is not read.
    for shard_values in side.read() if len(hashes) else ():
        shard_hashes = hash_values(shard_values.values)
        hits = np.flatnonzero(_is_in(shard_hashes, hashes))
        # Attached values are read only for a shard with a hit, because they may take a read of the whole shard.
        if len(hits):
            columns = {
                "value": _with_wide_offsets(take_keys(shard_values.values, hits)),
                "hash": shard_hashes[hits],
                "shard": np.full(len(hits), shard_values.shard),
                "row": shard_values.rows[hits],
                "attached": _with_wide_offsets(take_keys(shard_values.read_attached(), hits)),
            }
            batches.append(pa.RecordBatch.from_pydict(columns))
    return pa.concat_batches(batches) if batches else _NO_HITS


# The result of `_read_hits` without hits. The type of its attached values is null, because no value gives their type.
# Made of nulls, because `pa.array` imports pandas where it is installed.
_NO_HITS = pa.RecordBatch.from_arrays(
    [pa.nulls(0, pa.large_string()), *(pa.nulls(0, pa.int64()) for _ in range(3)), pa.nulls(0)],
    names=["value", "hash", "shard", "row", "attached"],
)


def _is_in(values: Integers, ordered: Integers) -> Flags:
    """Return for each value whether it is in `ordered`, which ascends and is not empty."""
    positions = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.asarray(ordered[positions] == values, np.bool_)


def _with_wide_offsets(values: pa.Array) -> pa.Array:
    """Return text with 64-bit offsets, because the keys of all shards may exceed 2 GiB. Return other values as is."""
    is_text = not (pa.types.is_fixed_size_binary(values.type) or pa.types.is_null(values.type))
    return values.cast(pa.large_string()) if is_text else values


def _sample_rows(batch: pa.RecordBatch) -> SampleRows:
    return SampleRows(batch.column("shard").to_numpy(), batch.column("row").to_numpy())


def _key_side(split: SplitKeys) -> Side:
    """Return `split` as one side of a match by key, with sample digests as the attached values."""

    def read() -> Iterator[ShardValues]:
        return (ShardValues(shard.shard, shard.rows, shard.keys, shard.read_digests) for shard in split)

    return Side(split.num_samples, read)
