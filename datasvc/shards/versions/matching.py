"""Exact join of two sets of samples on a value: their key, or a digest.

Append, merge and diff join two splits on keys, and compare the matched samples by their sample digests.
`split_overlap` and `label_conflicts` join on digests. Both sides are read shard by shard. Memory holds one 8-byte
hash per sample of the smaller side. Only samples with equal hashes are held as Arrow and NumPy arrays, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.keyed_random import Integers
from datasvc.repository import Objects
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.deletions import Flags
from datasvc.shards.versions.keys import SampleRows, SplitKeys, take_keys


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
