"""Ray Data: the samples of a split as a `ray.data.Dataset`, in the order of the shard table or in an access order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from datasvc.cache.cache import use_cache
from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.keyed_random import Integers
from datasvc.order import OrderConfig
from datasvc.shards import ShardStore, Split
from datasvc.shards.format.shard_stores import open_listed_shard
from datasvc.shards.versions.samples import choose_columns, read_columns

with explain_missing("datasvc.integrations.ray_data"):
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

__all__ = ["SplitDatasource"]

_BLOCK_BYTES: Final = 16 << 20


class SplitDatasource(Datasource):
    """Reads a split: `ray.data.read_datasource(SplitDatasource(repo.dataset("digits@1")["train"]))`.

    A read task has a range of shards, or with an order a range of positions. Every node opens the repository and its
    cache itself, so both must be the same place on all of them. Ray Data may change the order of the blocks, unless
    `DataContext.get_current().execution_options.preserve_order` is True.

    Args:
        split: a split of a data-set version.
        columns: names of the columns; None: all, images as encoded bytes.
        order: access order, such as `OrderConfig(seed=1)`; None: the order of the shard table. A global order reads
            every shard in every task: for a remote repository give a cache too, or a windowed order.
        epoch: epoch of the order.
        start: first position to read, to continue an epoch.
        cache: folder of the cache of each node; None: read a local repository in place, a remote one into memory.

    Raises:
        ConfigError: `start` is out of range, or the epoch is negative.
        NotFoundError: there is no such column.
    """

    def __init__(
        self,
        split: Split,
        *,
        columns: Sequence[str] | None = None,
        order: OrderConfig | None = None,
        epoch: int = 0,
        start: int = 0,
        cache: str | Path | None = None,
    ) -> None:
        super().__init__()
        if split.packs is not None:
            raise ConfigError(f"{split!r} is packed, which only a TokenLoader reads; give the split without packs")
        if not 0 <= start <= len(split):
            raise ConfigError(f"start is {start}; expected a position in 0..{len(split)} of {split!r}")
        names = split.table.sample_schema.names if columns is None else columns
        self._schema = choose_columns(split.table.sample_schema, names)
        self._split, self._start, self._cache = split, start, cache
        # Without a shuffle, positions are the numbers of the samples in the order of the shard table.
        self._order, self._epoch = order or OrderConfig(shuffle=None), epoch
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch}; expected 0 or more")
        self._sample_bytes = int(split.table.bytes_per_shard.sum()) // max(len(split), 1) + 1

    def get_name(self) -> str:
        """Return the split, which Ray shows, such as "digits@1/train"."""
        return f"{self._split.dataset}/{self._split.name}"

    def estimate_inmemory_data_size(self) -> int:
        """Return the stored size of the samples to read, in bytes."""
        return (len(self._split) - self._start) * self._sample_bytes

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,  # noqa: ARG002
    ) -> list[Any]:
        """Return the tasks, `parallelism` at most, in the order of their samples."""
        tasks, size = [], max(1, _BLOCK_BYTES // self._sample_bytes)
        for start, stop in pairwise(self._boundaries(parallelism)):
            blocks = [range(at, min(at + size, stop)) for at in range(start, stop, size)]
            read = partial(_read, self._split, self._order, self._epoch, self._schema, blocks, self._cache)
            metadata = BlockMetadata(
                num_rows=stop - start,
                size_bytes=(stop - start) * self._sample_bytes,
                input_files=None,
                exec_stats=None,
            )
            tasks.append(ReadTask(read, metadata, self._schema, per_task_row_limit))
        return tasks

    def _boundaries(self, parallelism: int) -> list[int]:
        """Return the positions at which tasks begin and end; without a shuffle no two of them read one shard."""
        stop = len(self._split)
        if self._order.shuffle is None:
            ends = np.cumsum(self._split.table.samples_per_shard)
            ends = np.unique(ends[ends > self._start])
        else:
            ends = np.arange(self._start + 1, stop + 1)
        parts = np.array_split(ends, min(max(parallelism, 1), len(ends))) if len(ends) else []
        return [self._start, *(int(part[-1]) for part in parts)]


def _read(
    split: Split, order: OrderConfig, epoch: int, schema: pa.Schema, blocks: list[range], cache: str | Path | None
) -> Iterator[pa.Table]:
    """Yield the samples of ranges of positions as tables, in the order of the positions."""
    # Made here: it has arrays over all shards, which need not travel with every task.
    access_order = split.access_order(order, epoch)
    with ExitStack() as stack:
        store: ShardStore = split.origin
        if cache is not None:
            store = stack.enter_context(use_cache(cache)).shards(split.repository)
        for positions in blocks:
            yield _read_block(split, store, schema, *access_order.locate(positions))


def _read_block(split: Split, store: ShardStore, schema: pa.Schema, shards: Integers, rows: Integers) -> pa.Table:
    by_shard = np.argsort(shards, kind="stable")
    parts, objects = [], store.objects(split.table)
    for number in np.unique(shards).tolist():
        shard = open_listed_shard(store, objects, split.table, number)
        try:
            parts.append(read_columns([(shard, split.stored_rows(number, rows[shards == number]))], schema))
        finally:
            store.release_shard(split.table.shard(number))
    # The samples are in the order of the shards: put each at its position.
    return pa.concat_tables(parts).take(pa.array(np.argsort(by_shard, kind="stable")))
