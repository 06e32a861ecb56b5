"""Reads a split's samples by number, for `Dataset`.

Each process opens its own shards and cache, because an open shard or cache cannot be pickled.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from datasvc.cache import Cache
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.core.mixture import check_column
from datasvc.shards import Shard, ShardStore, Split
from datasvc.shards.format.shard_stores import open_listed_shard

# A mapped shard uses two file descriptors, and the limit of a process is often 1024.
_MAX_MAPPED_SHARDS: Final = 256
# For shards that are held in memory, and for a cache too small for the split, because open shards are not evicted.
_MAX_COSTLY_SHARDS: Final = 4


@dataclass(frozen=True)
class CacheAddress:
    """Arguments that open the node's cache in any process.

    Attributes:
        folder: folder of the cache.
        tenant: tenant whose quota is used; None: the default tenant.
        peers: other nodes to fetch from before the origin.
    """

    folder: Path
    tenant: str | None = None
    peers: Peers | None = None

    @classmethod
    def of(cls, cache: Cache | str | Path) -> CacheAddress:
        """Return the address of a cache, or of its folder."""
        if isinstance(cache, Cache):
            return cls(cache.folder, cache.tenant, cache.peers)
        return cls(Path(os.path.realpath(os.path.expanduser(cache))))

    def open(self) -> Cache:
        """Open the cache in this process. For errors see `Cache`."""
        options = {} if self.tenant is None else {"tenant": self.tenant}
        return Cache(self.folder, peers=self.peers, **options)


class SampleReader:
    """Reads samples. Only the process that created a reader may use it.

    Without a cache, shards of a local repository are mapped, and shards of a remote one are read into memory.

    Raises:
        ConfigError: the parent process had opened the cache before it forked this process.
        UnavailableError: the cache cannot be opened.
    """

    def __init__(self, split: Split, address: CacheAddress | None) -> None:
        self.pid = os.getpid()
        self.split = split
        self._cache = None if address is None else address.open()
        self._store: ShardStore = split.origin if self._cache is None else self._cache.shards(split.repository)
        self._objects = self._store.objects(split.table)
        # For each shard, the number of the first sample after it.
        self._stops = np.cumsum(split.table.samples_per_shard)
        self._open: OrderedDict[int, Shard] = OrderedDict()  # by index in the shard table, least recently read first
        self._max_open = self._choose_max_open()
        self._lock = threading.Lock()

    def read(self, numbers: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return samples as dicts of Python values. Bytes are copied. A column that a shard lacks is None.

        Args:
            numbers: numbers of samples in range(len(split)), in any order.
            columns: names of the columns to read.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `ShardStore.open_shard`.
        """
        requested = np.asarray(numbers, np.int64)
        shard_indices = np.searchsorted(self._stops, requested, side="right")
        samples: list[dict[str, Any]] = [{} for _ in numbers]
        for shard_index in np.unique(shard_indices).tolist():
            indices = np.flatnonzero(shard_indices == shard_index)
            first_number = int(self._stops[shard_index - 1]) if shard_index else 0
            rows = requested[indices] - first_number
            with self._lock:
                shard = self._open_shard(shard_index)
            # Numbers of samples skip deleted samples, which the file of the shard still contains.
            stored_rows = self.split.stored_rows(shard_index, rows)
            for index, sample in zip(indices.tolist(), _read_rows(shard, stored_rows, columns), strict=True):
                samples[index] = sample
        return samples

    def _open_shard(self, shard_index: int) -> Shard:
        table = self.split.table
        if shard_index in self._open:
            self._open.move_to_end(shard_index)
            return self._open[shard_index]
        while len(self._open) >= self._max_open:
            least_recent, _ = self._open.popitem(last=False)
            self._store.release_shard(table.shard(least_recent))
        self._open[shard_index] = open_listed_shard(self._store, self._objects, table, shard_index)
        return self._open[shard_index]

    def _choose_max_open(self) -> int:
        """Return how many shards may stay open: few if they use memory, or if the cache cannot hold the split."""
        infos = list(self.split.table.shards())
        if self._cache is None:
            # Either all objects of a repository are local files, or none is.
            is_mapped = not infos or self.split.repository.objects.local_path(infos[0].digest) is not None
            return _MAX_MAPPED_SHARDS if is_mapped else _MAX_COSTLY_SHARDS
        available_bytes = self._cache.available_bytes({info.digest for info in infos})
        fits = int(footprint(self.split.table.bytes_per_shard).sum()) <= available_bytes
        return _MAX_MAPPED_SHARDS if fits else _MAX_COSTLY_SHARDS


def reopen(split: Split) -> Split:
    """Return a copy of a split for a forked process, with new store clients, as old ones do not work there."""
    opened: Split = pickle.loads(pickle.dumps(split))  # noqa: S301 - pickled in the same line
    return opened


def check_columns(split: Split, columns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns to read; None stands for all.

    Raises:
        ConfigError: the split lacks a column, or `columns` is empty or a string.
    """
    names = split.table.sample_schema.names
    if columns is None:
        return tuple(names)
    if isinstance(columns, str) or not columns:
        raise ConfigError(f"columns is {columns!r}; expected names, some of {names}")
    for column in columns:
        check_column(split, column)
    return tuple(columns)


def _read_rows(shard: Shard, rows: Integers, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return samples of a shard by the rows in its file; None for a column that the shard lacks."""
    values = [shard.items(name, rows) for name in columns]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
