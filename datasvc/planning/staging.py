"""Forecast of the time in which all nodes of a cluster stage data, beside lower bounds of this time. Pure.

The simulation (`staging_flows`) gets owners, orders and copies from the functions by which nodes choose them
(`datasvc.cache.peers.placement`). While a node stages, it holds all objects that have arrived. So none is evicted,
and staging more than the budget is refused at once, as `Cache.stage` does.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from datasvc.cache.catalogue.quotas import DEFAULT_TENANT, Account
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.placement import choose_copy, order_for_node, rank_nodes, spreads_load
from datasvc.cache.sources.origin_source import GATHERED_PARTS, RangeRequests
from datasvc.errors import CacheFullError, ConfigError
from datasvc.keyed_random import Integers, derive_keys, uniform
from datasvc.planning.staging_flows import NO_LIMIT, Event, Simulation, StagedObjects, StagingLimits
from datasvc.repository import Digest
from datasvc.shards.ingestion.plan import SHARD_BYTES

THREADS: Final = 8
"""Objects that a job of a node stages at the same time, see `datasvc.node.transfers.staging_jobs`."""
MAX_STREAMS: Final = 32
"""Objects that a node sends at the same time, see `datasvc.node.transfers.sending`."""
MAX_CONNECTIONS: Final = 256
"""Requests that a node accepts at the same time, see `datasvc.node.settings`."""
MAX_FETCHES: Final = 16
"""Objects that a node fetches for other nodes at the same time, see `datasvc.node.transfers.fetching`."""
MAX_REQUESTS: Final = 16
"""Requests of a node to the origin at the same time, see `RequestPool`."""
_MAX_SIMULATED: Final = 4000  # objects; 1,000 nodes then take half a minute
_STAGED: Final = 51  # purpose of the random keys that choose the objects of a node, see `derive_keys`


@dataclass(frozen=True, kw_only=True)
class StagingOptions:
    """What the nodes stage, and over which links: the options of `datasvc plan staging`.

    Attributes:
        size_bytes: size of the data.
        object_bytes: size of each object.
        origin_bytes_s: bandwidth of the origin to all nodes together.
        request_bytes_s: bandwidth of one request to the origin; None: not limited.
        origin_latency_s: time from a request to the origin until its first byte.
        node_bytes_s: bandwidth of the link of each node, in each direction.
        latency_s: latency of a message between nodes.
        disk_bytes_s: bandwidth with which each node writes; None: not limited.
        object_s: time of each object in which a node neither waits nor receives: reservation, hash, publication.
        share: share of the data that each node stages, drawn at random.
        data_sets: data sets, of equal size, that two or more tenants stage at the same time.
        lose: number of nodes that are lost, and the share of all bytes that has arrived then.
        add: number of nodes that are added, and this share.
        slow: number of nodes with a slower link, and by what factor.
        hot: whether all nodes need the same object first.
        budget_bytes: budget of each node's cache; None: the data fits.
        one_owner: for comparison: also many nodes stage in one order, and only the owner of an object sends it.
        seed: seed of the names of the objects.

    Raises:
        ConfigError: a value is out of range.
    """

    size_bytes: int
    object_bytes: int = SHARD_BYTES
    origin_bytes_s: float
    request_bytes_s: float | None = None
    origin_latency_s: float = 0.02
    node_bytes_s: float
    latency_s: float = 50e-6
    disk_bytes_s: float | None = None
    object_s: float = 0.01
    share: float = 1.0
    data_sets: int = 1
    lose: tuple[int, float] = (0, 0.5)
    add: tuple[int, float] = (0, 0.5)
    slow: tuple[int, float] = (0, 1.0)
    hot: bool = False
    budget_bytes: int | None = None
    one_owner: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("size_bytes", "object_bytes", "origin_bytes_s", "node_bytes_s", "data_sets"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected more than 0")
        for name in ("request_bytes_s", "disk_bytes_s"):
            if not (getattr(self, name) is None or getattr(self, name) > 0):
                raise ConfigError(f"{name} is {getattr(self, name)}; expected more than 0, or None: not limited")
        for name in ("origin_latency_s", "latency_s", "object_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a finite time, not below 0")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share is {self.share}; expected more than 0, and at most 1")
        for name, (number, share) in (("lose", self.lose), ("add", self.add)):
            if number < 0 or not 0 <= share < 1:
                raise ConfigError(
                    f"{name} is {number} nodes at {share:.0%}; expected 0 or more, at 0% or more, below 100%"
                )
        if self.slow[0] < 0 or not 1 <= self.slow[1] < math.inf:
            raise ConfigError(f"slow is {self.slow[0]} nodes by {self.slow[1]:g}; expected 0 or more, by at least 1")
        most = min(self.num_objects, _MAX_SIMULATED // 2)
        if self.data_sets > most:
            raise ConfigError(f"{self.data_sets} data sets of {self.num_objects} objects; expected at most {most}")

    @property
    def num_objects(self) -> int:
        """Number of objects."""
        return -(-self.size_bytes // self.object_bytes)


@dataclass(frozen=True)
class StagingForecast:
    """How a number of nodes stages the data.

    Attributes:
        num_nodes: nodes at the beginning.
        num_objects: objects of the data.
        num_simulated: objects of the simulation; if they are fewer, they are larger.
        staged_s: time in which the last node has staged all.
        origin_s, network_s, disk_s: lower bounds of this time: by the origin, by the links, by the disks.
        origin_bytes: bytes that the nodes read from the origin.
        origin_reads: how often they read each byte from there, in the mean, of what the nodes left at the end stage.
        peer_bytes: bytes that they received from each other.
        busiest: bytes that the busiest node sent, by the mean of the nodes.
        first_node_s: time in which the first node has staged all.
        data_set_s: time in which all nodes have staged each data set.
        hot_s: time in which all nodes have the object that all need first; None without one.
    """

    num_nodes: int
    num_objects: int
    num_simulated: int
    staged_s: float
    origin_s: float
    network_s: float
    disk_s: float
    origin_bytes: float
    origin_reads: float
    peer_bytes: float
    busiest: float
    first_node_s: float
    data_set_s: tuple[float, ...]
    hot_s: float | None

    @property
    def bound_s(self) -> float:
        """The largest of the lower bounds."""
        return max(self.origin_s, self.network_s, self.disk_s)

    @property
    def ratio(self) -> float:
        """Time by the largest of its bounds, at least 1."""
        return self.staged_s / self.bound_s

    def to_dict(self) -> dict[str, Any]:
        """Return all values as JSON values."""
        return asdict(self) | {"bound_s": self.bound_s, "ratio": self.ratio}


def plan_staging(num_nodes: int, options: StagingOptions) -> StagingForecast:
    """Return how `num_nodes` nodes, which have nothing, stage data at the same time.

    Raises:
        ConfigError: there is no node, or the events and slow nodes are more than the nodes.
        CacheFullError: the data exceeds the budget of a node.
    """
    if num_nodes < 1 or options.lose[0] >= num_nodes or options.slow[0] > num_nodes:
        raise ConfigError(f"{num_nodes} nodes; expected 1 or more, more than are lost, and not fewer than are slow")
    check_budget(options)
    num_all = num_nodes + options.add[0]
    objects = _make_objects(num_nodes, num_all, options)
    limits = _make_limits(num_all, options)
    present = np.arange(num_all) < num_nodes
    # Slow nodes are the first ones, and lost nodes the last ones of those present.
    events = [
        Event(options.lose[1], np.arange(num_nodes - options.lose[0], num_nodes), is_loss=True),
        Event(options.add[1], np.arange(num_nodes, num_all), is_loss=False),
    ]
    simulation = Simulation(objects, limits, present)
    simulation.run([event for event in events if len(event.nodes)])
    survive = ~np.isnan(simulation.done_s)
    staged = np.unique(objects.orders[survive])
    staged_bytes, node_bytes = float(objects.sizes[staged].sum()), float(objects.sizes[objects.orders[0]].sum())
    origin_bytes, peer_bytes = float(simulation.origin_bytes.sum()), float(simulation.received_bytes.sum())
    return StagingForecast(
        num_nodes=num_nodes,
        num_objects=options.num_objects,
        num_simulated=len(objects.sizes),
        staged_s=float(np.nanmax(simulation.done_s)),
        origin_s=staged_bytes / min(options.origin_bytes_s, num_all * limits.fetch_bytes_s),
        network_s=node_bytes / float(limits.node_bytes_s[survive].min()),
        disk_s=node_bytes / limits.disk_bytes_s,
        origin_bytes=origin_bytes,
        origin_reads=origin_bytes / staged_bytes,
        peer_bytes=peer_bytes,
        busiest=float(simulation.sent_bytes.max() / max(simulation.sent_bytes.mean(), 1e-9)),
        first_node_s=float(np.nanmin(simulation.done_s)),
        data_set_s=tuple(map(float, simulation.job_s)),
        hot_s=float(simulation.first_s) if options.hot else None,
    )


def parse_nodes(text: str, separator: str, unit: str = "") -> tuple[int, float]:
    """Return the number of nodes and the value of "1@50%" (unit "%": 0.5) or "2:4". Raises ConfigError."""
    match = re.fullmatch(rf"(\d+){separator}(\d+(?:\.\d+)?){unit}", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a number of nodes and a value; write it as 1{separator}50{unit}")
    return int(match[1]), float(match[2]) / (100 if unit == "%" else 1)


def check_budget(options: StagingOptions) -> None:
    """Raise CacheFullError if what a node stages exceeds its budget; see `Cache.stage`."""
    if options.budget_bytes is None:
        return
    others = options.num_objects - 1
    last_bytes = options.size_bytes - others * options.object_bytes
    needed = int((footprint(options.object_bytes) * others + footprint(last_bytes)) * options.share)
    available = Account(options.budget_bytes, {}).available(DEFAULT_TENANT)
    if needed > available:
        raise CacheFullError(
            f"staging needs {needed} bytes on each node, and {available} are available; give a larger --budget, or "
            "do not stage: a loader with shuffle='windowed' streams through a smaller cache"
        )


def _make_objects(num_first: int, num_nodes: int, options: StagingOptions) -> StagedObjects:
    """Return the simulated objects, each of which stands for `merged` objects.

    The nodes from `num_first` on are added later: the order of a node is that of the nodes when it begins.
    """
    merged = -(-options.num_objects // _MAX_SIMULATED)
    object_bytes = merged * options.object_bytes
    sizes = np.minimum(object_bytes, options.size_bytes - np.arange(0, options.size_bytes, object_bytes))
    names = [f"http://node-{number}:8765" for number in range(num_nodes)]
    digests = [Digest(f"{options.seed:032x}{number:032x}") for number in range(len(sizes))]
    number_of = {digest: number for number, digest in enumerate(digests)}
    node_of = {name: number for number, name in enumerate(names)}
    ranked = np.array([[node_of[name] for name in rank_nodes(digest, names)] for digest in digests])
    ranks = np.empty_like(ranked)
    np.put_along_axis(ranks, ranked, np.arange(num_nodes)[None, :], axis=1)
    jobs = np.arange(len(digests)) * options.data_sets // len(digests)
    num_staged = np.maximum(1, np.round(options.share * np.bincount(jobs))).astype(np.int64)
    orders = np.empty((num_nodes, int(num_staged.sum())), np.int64)
    copies = np.full((num_nodes, len(digests)), -1)
    for node, name in enumerate(names):
        spreads = spreads_load(num_first if node < num_first else num_nodes) and not options.one_owner
        order = order_for_node(digests, name) if spreads else digests
        numbers = np.array([number_of[digest] for digest in order])
        orders[node] = _choose_staged(node, numbers, jobs, num_staged, options)
        if spreads_load(num_nodes) and not options.one_owner:
            lower = np.flatnonzero(ranks[:, node] > 1)  # the second node can only ask the owner
            chosen = [choose_copy(digests[number], range(ranks[number, node]), name) for number in lower]
            copies[node, lower] = ranked[lower, chosen]
    overhead_s = np.full(len(sizes), merged * (options.object_s + 4 * options.latency_s))
    return StagedObjects(sizes, overhead_s, ranked, orders, np.concatenate([[0], np.cumsum(num_staged)]), copies)


def _choose_staged(
    node: int, order: Integers, jobs: Integers, num_staged: Integers, options: StagingOptions
) -> Integers:
    """Return the objects that a node stages, `num_staged` of each job, in the order of `order` within each job."""
    keys = uniform(derive_keys(options.seed, node, _STAGED, 1)[0], np.arange(len(jobs)), 0)
    if options.hot:
        keys[0] = -1  # all nodes stage it
        order = np.concatenate([[0], order[order != 0]])
    chosen = np.zeros(len(jobs), bool)
    for job, number in enumerate(num_staged):
        members = np.flatnonzero(jobs == job)
        chosen[members[np.argsort(keys[members])[:number]]] = True
    order = order[chosen[order]]
    return order[np.argsort(jobs[order], kind="stable")]


def _make_limits(num_nodes: int, options: StagingOptions) -> StagingLimits:
    node_bytes_s = np.full(num_nodes, float(options.node_bytes_s))
    node_bytes_s[: options.slow[0]] /= options.slow[1]
    # Each request pays the latency once. Its length is what a node requests while all its threads fetch.
    requests = RangeRequests(0, options.object_bytes, GATHERED_PARTS)
    start, stop = requests.take(max(1, MAX_REQUESTS // THREADS)) or (0, options.object_bytes)
    request_s = options.origin_latency_s + (stop - start) / (options.request_bytes_s or NO_LIMIT)
    settings = PeerSettings()
    return StagingLimits(
        origin_bytes_s=options.origin_bytes_s,
        fetch_bytes_s=min(NO_LIMIT, MAX_REQUESTS * (stop - start) / max(request_s, 1e-9)),
        connections=MAX_REQUESTS,
        node_bytes_s=node_bytes_s,
        disk_bytes_s=options.disk_bytes_s or NO_LIMIT,
        threads=THREADS,
        max_streams=MAX_STREAMS,
        max_connections=MAX_CONNECTIONS,
        max_fetches=MAX_FETCHES,
        timeout_s=settings.stall_timeout_s + settings.connect_timeout_s,
    )
