"""Keys, digests and places (shard and row) of a split's live (not deleted) samples, read from the sample indexes.

Append, merge, diff, delete and the search for duplicates compare or select samples with these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from datasvc.errors import CorruptDataError
from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.repository import Digest, Objects
from datasvc.shards.format.digests import DIGEST_BYTES, digest_batch, has_units
from datasvc.shards.format.reader import Shard, open_shard
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.deletions import Deletions, Flags, load_deletions
from datasvc.shards.versions.labels import relabel_batch


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
        return (self.read(shard) for shard in self.shards.tolist())

    def read(self, shard: int) -> ShardKeys:
        """Return the live samples of one shard, except those in `without`. Raise what `__iter__` raises."""
        rows = self.live_rows(shard)
        digest = self.table.index(shard)
        if digest is None:
            # The shard was written before sample indexes existed, so read keys and digests from the samples.
            opened = self._open(shard)
            keys = take_keys(opened.column(KEY), rows)
            return ShardKeys(shard, rows, keys, lambda: take_keys(self._digest(opened), rows))
        decoded = self.read_index(shard, digest)
        index = decoded.table
        keys = take_keys(index.column("key"), rows)
        is_comparable = not (decoded.hashes_text and any(map(has_units, self.table.sample_schema.types)))
        if self._labels is None and is_comparable:
            return ShardKeys(shard, rows, keys, lambda: take_keys(index.column("sample"), rows))
        # The digests in the index include the stored labels, and in old indexes they are those of the text of a date.
        # For other labels, and to compare with new indexes, compute digests from the samples.
        return ShardKeys(
            shard,
            rows,
            keys,
            lambda: take_keys(self._digest(self._open(shard)), rows),
        )

    def _open(self, shard: int) -> Shard:
        return self.table.check_shard(shard, open_shard(self._objects, self.table.shard(shard)))

    def read_index(self, shard: int, digest: Digest) -> SampleIndex:
        """Return the sample index of a shard; raise CorruptDataError if it has another number of samples."""
        index = SampleIndex.decode(self._objects.read(digest), self._objects.location(digest))
        if index.num_samples != self._stored[shard]:
            raise CorruptDataError(
                f"{self._objects.location(digest)} lists {count_text(index.num_samples, 'sample')}, the shard table "
                f"{self._stored[shard]}: restore both from another copy"
            )
        return index

    def live_rows(self, shard: int) -> Integers:
        """Return the rows in a shard's file that are live and not in `without`: `int64[n]`, ascending."""
        # `self._deletions` reads an object at its first use, so use it only if the shard has deletions.
        live = self._deletions.kept_rows(shard) if self._deleted[shard] else np.arange(self._stored[shard])
        excluded = self._without.get(shard)
        return live if excluded is None else np.setdiff1d(live, excluded, assume_unique=True)

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
