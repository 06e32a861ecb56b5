"""Reads the keys of samples by their places: shard and row. `batch.keys` and replays use it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.shards import Split
from datasvc.shards.format.overlaid_shard import read_index
from datasvc.shards.format.schema import KEY
from datasvc.shards.format.shard_stores import open_listed_shard
from datasvc.shards.versions.samples import Sample

_MAX_SHARDS: Final = 64  # whose keys are kept


class SampleKeys:
    """Keys of the samples of some splits, from their sample indexes; the newest are kept."""

    def __init__(self, splits: Sequence[Split]) -> None:
        self.splits = tuple(splits)
        self._kept: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"splits": self.splits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["splits"])  # type: ignore[misc]  # a lock cannot be pickled

    def read(self, sources: Integers, shards: Integers, rows: Integers) -> list[str]:
        """Return the key of each sample.

        Args:
            sources: `int64[n]`, index of each sample's split.
            shards: `int64[n]`, index of its shard in the shard table of the split.
            rows: `int64[n]`, its row in the shard's file.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: a sample index, or a shard without one, cannot be read.
        """
        keys = [""] * len(rows)
        for source, shard in sorted(set(zip(sources.tolist(), shards.tolist(), strict=True))):
            stored = self._keys_of(source, shard)
            for index in np.flatnonzero((sources == source) & (shards == shard)).tolist():
                keys[index] = str(stored[int(rows[index])].as_py())
        return keys

    def _keys_of(self, source: int, shard: int) -> Any:
        with self._lock:
            if (source, shard) in self._kept:
                self._kept.move_to_end((source, shard))
                return self._kept[source, shard]
        split = self.splits[source]
        index = read_index(split.repository.objects, split.table, shard)
        keys: Any
        if index is not None:
            keys = index.table.column(KEY)
        else:  # written before sample indexes existed
            info = split.table.shard(shard)
            keys = open_listed_shard(split.origin, split.repository.objects, split.table, shard).column(KEY)
            split.origin.release_shard(info)
        with self._lock:
            self._kept[source, shard] = keys
            while len(self._kept) > _MAX_SHARDS:
                self._kept.popitem(last=False)
        return keys


@dataclass(frozen=True, eq=False)
class BatchPlaces:
    """Places of the samples of a batch; for the arrays, see `SampleKeys.read`."""

    reader: SampleKeys
    sources: Integers
    shards: Integers
    rows: Integers

    def keys(self) -> list[str]:
        """Return the key of each sample. Raises the errors of `SampleKeys.read`."""
        return self.reader.read(self.sources, self.shards, self.rows)

    def sample(self, index: int) -> Sample:
        """Return the stored sample at an index of the batch. For errors, see `Split.__getitem__`."""
        split, shard = self.reader.splits[int(self.sources[index])], int(self.shards[index])
        counts, row = split.table.samples_per_shard, self.rows[index : index + 1]
        if split.table.deleted_per_shard[shard]:
            row = np.searchsorted(split.deletions.kept_rows(shard), row)
        return split[int(counts[:shard].sum() + row[0])]
