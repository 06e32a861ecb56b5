"""Which keys two splits have in common.

Both are read shard by shard, never all at once: what is held per sample is a hash of eight bytes, of the smaller of
the two only. Keys that meet by their hash are compared as they are, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.keyed import Integers
from datasvc.repository import Objects
from datasvc.shards.deletions import Flags
from datasvc.shards.keys import Places, ShardKeys, SplitKeys, take_keys
from datasvc.shards.table import ShardTable


@dataclass(frozen=True)
class CommonKeys:
    """Samples of two splits, a and b, that share their key, in b's order.

    Attributes:
        keys: Arrow array of `n` keys.
        a: where the first split has them.
        b: where the second has them.
        equal: `bool[n]`, whether the two samples are equal.
    """

    keys: pa.Array
    a: Places
    b: Places
    equal: Flags

    def __len__(self) -> int:
        return len(self.a)


def find_common_keys(objects: Objects, a: ShardTable, b: ShardTable) -> CommonKeys:
    """Return the keys that live samples of both splits have. Raises as `match_keys`."""
    return match_keys(SplitKeys(objects, a), SplitKeys(objects, b))


def match_keys(a: SplitKeys, b: SplitKeys) -> CommonKeys:
    """Return the keys that are in both.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a sample index, or a shard without one, cannot be read.
    """
    matches = _match(a, b) if a.num_samples <= b.num_samples else _swapped(_match(b, a))
    order = np.lexsort((matches.b.rows, matches.b.shards))
    return CommonKeys(matches.keys.take(pa.array(order)), matches.a[order], matches.b[order], matches.equal[order])


def first_keys(keys: pa.Array, count: int = 10) -> str:
    """Return the first of `keys` and how many there are beside, for a message."""
    named = ", ".join(repr(key) for key in keys[:count].to_pylist())
    return f"{named} and {len(keys) - count} more" if len(keys) > count else named


def _match(small: SplitKeys, large: SplitKeys) -> CommonKeys:
    """Scan the smaller side for hashes, the larger for candidates, the smaller again for the keys themselves."""
    candidates = _Candidates(_all_hashes(small), large)
    found = [candidates.match(each) for each in small] if len(candidates) else []
    if not found:
        nowhere = Places(np.empty(0, np.int64), np.empty(0, np.int64))
        return CommonKeys(pa.array([], pa.large_string()), nowhere, nowhere, np.empty(0, np.bool_))
    return CommonKeys(
        pa.concat_arrays([each.keys for each in found]),
        _joined([each.a for each in found]),
        _joined([each.b for each in found]),
        np.concatenate([each.equal for each in found]),
    )


class _Candidates:
    """The samples of the larger side whose key has the hash of some key of the smaller side, sorted by hash."""

    def __init__(self, wanted: Integers, side: SplitKeys) -> None:
        hashes, keys, digests, shards, rows = [], [], [], [], []
        for each in side:
            own = hash_keys(each.keys)
            hits = np.flatnonzero(is_in(own, wanted))
            if len(hits):
                hashes.append(own[hits])
                keys.append(take_keys(each.keys, hits).cast(pa.large_string()))
                digests.append(each.read_digests()[hits])
                shards.append(np.full(len(hits), each.shard))
                rows.append(each.rows[hits])
        if hashes:
            joined = np.concatenate(hashes)
            order = np.argsort(joined, kind="stable")
            self._hashes = joined[order]
            self._keys = pa.concat_arrays(keys).take(pa.array(order))
            self._digests = np.concatenate(digests)[order]
            self._places = Places(np.concatenate(shards), np.concatenate(rows))[order]
        self._count = sum(map(len, hashes))

    def __len__(self) -> int:
        return self._count

    def match(self, each: ShardKeys) -> CommonKeys:
        """Return the keys that a shard of the smaller side, as `a`, shares with the candidates, as `b`."""
        own = hash_keys(each.keys)
        first, stop = (np.searchsorted(self._hashes, own, side) for side in ("left", "right"))
        # Keys of one hash stand side by side: almost always one, but two keys may share their hash.
        counts = stop - first
        mine = np.repeat(np.arange(len(own)), counts)
        theirs = np.repeat(first - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) + np.arange(counts.sum())
        keys = each.keys.take(pa.array(mine)).cast(pa.large_string())
        same = pc.equal(keys, self._keys.take(pa.array(theirs))).to_numpy(zero_copy_only=False)
        mine, theirs = mine[same], theirs[same]
        digests = each.read_digests()[mine] if len(mine) else np.empty(0, self._digests.dtype)
        return CommonKeys(
            keys.filter(pa.array(same)),
            Places(np.full(len(mine), each.shard), each.rows[mine]),
            self._places[theirs],
            digests == self._digests[theirs],
        )


def _all_hashes(side: SplitKeys) -> Integers:
    hashes = np.empty(side.num_samples, np.int64)
    start = 0
    for each in side:
        hashes[start : start + len(each.rows)] = hash_keys(each.keys)
        start += len(each.rows)
    hashes.sort()
    return hashes


def hash_keys(keys: pa.Array) -> Integers:
    """Return a hash of each key: `int64[n]`."""
    # Python's own hash: keyed anew in every process, so nobody can prepare keys that meet.
    return np.fromiter(map(hash, keys.to_pylist()), np.int64, len(keys))


def is_in(values: Integers, ordered: Integers) -> Flags:
    """Return which of `values` are among `ordered`, which ascend: `bool[n]`."""
    if not len(ordered):
        return np.zeros(len(values), np.bool_)
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.asarray(ordered[places] == values, np.bool_)


def _joined(places: Sequence[Places]) -> Places:
    return Places(np.concatenate([each.shards for each in places]), np.concatenate([each.rows for each in places]))


def _swapped(common: CommonKeys) -> CommonKeys:
    return CommonKeys(common.keys, common.b, common.a, common.equal)
