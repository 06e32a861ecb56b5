"""Forecast of the traffic of a training run between caches, peers and origin, before it starts. Pure.

The first epochs are simulated with the eviction policy of the real cache (see `replay`). The simulation assumes that
all nodes read at the same rate, and own equal numbers of shards. Of a large data set, only every n-th shard is
simulated, with a budget reduced in proportion. Such sampling preserves the hit ratio of a cache (Waldspurger et al.,
"Efficient MRC Construction with SHARDS", FAST 2015).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from datasvc.cache.catalogue.next_use import Uses, plan_uses
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.prefetch.window_budget import (
    BatchesAtOnce,
    Need,
    check_window,
    choose_ahead_bytes,
    choose_windowed,
    window_bytes,
)
from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers, derive_keys, uniform
from datasvc.order import OrderConfig, lanes_of_rank
from datasvc.planning.replay import EpochTraffic, replay
from datasvc.shown import Shown, plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Workload:
    """How a run reads a data set.

    Attributes:
        order: parameters of the access order.
        batch_size: samples per rank and step.
        nodes: number of nodes, each with a separate cache.
        ranks_per_node: data-parallel ranks on each node.
        prefetch: batches that each rank prepares in advance, at least 0.
        has_peers: whether nodes read shards from each other.

    Raises:
        ConfigError: a value is out of range.
    """

    order: OrderConfig
    batch_size: int
    nodes: int = 1
    ranks_per_node: int = 1
    prefetch: int = 2
    has_peers: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "nodes", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if self.prefetch < 0:
            raise ConfigError(f"prefetch is {self.prefetch}; expected 0 or more")

    @property
    def batches(self) -> BatchesAtOnce:
        """Batches that all ranks together have in progress at once."""
        return BatchesAtOnce(self.batch_size, self._world_size, self.prefetch)

    @property
    def splits_lanes(self) -> bool:
        """Whether each rank reads separate lanes, so that a node reads only the lanes of its ranks."""
        # Either all ranks have lanes of their own or none has, so rank 0 stands for all.
        rank_lanes = lanes_of_rank(self._global_batch, rank=0, world_size=self._world_size, lanes=self.order.lanes)
        return rank_lanes is not None

    @property
    def _world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self._world_size


@dataclass(frozen=True)
class Rates:
    """Rates that a run needs, and rates that are available; None: unknown.

    Attributes:
        samples_per_second: samples that one node trains per second.
        origin: bytes per second that the origin sends to all nodes together.
        peers: bytes per second that one node receives from the others.

    Raises:
        ConfigError: a rate is not above zero.
    """

    samples_per_second: float | None = None
    origin: float | None = None
    peers: float | None = None

    def __post_init__(self) -> None:
        for name, rate in (("images/s", self.samples_per_second), ("origin", self.origin), ("peers", self.peers)):
            if rate is not None and not rate > 0:
                raise ConfigError(f"the rate {name} is {rate}; expected more than 0")


_EPOCHS: Final = 6  # to simulate
_STEADY_EPOCHS: Final = 2  # the last simulated epochs; their mean stands for all later epochs
MAX_SIMULATED_SHARDS: Final = 30_000
"""Shards that are simulated by default; this takes some seconds."""
_OWNERS: Final = 48  # purpose of the random keys that choose the owners, see `derive_keys`


@dataclass(frozen=True)
class EpochForecast:
    """Traffic of one epoch, over all nodes.

    Attributes:
        used_bytes: bytes of the shards that the nodes read.
        hit_bytes: bytes read from the nodes' own caches.
        origin_bytes: bytes fetched from the origin.
        peer_bytes: bytes fetched from other nodes.
        origin_rate: bytes per second that all nodes need from the origin; None without a sample rate.
        peer_rate: bytes per second that each node needs from the others; None without a sample rate.
        fed_samples_per_second: highest sample rate of a node that the given bandwidths allow; None: no limit.
        starves: whether `fed_samples_per_second` is below the rate that the run needs; None without a sample rate or
            without any bandwidth.
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
class Forecast(Shown):
    """Forecast of a run.

    Attributes:
        data_bytes: size of all shards.
        budget_bytes: budget of each node's cache.
        window_bytes: bytes that must be resident at once on a node.
        resident_bytes: mean resident bytes of a node after the first epochs.
        first_epoch: traffic with empty caches.
        later_epochs: mean traffic of an epoch after the first ones.
    """

    num_samples: int
    num_shards: int
    data_bytes: int
    budget_bytes: int
    window_bytes: int
    resident_bytes: int
    first_epoch: EpochForecast
    later_epochs: EpochForecast

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Plot where the bytes of the first and of later epochs come from; return the axes of matplotlib.

        Args:
            ax: axes to plot into; None for a new figure.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        return plot(self, ax=ax)


def forecast(
    samples_per_shard: Integers,
    bytes_per_shard: Integers,
    budget_bytes: int,
    workload: Workload,
    rates: Rates,
    *,
    max_shards: int = MAX_SIMULATED_SHARDS,
) -> Forecast:
    """Return the forecast of a run.

    Args:
        samples_per_shard: `int64[num_shards]`, see `AccessOrder`.
        bytes_per_shard: `int64[num_shards]`.
        budget_bytes: budget of each node's cache.
        workload: how the run reads the data set.
        rates: rates that the run needs, and those available.
        max_shards: about the number of shards to simulate; fewer are faster and less exact.

    Raises:
        CacheFullError: the window does not fit into the budget.
        ConfigError: the data set has no samples.
    """
    num_samples, data_bytes = int(samples_per_shard.sum()), int(bytes_per_shard.sum())
    if not num_samples:
        raise ConfigError("cannot forecast a run: the data set has no samples")
    need = _need(samples_per_shard, bytes_per_shard)
    check_window(workload.order, workload.batches, need, budget_bytes, samples_per_shard, "this order")
    epochs, resident_bytes = _replay_chosen(samples_per_shard, bytes_per_shard, budget_bytes, workload, max_shards)
    return Forecast(
        num_samples=num_samples,
        num_shards=len(samples_per_shard),
        data_bytes=data_bytes,
        budget_bytes=budget_bytes,
        window_bytes=need(workload.order, workload.batches),
        resident_bytes=resident_bytes,
        first_epoch=_with_rates(epochs[0], num_samples, workload.nodes, rates),
        later_epochs=_with_rates(_mean(epochs[-_STEADY_EPOCHS:]), num_samples, workload.nodes, rates),
    )


def derive_order(
    workload: Workload, samples_per_shard: Integers, bytes_per_shard: Integers, budget_bytes: int
) -> Workload:
    """Return a workload with the windowed order that a loader derives, see `choose_windowed`, and the same seed."""
    order = choose_windowed(
        samples_per_shard,
        workload.batches,
        seed=workload.order.seed,
        need=_need(samples_per_shard, bytes_per_shard),
        budget_bytes=budget_bytes,
    )
    return replace(workload, order=order)


def _need(samples_per_shard: Integers, bytes_per_shard: Integers) -> Need:
    """Return the function that computes the bytes that an order of these shards needs at once."""

    def need(order: OrderConfig, batches: BatchesAtOnce) -> int:
        return window_bytes(samples_per_shard, bytes_per_shard, order, batches.run, skipped=batches.skipped)

    return need


def _replay_chosen(
    samples_per_shard: Integers, bytes_per_shard: Integers, budget_bytes: int, workload: Workload, max_shards: int
) -> tuple[list[EpochTraffic], int]:
    """Return the traffic of each of the first epochs, and the mean resident bytes of a node after them."""
    chosen = _choose_shards(samples_per_shard, max_shards)
    uses = plan_uses(samples_per_shard, bytes_per_shard, workload.order, range(_EPOCHS), chosen=chosen)
    uses_by_node = _uses_by_node(uses, workload)
    owners = _draw_owners(chosen, workload) if workload.has_peers and workload.nodes > 1 else None
    sizes = bytes_per_shard[samples_per_shard > 0]  # shards without samples are never read
    chosen_bytes = int(bytes_per_shard[chosen].sum())
    # Reduce the budget to the share of the chosen shards. The real budget counts whole disk blocks (`footprint`), but
    # the simulation counts exact sizes.
    budget = int(budget_bytes * chosen_bytes / int(footprint(sizes).sum()))
    # By chance, the few chosen shards of a window may need a larger share of the budget than the real window does.
    # Without this minimum, the simulation would then fail.
    min_budget = max(_max_bytes_in_use(uses_of_node, bytes_per_shard) for uses_of_node in uses_by_node)
    result = replay(
        uses_by_node,
        bytes_per_shard,
        max(budget, min_budget),
        ahead_bytes=choose_ahead_bytes(bytes_per_shard, budget_bytes),
        owners=owners,
    )
    epochs = result.epochs
    if not workload.splits_lanes:
        # All nodes read the same shards, so only node 0 was simulated.
        owned_share = 1.0 if owners is None else int(bytes_per_shard[chosen & (owners == 0)].sum()) / chosen_bytes
        epochs = [_of_all_nodes(epoch, workload.nodes, owned_share, has_peers=owners is not None) for epoch in epochs]
    scale = int(sizes.sum()) / chosen_bytes
    return [_scaled(epoch, scale) for epoch in epochs], int(np.mean(result.resident_bytes) * scale)


def _choose_shards(samples_per_shard: Integers, max_shards: int) -> npt.NDArray[np.bool_]:
    """Return the shards to simulate, `bool[num_shards]`: all that have samples, or every n-th of many."""
    occupied = np.flatnonzero(samples_per_shard)
    chosen = np.zeros(len(samples_per_shard), bool)
    chosen[occupied[:: -(-len(occupied) // max_shards)]] = True  # the quotient is rounded up
    return chosen


def _uses_by_node(uses: Uses, workload: Workload) -> list[Uses]:
    """Return the uses of each node, or of one representative node if all nodes read the same shards."""
    if not workload.splits_lanes:
        return [uses]
    node_of = uses.lanes // (workload.order.lanes // workload.nodes)
    return [uses.only(node_of == node) for node in range(workload.nodes)]


def _of_all_nodes(traffic: EpochTraffic, nodes: int, owned_share: float, *, has_peers: bool) -> EpochTraffic:
    """Return the traffic of all nodes, computed from the traffic of one: all nodes read the same shards.

    The simulated node owns `owned_share` of the bytes, and reads only these from the origin.
    """
    if not has_peers:
        return _scaled(traffic, nodes)
    used = nodes * traffic.used_bytes
    origin = traffic.origin_bytes / owned_share
    # What a node that owns no shards reads from its peers. Of very few shards, the simulated node may own all; then
    # each other node reads all of them from it.
    all_from_peers = traffic.peer_bytes / (1 - owned_share) if owned_share < 1 else origin
    # Each node reads from peers the share that it does not own. These shares add up to `nodes - 1`.
    peers = (nodes - 1) * all_from_peers
    return EpochTraffic(used, round(used - origin - peers), round(origin), round(peers))


def _draw_owners(chosen: npt.NDArray[np.bool_], workload: Workload) -> Integers:
    """Draw the owner of each shard to simulate, `int64[num_shards]`. Other shards have the value 0."""
    key = derive_keys(workload.order.seed, 0, _OWNERS, 1)[0]
    numbers = np.flatnonzero(chosen)
    owners = np.zeros(len(chosen), np.int64)
    # In a random order, node 0 owns the first shards, node 1 the next ones, and so on, each the same number.
    owners[numbers[np.argsort(uniform(key, numbers, 0))]] = np.arange(len(numbers)) * workload.nodes // len(numbers)
    return owners


def _max_bytes_in_use(uses: Uses, bytes_per_shard: Integers) -> int:
    """Return the largest number of bytes that are in use at the same time."""
    sizes = bytes_per_shard[uses.shards]
    # At equal times, uses that end free their bytes before others begin.
    by_time = np.lexsort((np.repeat([0, 1], len(uses)), np.concatenate([uses.stop, uses.first])))
    return int(np.cumsum(np.concatenate([-sizes, sizes])[by_time]).max(initial=0))


def _with_rates(traffic: EpochTraffic, num_samples: int, nodes: int, rates: Rates) -> EpochForecast:
    """Return the forecast of an epoch with this traffic, in which all nodes together train `num_samples`."""
    # Bytes in the time in which each node trains one sample, and so all nodes together train `nodes` samples: from
    # the origin to all nodes, and from peers to one node.
    per_sample = {"origin": traffic.origin_bytes / num_samples * nodes, "peers": traffic.peer_bytes / num_samples}
    limits = {"origin": rates.origin, "peers": rates.peers}
    given_limits = {name: limit for name, limit in limits.items() if limit is not None}
    fed = min((limit / per_sample[name] for name, limit in given_limits.items() if per_sample[name]), default=None)
    rate = rates.samples_per_second
    starves = None
    if rate is not None and given_limits:
        starves = fed is not None and fed < rate
    return EpochForecast(
        used_bytes=traffic.used_bytes,
        hit_bytes=traffic.hit_bytes,
        origin_bytes=traffic.origin_bytes,
        peer_bytes=traffic.peer_bytes,
        origin_rate=None if rate is None else rate * per_sample["origin"],
        peer_rate=None if rate is None else rate * per_sample["peers"],
        fed_samples_per_second=fed,
        starves=starves,
    )


def _scaled(traffic: EpochTraffic, scale: float) -> EpochTraffic:
    return EpochTraffic(*(round(count * scale) for count in astuple(traffic)))


def _mean(epochs: list[EpochTraffic]) -> EpochTraffic:
    total = EpochTraffic(*map(sum, zip(*map(astuple, epochs), strict=True)))
    return _scaled(total, 1 / len(epochs))
