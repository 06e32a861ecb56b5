"""Derives the lanes and the block of `shuffle="windowed"`, equal on all ranks, or takes them from a state.

Loaders and samplers use this module if their caller gives the shuffle without an `OrderConfig`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from datasvc.cache import Cache
from datasvc.cache.cache import use_cache
from datasvc.cache.prefetch.window_budget import BatchesAtOnce, choose_windowed
from datasvc.loaders.core.cached_splits import find_available_bytes, samples_per_shard, window_need
from datasvc.loaders.core.mixture import Mixture, name_of, splits_of
from datasvc.loaders.ranks.data_ranks import DataRanks, agree, default_store
from datasvc.order import OrderConfig
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

    Args:
        samples: the split or mixture to read.
        cache: cache of the node, or its folder.
        ranks: data rank of this process.
        batches: batches in progress.
        seed: seed of the order.
        find_store: function that returns the store of the process group, or None.

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
    if store is None:
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
    else:
        # Ranks that create the same loader find each other's decision by this text.
        question = repr([[split.digest for split in splits_of(samples)], seed, batches])

        def choose_for_all() -> str:
            # `agree` reports errors of the cache too; otherwise the other ranks would wait for an answer.
            chosen = choose_for_cache()
            return json.dumps([chosen.lanes, chosen.block])

        answer = agree(
            hashlib.sha256(f"windowed {question}".encode()).hexdigest(),
            choose_for_all,
            is_first=ranks.rank == 0,
            store=store,
        )
        lanes, block = json.loads(answer)
        order = OrderConfig(seed, "windowed", lanes, block)
    names = " + ".join(map(name_of, splits_of(samples)))
    _LOG.info("shuffle='windowed' of %s is lanes=%d, block=%d", names, order.lanes, order.block)
    return order


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
