"""What a training run will ask of caches, peers and origin, said before it starts. Pure.

The first epochs are replayed with the rule of the real cache (see `replay`), all nodes at one pace and shards owned
evenly. Of a large data set every n-th shard is replayed, with as much less budget: caches keep their hit ratio
under such sampling (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from datasvc.cache.catalogue.next_use import Uses, plan_uses
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.forecast.replay import EpochTraffic, replay
from datasvc.cache.forecast.workload import Rates, Workload
from datasvc.cache.prefetch.window_budget import check_window, choose_ahead_bytes, window_bytes
from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers, derive_keys, uniform

_EPOCHS: Final = 6
_STEADY_EPOCHS: Final = 2  # the last of them
_MAX_SHARDS: Final = 30_000  # some seconds
_OWNERS: Final = 48  # purpose of keys


@dataclass(frozen=True)
class EpochForecast:
    """What one epoch moves, over all nodes.

    Attributes:
        used_bytes: of the shards that all nodes need.
        hit_bytes: of these, what their caches have.
        origin_bytes: from the origin.
        peer_bytes: from node to node.
        origin_rate: bytes per second wanted from the origin, for all nodes; None without a rate of samples.
        peer_rate: bytes per second that each node wants from the others; None without a rate of samples.
        fed_samples_per_second: what each node can train at most with the bandwidths given; None: they set no limit.
        starves: whether that is less than what it would train; None without a rate of samples or any bandwidth.
    """

    used_bytes: int
    hit_bytes: int
    origin_bytes: int
    peer_bytes: int
    origin_rate: float | None
    peer_rate: float | None
    fed_samples_per_second: float | None
    starves: bool | None


@dataclass(frozen=True)
class Forecast:
    """What a run will ask for.

    Attributes:
        num_samples: of the data set.
        num_shards: of the data set.
        data_bytes: of all shards.
        budget_bytes: of each node.
        window_bytes: what must be resident at once on a node.
        resident_bytes: what a node holds after the first epochs, in the mean.
        first_epoch: with empty caches.
        later_epochs: each of those after some epochs.
    """

    num_samples: int
    num_shards: int
    data_bytes: int
    budget_bytes: int
    window_bytes: int
    resident_bytes: int
    first_epoch: EpochForecast
    later_epochs: EpochForecast


def forecast(
    samples_per_shard: Integers, bytes_per_shard: Integers, budget_bytes: int, shape: Workload, rates: Rates
) -> Forecast:
    """Return what a run will ask for.

    Args:
        samples_per_shard: `int64[num_shards]`, as for `AccessOrder`.
        bytes_per_shard: `int64[num_shards]`.
        budget_bytes: of each node's cache.
        shape: how the run uses the data set.
        rates: what it needs and gets.

    Raises:
        CacheFullError: the window does not fit into the budget; says the number.
        ConfigError: there is no sample.
    """
    num_samples, data_bytes = int(samples_per_shard.sum()), int(bytes_per_shard.sum())
    if not num_samples:
        raise ConfigError("there is nothing to plan: the data set has no samples")
    window = window_bytes(samples_per_shard, bytes_per_shard, shape.order, shape.run)
    # At an epoch's boundary the last shards of one and the first of the next are needed together.
    window = min(2 * window, int(footprint(bytes_per_shard).sum()))
    check_window(window, budget_bytes, "this order")
    epochs, resident_bytes = _replay_sample(samples_per_shard, bytes_per_shard, budget_bytes, shape)
    return Forecast(
        num_samples=num_samples,
        num_shards=len(samples_per_shard),
        data_bytes=data_bytes,
        budget_bytes=budget_bytes,
        window_bytes=window,
        resident_bytes=resident_bytes,
        first_epoch=_with_rates(epochs[0], num_samples, shape.nodes, rates),
        later_epochs=_with_rates(_mean(epochs[-_STEADY_EPOCHS:]), num_samples, shape.nodes, rates),
    )


def _replay_sample(
    samples_per_shard: Integers, bytes_per_shard: Integers, budget_bytes: int, shape: Workload
) -> tuple[list[EpochTraffic], int]:
    """Return what each of the first epochs moves, and what a node holds after them."""
    chosen = _choose_shards(samples_per_shard)
    uses = plan_uses(samples_per_shard, bytes_per_shard, shape.order, range(_EPOCHS), chosen=chosen)
    nodes = _nodes_of(uses, shape)
    owners = _draw_owners(chosen, shape) if shape.has_peers and shape.nodes > 1 else None
    used, sample_bytes = bytes_per_shard[samples_per_shard > 0], int(bytes_per_shard[chosen].sum())
    # Files take whole blocks of the disk, shards in a replay their bytes.
    budget = int(budget_bytes * sample_bytes / int(footprint(used).sum()))
    # A small window may, by chance, take a larger share of the sample.
    least = max(_most_held(each, bytes_per_shard) for each in nodes)
    done = replay(
        nodes,
        bytes_per_shard,
        max(budget, least),
        ahead_bytes=choose_ahead_bytes(bytes_per_shard, budget_bytes),
        owners=owners,
    )
    epochs = done.epochs
    if not shape.splits_lanes:
        owned = 1.0 if owners is None else int(bytes_per_shard[chosen & (owners == 0)].sum()) / sample_bytes
        epochs = [_of_all_nodes(epoch, shape.nodes, owned, has_peers=owners is not None) for epoch in epochs]
    scale = int(used.sum()) / sample_bytes
    return [_scaled(epoch, scale) for epoch in epochs], int(np.mean(done.resident_bytes) * scale)


def _choose_shards(samples_per_shard: Integers) -> npt.NDArray[np.bool_]:
    """Return which shards to replay, `bool[num_shards]`: all where that does not take long."""
    occupied = np.flatnonzero(samples_per_shard)
    chosen = np.zeros(len(samples_per_shard), bool)
    chosen[occupied[:: -(-len(occupied) // _MAX_SHARDS)]] = True
    return chosen


def _nodes_of(uses: Uses, shape: Workload) -> list[Uses]:
    """Return the uses of each node, or of one that stands for all where they all read the same."""
    if not shape.splits_lanes:
        return [uses]
    node_of = uses.lanes // (shape.order.lanes // shape.nodes)
    return [uses.only(node_of == node) for node in range(shape.nodes)]


def _of_all_nodes(traffic: EpochTraffic, nodes: int, owned: float, *, has_peers: bool) -> EpochTraffic:
    """Return what nodes that all read the same move, from what one of them moves that owns that share of the data."""
    if not has_peers:
        return _scaled(traffic, nodes)
    used = nodes * traffic.used_bytes
    origin = traffic.origin_bytes / owned
    # Of a few shards a node may own all.
    others = traffic.peer_bytes / (1 - owned) if owned < 1 else origin
    peers = (nodes - 1) * others
    return EpochTraffic(used, round(used - origin - peers), round(origin), round(peers))


def _draw_owners(chosen: npt.NDArray[np.bool_], shape: Workload) -> Integers:
    """Return the owner of each shard, `int64[num_shards]`: to each node as many of those that are replayed."""
    key = derive_keys(shape.order.seed, 0, _OWNERS, 1)[0]
    numbers = np.flatnonzero(chosen)
    owners = np.zeros(len(chosen), np.int64)
    owners[numbers[np.argsort(uniform(key, numbers, 0))]] = np.arange(len(numbers)) * shape.nodes // len(numbers)
    return owners


def _most_held(uses: Uses, bytes_per_shard: Integers) -> int:
    """Return the most bytes that are in use at one moment."""
    sizes = bytes_per_shard[uses.shards]
    # At one moment the uses that stop give room before others begin.
    by_time = np.lexsort((np.repeat([0, 1], len(uses)), np.concatenate([uses.stop, uses.first])))
    return int(np.cumsum(np.concatenate([-sizes, sizes])[by_time]).max(initial=0))


def _with_rates(traffic: EpochTraffic, num_samples: int, nodes: int, rates: Rates) -> EpochForecast:
    per_sample = {"origin": traffic.origin_bytes / num_samples * nodes, "peers": traffic.peer_bytes / num_samples}
    limits = {"origin": rates.origin, "peers": rates.peers}
    given = {name: rate for name, rate in limits.items() if rate is not None}
    fed = min((rate / per_sample[name] for name, rate in given.items() if per_sample[name]), default=None)
    wanted = rates.samples_per_second
    return EpochForecast(
        used_bytes=traffic.used_bytes,
        hit_bytes=traffic.hit_bytes,
        origin_bytes=traffic.origin_bytes,
        peer_bytes=traffic.peer_bytes,
        origin_rate=None if wanted is None else wanted * per_sample["origin"],
        peer_rate=None if wanted is None else wanted * per_sample["peers"],
        fed_samples_per_second=fed,
        starves=None if wanted is None or not given else fed is not None and fed < wanted,
    )


def _scaled(traffic: EpochTraffic, scale: float) -> EpochTraffic:
    counted = (traffic.used_bytes, traffic.hit_bytes, traffic.origin_bytes, traffic.peer_bytes)
    return EpochTraffic(*(round(each * scale) for each in counted))


def _mean(epochs: list[EpochTraffic]) -> EpochTraffic:
    total = EpochTraffic()
    for each in epochs:
        total.used_bytes += each.used_bytes
        total.hit_bytes += each.hit_bytes
        total.origin_bytes += each.origin_bytes
        total.peer_bytes += each.peer_bytes
    return _scaled(total, 1 / len(epochs))
