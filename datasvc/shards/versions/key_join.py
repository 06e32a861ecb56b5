"""Which keys two splits have in common, and whether their samples are equal; see `matching`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.repository import Objects
from datasvc.shards.format.digests import DIGEST_BYTES
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.deletions import Flags
from datasvc.shards.versions.keys import SampleRows, ShardKeys, SplitKeys
from datasvc.shards.versions.matching import ShardValues, Side, match_values


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
    a: SampleRows
    b: SampleRows
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
    found = match_values(_side(a), _side(b))
    if not len(found):
        return CommonKeys(found.values, found.a, found.b, np.empty(0, np.bool_))
    equal = pc.equal(found.attached_a, found.attached_b).to_numpy(zero_copy_only=False)
    return CommonKeys(found.values, found.a, found.b, equal)


def first_keys(keys: pa.Array, count: int = 10) -> str:
    """Return the first of `keys` and how many there are beside, for a message."""
    named = ", ".join(repr(key) for key in keys[:count].to_pylist())
    return f"{named} and {len(keys) - count} more" if len(keys) > count else named


def _side(keys: SplitKeys) -> Side:
    return Side(keys.num_samples, lambda: map(_with_digests, keys))


def _with_digests(each: ShardKeys) -> ShardValues:
    def read_digests() -> pa.Array:
        digests = np.ascontiguousarray(each.read_digests())
        return pa.Array.from_buffers(pa.binary(DIGEST_BYTES), len(digests), [None, pa.py_buffer(digests)])

    return ShardValues(each.shard, each.rows, each.keys, read_digests)
