"""Derives the lanes and the block of `shuffle="windowed"`, equal on all ranks, or takes them from a state.

Loaders and samplers use this if their caller gives the shuffle without an `OrderConfig`. Beside it are the shard
stores through which a loader with `cache=` reads its splits in an order, if the cache has the space for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from datasvc.cache import Cache
from datasvc.cache.cache import use_cache
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.cache.prefetch.window_budget import BatchesAtOnce, Need, check_window, choose_windowed, window_bytes
from datasvc.keyed_random import Integers
from datasvc.loaders.core.mixture import Mixture, clock_steps, most_of, name_of, split_orders, splits_of
from datasvc.loaders.ranks.data_ranks import DataRanks, agree, default_store
from datasvc.order import OrderConfig, lanes_of_rank
from datasvc.shards import Split

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


_LOG = logging.getLogger(__name__)
# A loader's default. A loader with a smaller `prefetch` derives its order with it too, to have the same order.
_MIN_PREFETCH: Final = 2


def derive_windowed(
    samples: Split | Mixture,
    cache: Cache | str | Path | None,
    ranks: DataRanks,
    batches: BatchesAtOnce,
    *,
    seed: int,
    find_store: Callable[[], Store | None] = default_store,
) -> OrderConfig:
    """Return a windowed order that suits the sizes of the shards, and the cache if any; see `choose_windowed`.

    The budgets of several nodes may differ, so all ranks take the choice of data rank 0, if there is a process group.

    Raises:
        ConfigError, CorruptDataError, UnavailableError: the cache cannot be opened, here or on data rank 0, or data
            rank 0 does not report.
    """
    batches = replace(batches, prefetch=max(batches.prefetch, _MIN_PREFETCH))

    def choose(budget_bytes: int | None) -> OrderConfig:
        return choose_windowed(
            samples_per_shard(samples), batches, seed=seed, need=window_need(samples), budget_bytes=budget_bytes
        )

    if cache is None:
        return choose(None)  # depends only on the data, so it is the same on all ranks

    def choose_for_cache() -> OrderConfig:
        with use_cache(cache) as opened:
            budget_bytes = find_available_bytes(samples, opened)
        return choose(budget_bytes)

    store = find_store() if ranks.world_size > 1 else None
    if store is not None:
        # Ranks that create the same loader find each other's decision by this text.
        question = repr([[split.digest for split in splits_of(samples)], seed, batches])
        order = _choose_once(choose_for_cache, question, seed=seed, is_first=ranks.rank == 0, store=store)
    else:
        order = choose_for_cache()
        if ranks.world_size > 1:
            _LOG.warning(
                "each of %d ranks derives lanes=%d, block=%d from the budget of its own cache, because "
                "torch.distributed has no process group: give all nodes the same budget, or give "
                "order=OrderConfig(...)",
                ranks.world_size,
                order.lanes,
                order.block,
            )
    names = " + ".join(map(name_of, splits_of(samples)))
    _LOG.info("shuffle='windowed' of %s is lanes=%d, block=%d", names, order.lanes, order.block)
    return order


def _choose_once(
    choose: Callable[[], OrderConfig], question: str, *, seed: int, is_first: bool, store: Store
) -> OrderConfig:
    """Return the order that data rank 0 chooses, on every rank; see `agree` for the other arguments."""

    def choose_lanes() -> str:
        # `agree` reports errors of the cache too; otherwise the other ranks would wait for an answer.
        chosen = choose()
        return json.dumps([chosen.lanes, chosen.block])

    name = hashlib.sha256(f"windowed {question}".encode()).hexdigest()
    lanes, block = json.loads(agree(name, choose_lanes, is_first=is_first, store=store))
    return OrderConfig(seed, "windowed", lanes, block)


def order_of_state(state: Mapping[str, Any], derived: OrderConfig) -> OrderConfig:
    """Return a derived order with the lanes and block of a loader state.

    The order is unchanged if the state is not valid or is of another shuffle. `restore_state` then reports the error.
    """
    lanes, block = state.get("lanes"), state.get("block")
    if state.get("shuffle") != "windowed" or type(lanes) is not int or type(block) is not int:
        return derived
    if lanes <= 0 or block <= 0:
        return derived
    return replace(derived, lanes=lanes, block=block)


# A window is the set of shards that consecutive positions of an order need at the same time. The cache's budget must
# hold the windows of all splits. Otherwise creating the loader fails, before anything is fetched.


def follow_splits(
    samples: Split | Mixture,
    order: OrderConfig,
    cache: Cache | str | Path,
    ranks: DataRanks,
    *,
    batches: BatchesAtOnce,
    has_lanes: bool = True,
) -> list[PrefetchingShardStore]:
    """Return a prefetching shard store for each split, for one rank of a loader.

    For the arguments see `Loader`; `batches` are those in progress on all ranks, and `has_lanes` whether a rank may
    read lanes of its own. If `cache` is a folder, the cache is open only during this call. Each store opens a cache
    job of its own.

    Raises:
        CacheFullError: the cache's budget cannot hold the windows that the order needs; the message has both sizes,
            their parts, and values that fit.
        ConfigError, CorruptDataError, UnavailableError: the cache cannot be opened, see `Cache`.
    """
    with use_cache(cache) as opened:
        available_bytes = find_available_bytes(samples, opened)
        need = window_need(samples)
        check_window(order, batches, need, available_bytes, samples_per_shard(samples), f"the order of {samples!r}")
        # Consecutive positions of a mixture or of groups have no fixed relation to lanes: every rank reads all lanes.
        lanes = (
            None
            if isinstance(samples, Mixture) or not has_lanes or samples.table.grouping is not None
            else lanes_of_rank(batches.global_batch, rank=ranks.rank, world_size=ranks.world_size, lanes=order.lanes)
        )
        return [
            PrefetchingShardStore(
                opened, split, split_order, lanes, num_ranks=ranks.world_size, step_bytes=step_bytes
            )
            for split, split_order, step_bytes in zip(
                splits_of(samples), split_orders(samples, order), clock_steps(samples), strict=True
            )
        ]


def window_need(samples: Split | Mixture) -> Need:
    """Return the function `need(order, batches)`: bytes of all shards that batches in progress need at once."""
    tables = [split.table for split in splits_of(samples)]

    def need(order: OrderConfig, batches: BatchesAtOnce) -> int:
        is_mixture = isinstance(samples, Mixture)
        # Padding repeats samples from the start of the epoch, so their shards are needed too. In two cases they are
        # counted already: a split without a shuffle begins its next epoch with them, and a global shuffle needs all.
        padding = batches.global_batch if batches.tail == "pad" and (is_mixture or order.shuffle == "windowed") else 0
        run_positions, skipped = batches.run, batches.skipped  # the run: the positions of the batches in progress
        if is_mixture:
            # `skipped` counts positions at the end of a split's epoch. A mixture skips positions anywhere in the
            # epochs of its splits, so count them as a part of the run.
            run_positions, skipped = run_positions + skipped, 0
        runs = most_of(samples, run_positions)  # the largest number of samples that a split has in the run
        needed_bytes = 0
        for table, run, padding_run in zip(tables, runs, most_of(samples, padding), strict=True):
            # With weights, the fewest samples of each shard, because then a window has the most shards.
            counts, sizes = table.least_per_epoch, table.bytes_per_shard
            if run and table.grouping is not None:
                # All of the blocks in which the run begins or ends. The last block of an epoch has up to two spans.
                span = table.grouping.span
                run, padding_run = run + 3 * span, padding_run and padding_run + 2 * span  # noqa: PLW2901
            if run:
                window = window_bytes(counts, sizes, order, run, skipped=skipped)
                padded = window_bytes(counts, sizes, order, padding_run) if padding_run else 0
                all_bytes = window_bytes(counts, sizes, OrderConfig(), run)  # all shards: for a global shuffle
                needed_bytes += min(window + padded, all_bytes)
        return needed_bytes

    return need


def find_available_bytes(samples: Split | Mixture, cache: Cache) -> int:
    """Return the bytes that a cache has for `samples`: its budget without the pinned bytes of other objects."""
    return cache.available_bytes({info.digest for split in splits_of(samples) for info in split.table.shards()})


def samples_per_shard(samples: Split | Mixture) -> Integers:
    """Return the number of samples in each shard of all splits: `int64[num_shards]`."""
    return np.concatenate([split.table.positions_per_shard for split in splits_of(samples)])
