"""Which samples of two sides have a value in common: their key, or a digest. Exact, and read shard by shard.

What is held for each sample is a hash of eight bytes, of the smaller side only. Samples whose hashes meet are held as
Arrow and NumPy arrays and compared as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.keyed_random import Integers
from datasvc.shards.versions.deletions import Flags
from datasvc.shards.versions.keys import SampleRows, take_keys


class ShardValues(NamedTuple):
    """Samples of one shard, as what they are matched by.

    Attributes:
        shard: its number in the table.
        rows: `int64[n]`, where its file holds them, ascending.
        values: Arrow array of `n` strings, or binaries of 16 bytes.
        read_attached: returns an Arrow array of `n` values that come with a match; called where there may be one.
    """

    shard: int
    rows: Integers
    values: pa.Array
    read_attached: Callable[[], pa.Array]


class Side(NamedTuple):
    """What is matched.

    Attributes:
        num_samples: at least as many as are read.
        read: yields its shards, ascending; called twice.
    """

    num_samples: int
    read: Callable[[], Iterator[ShardValues]]


@dataclass(frozen=True)
class Matches:
    """Samples of a side `b` whose value a side `a` has too, in b's order; Arrow arrays and places of `n` samples.

    Attributes:
        values: in common.
        a: where `a` has the value first.
        b: where the samples are.
        attached_a: what is attached to the sample of `a`.
        attached_b: what is attached to that of `b`.
    """

    values: pa.Array
    a: SampleRows
    b: SampleRows
    attached_a: pa.Array
    attached_b: pa.Array

    def __len__(self) -> int:
        return len(self.values)


def match_values(a: Side, b: Side) -> Matches:
    """Scan the smaller side for hashes, the larger for candidates, the smaller again for the values themselves.

    Raises whatever reading a side raises.
    """
    small, large = (a, b) if a.num_samples <= b.num_samples else (b, a)
    candidates = _read_hits(large, _all_hashes(small))
    confirmed = _read_hits(small, np.unique(candidates.column("hash").to_numpy()))
    first, second = (confirmed, candidates) if small is a else (candidates, confirmed)
    del candidates, confirmed  # each is released as soon as what is left of it was copied
    # The place of the first that is equal: a value may occur more than once on either side.
    places = pc.index_in(second.column("value"), value_set=first.column("value"))
    first = first.select(["shard", "row", "attached"]).take(places.drop_null())
    if places.null_count:
        second = second.filter(places.is_valid())
    return Matches(
        second.column("value"), _places(first), _places(second), first.column("attached"), second.column("attached")
    )


def hash_values(values: pa.Array) -> Integers:
    """Return a hash of each value: `int64[n]`."""
    if pa.types.is_fixed_size_binary(values.type):
        # Digests are hashes already.
        words = np.frombuffer(values.buffers()[1] or b"", np.int64)[::2]
        return words[values.offset : values.offset + len(values)]
    # Python's own hash: keyed anew in every process, so nobody can prepare keys that meet.
    return np.fromiter(map(hash, values.to_pylist()), np.int64, len(values))


def _all_hashes(side: Side) -> Integers:
    hashes = np.empty(side.num_samples, np.int64)
    stop = 0
    for each in side.read():
        start, stop = stop, stop + len(each.rows)
        hashes[start:stop] = hash_values(each.values)
    hashes = hashes[:stop]
    hashes.sort()
    return hashes


def _read_hits(side: Side, hashes: Integers) -> pa.RecordBatch:
    """Return the samples whose hash is one of `hashes`, which ascend: value, hash, shard, row, attached."""
    found = []
    for each in side.read() if len(hashes) else ():
        own = hash_values(each.values)
        hits = np.flatnonzero(_is_in(own, hashes))
        if len(hits):
            columns = {
                "value": _widened(take_keys(each.values, hits)),
                "hash": own[hits],
                "shard": np.full(len(hits), each.shard),
                "row": each.rows[hits],
                "attached": _widened(take_keys(each.read_attached(), hits)),
            }
            found.append(pa.RecordBatch.from_pydict(columns))
    return pa.concat_batches(found) if found else _NONE


_NONE = pa.RecordBatch.from_pydict(
    {"value": pa.array([], pa.large_string()), **dict.fromkeys(("hash", "shard", "row"), np.empty(0, np.int64)),
     "attached": pa.nulls(0)}
)  # fmt: skip


def _is_in(values: Integers, ordered: Integers) -> Flags:
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.asarray(ordered[places] == values, np.bool_)


def _widened(values: pa.Array) -> pa.Array:
    """Return strings with offsets of 64 bits: those of all shards together may be larger than 2 GiB."""
    is_text = not (pa.types.is_fixed_size_binary(values.type) or pa.types.is_null(values.type))
    return values.cast(pa.large_string()) if is_text else values


def _places(batch: pa.RecordBatch) -> SampleRows:
    return SampleRows(batch.column("shard").to_numpy(), batch.column("row").to_numpy())
