"""Join of two splits on their sample keys, with a comparison of the matched samples.

Append, merge and diff use this join. `matching` finds the pairs of samples with equal keys. The two samples of a pair
are equal if they have the same sample digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.keyed_random import Integers
from datasvc.repository import Objects
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.deletions import Flags
from datasvc.shards.versions.keys import SampleRows, SplitKeys
from datasvc.shards.versions.matching import ShardValues, Side, match_values


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
    matches = match_values(_side(a), _side(b))
    # Without matches, the arrays of attached values (here sample digests) have the type null and cannot be compared.
    if not len(matches):
        return CommonKeys(matches.values, matches.a, matches.b, np.empty(0, np.bool_))
    equal = pc.equal(matches.attached_a, matches.attached_b).to_numpy(zero_copy_only=False)
    return CommonKeys(matches.values, matches.a, matches.b, equal)


def first_keys(keys: list[str] | pa.Array, count: int = 10) -> str:
    """Return the first `count` keys and the number of further ones, as text for a message."""
    listed = ", ".join(map(repr, keys[:count] if isinstance(keys, list) else keys[:count].to_pylist()))
    return f"{listed} and {len(keys) - count} more" if len(keys) > count else listed


def _side(split: SplitKeys) -> Side:
    """Return `split` as one side of a match by key, with sample digests as the attached values."""

    def read() -> Iterator[ShardValues]:
        return (ShardValues(shard.shard, shard.rows, shard.keys, shard.read_digests) for shard in split)

    return Side(split.num_samples, read)
