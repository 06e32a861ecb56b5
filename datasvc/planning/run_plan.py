"""The plan of a run, for `datasvc plan cache` and the page Planner: the forecast of its caches, and its cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from datasvc.keyed_random import Integers
from datasvc.order import OrderConfig
from datasvc.planning.cache import MAX_SIMULATED_SHARDS, Forecast, Rates, Workload, derive_order, forecast
from datasvc.planning.cost import CostForecast, Prices, forecast_cost
from datasvc.printable import count_text


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How a run would read a data set: the options of `datasvc plan cache`.

    Attributes:
        budget_bytes: budget of each node's cache.
        nodes: number of training nodes, each with its own cache.
        shuffle: shuffle of the loader.
        lanes: with windowed: parts of the data set that are read in parallel.
        block: with windowed: samples permuted together within a lane. Without lanes and block: those that a loader
            derives.
        sticky: with windowed: each lane reads the same samples in every epoch.
        seed: seed of the access order.
        batch_size: samples per rank and step.
        ranks_per_node: training processes per node.
        prefetch: batches that each rank loads ahead.
        peers: whether nodes fetch from each other.
        rates: rates that the run needs, and those available.
        prices: prices of its traffic; None: its cost is not forecast.
        epochs: epochs of the run, for its cost; None: unknown.
    """

    budget_bytes: int
    nodes: int = 1
    shuffle: Literal["global", "windowed", "none"] = "global"
    lanes: int = 1
    block: int | None = None
    sticky: bool = False
    seed: int = 0
    batch_size: int = 256
    ranks_per_node: int = 1
    prefetch: int = 2
    peers: bool = True
    rates: Rates = field(default_factory=Rates)
    prices: Prices | None = None
    epochs: int | None = None


@dataclass(frozen=True)
class RunPlan:
    """A forecast with its input; `cost` is None without prices."""

    forecast: Forecast
    workload: Workload
    rates: Rates
    cost: CostForecast | None = None

    @property
    def order_text(self) -> str:
        """The access order in words."""
        order = self.workload.order
        if order.shuffle != "windowed" or order.block is None:
            return order.shuffle or "that of the shard table"
        return f"windowed, {count_text(order.lanes, 'lane')}, blocks of {count_text(order.block, 'sample')}"

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast and the access order as JSON values, as `datasvc plan cache --json` prints them."""
        cost = {} if self.cost is None else {"cost": asdict(self.cost)}
        return asdict(self.forecast) | {"order": asdict(self.workload.order)} | cost


def plan_run(
    samples_per_shard: Integers,
    bytes_per_shard: Integers,
    options: PlanOptions,
    *,
    max_shards: int = MAX_SIMULATED_SHARDS,
) -> RunPlan:
    """Return the forecast of a run with these options; for arguments and errors, see `forecast`, `forecast_cost`."""
    # As in a loader, a windowed shuffle without further settings derives its lanes and block.
    is_derived = options.shuffle == "windowed" and options.block is None and options.lanes == 1 and not options.sticky
    if is_derived:
        # Deriving the order needs a workload, which needs an order. `derive_order` uses only the seed of this order.
        order = OrderConfig(seed=options.seed)
    else:
        shuffle = None if options.shuffle == "none" else options.shuffle
        order = OrderConfig(
            seed=options.seed, shuffle=shuffle, lanes=options.lanes, block=options.block, sticky=options.sticky
        )
    workload = Workload(
        order,
        options.batch_size,
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        prefetch=options.prefetch,
        has_peers=options.peers and options.nodes > 1,
    )
    budget_bytes = options.budget_bytes
    if is_derived:
        workload = derive_order(workload, samples_per_shard, bytes_per_shard, budget_bytes)
    result = forecast(
        samples_per_shard, bytes_per_shard, budget_bytes, workload, options.rates, max_shards=max_shards
    )
    cost = None
    if options.prices is not None:
        cost = forecast_cost(result, bytes_per_shard, options.prices, epochs=options.epochs)
    return RunPlan(result, workload, options.rates, cost)
