"""Simulates nodes that stage the same objects at the same time: who sends which object to whom, and when. Pure.

Each node has threads that take one object after another. An object comes from another node that has it, or from the
first working node of its ranking, which reads it from the origin before it sends. Running transfers share the links
as TCP connections do: nearly max-min fair, weighted by the number of connections. A step ends when a small share of
the transfers has ended. So a node may start its next transfer a little late, but no link exceeds its bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from datasvc.keyed_random import Integers

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_ROUNDS: Final = 4  # in which bandwidth is divided; what is left after them is less than 1 %
NO_LIMIT: Final = 1e18
_STEP_SHARE: Final = 32  # a step ends when one of so many running transfers has ended
_ORIGIN, _UNKNOWN, _OWN = -1, -2, -3  # sources that are no other node; OWN: another thread of the node fetches
_ABSENT, _FETCHING, _RESIDENT = 0, 1, 2  # states of an object on a node


@dataclass(frozen=True)
class StagingLimits:
    """Links and limits of the simulated nodes.

    Attributes:
        origin_bytes_s: bandwidth of the origin to all nodes together.
        fetch_bytes_s: what all requests of one node together receive from the origin at most.
        connections: requests that a node sends to the origin at the same time.
        node_bytes_s: `float64[num_nodes]`, bandwidth of the link of each node, in each direction.
        disk_bytes_s: bandwidth with which each node writes.
        threads: objects that a job of a node stages at the same time.
        max_streams: objects that a node sends at the same time; further requests wait.
        max_connections: requests that a node accepts at the same time; further ones go to the next node.
        max_fetches: objects that a node fetches for others at the same time.
        timeout_s: time after which a request to a lost node goes to the next node.
    """

    origin_bytes_s: float
    fetch_bytes_s: float
    connections: int
    node_bytes_s: Floats
    disk_bytes_s: float
    threads: int
    max_streams: int
    max_connections: int
    max_fetches: int
    timeout_s: float


@dataclass(frozen=True)
class StagedObjects:
    """The objects of a simulation, and what each node does with them.

    Attributes:
        sizes: `int64[num_objects]`, bytes.
        overhead_s: `float64[num_objects]`, time of each transfer in which no bytes flow.
        ranked: `int64[num_objects, num_nodes]`, the ranking of the nodes for each object, the owner first.
        orders: `int64[num_nodes, num_staged]`, the objects that each node stages, in its order; the objects of job 0
            come first, then those of job 1, and so on.
        job_starts: first column of each job in `orders`, and the number of columns.
        copies: `int64[num_nodes, num_objects]`, the node that each node asks for a copy before it asks the owner; -1:
            none. Only a node that has the object sends it.
    """

    sizes: Integers
    overhead_s: Floats
    ranked: Integers
    orders: Integers
    job_starts: Integers
    copies: Integers


@dataclass(frozen=True)
class Event:
    """Nodes that are lost or added when a share of the bytes has arrived.

    Attributes:
        share: share of the bytes that all nodes present at the beginning stage.
        nodes: numbers of the nodes.
        is_loss: whether they are lost; otherwise they are added.
    """

    share: float
    nodes: Integers
    is_loss: bool


class Simulation:
    """Nodes that stage objects.

    Args:
        objects: objects, owners and orders.
        limits: links and limits.
        present: `bool[num_nodes]`, the nodes that work from the beginning.

    Attributes:
        now: simulated seconds since the beginning.
        done_s: `float64[num_nodes]`, time at which a node had staged all; NaN: it was lost, or never added.
        job_s: time at which the last node had staged all objects of each job.
        first_s: time at which the last node had object 0.
        origin_bytes, received_bytes, sent_bytes: `float64[num_nodes]`, bytes that each node read from the origin,
            received from other nodes, and sent to them.
    """

    def __init__(self, objects: StagedObjects, limits: StagingLimits, present: Bools) -> None:
        num_nodes, num_objects = len(present), len(objects.sizes)
        self._objects, self._limits, self._present = objects, limits, present.copy()
        self._state = np.full((num_nodes, num_objects), _ABSENT, np.int8)
        num_jobs = len(objects.job_starts) - 1
        self._next = np.zeros((num_nodes, num_jobs), np.int64)  # objects that the threads of each job have taken
        self._left_objects = np.tile(np.diff(objects.job_starts), (num_nodes, 1))
        self._fetches: list[tuple[Integers, Integers]] = []  # nodes and objects that wait for a fetching thread
        # A slot is a thread: first the staging threads of all nodes and jobs, then those that fetch for other nodes.
        nodes = np.arange(num_nodes)
        self._node = np.concatenate([nodes.repeat(limits.threads * num_jobs), nodes.repeat(limits.max_fetches)])
        self._num_staging = num_nodes * num_jobs * limits.threads
        self._job = np.tile(np.arange(num_jobs).repeat(limits.threads), num_nodes)  # of staging threads
        num_slots = len(self._node)
        self._object = np.full(num_slots, -1)
        self._source = np.full(num_slots, _UNKNOWN)
        self._flows = np.zeros(num_slots, bool)  # whether the source sends, or will after `_wait_s`
        self._wait_s, self._since, self._left = np.zeros((3, num_slots))
        self._requests = np.zeros(num_nodes, np.int64)  # that each node has accepted
        self.now, self.first_s = 0.0, np.nan
        self.done_s, self.job_s = np.full(num_nodes, np.nan), np.full(num_jobs, np.nan)
        self.origin_bytes, self.received_bytes, self.sent_bytes = np.zeros((3, num_nodes))

    def run(self, events: Sequence[Event] = ()) -> None:
        """Simulate until all nodes have staged all objects. An event that is due at no share of them happens then."""
        remaining = sorted(events, key=lambda event: event.share)
        total = int(self._present.sum()) * float(self._objects.sizes[self._objects.orders[0]].sum())
        while True:
            arrived = float(self.origin_bytes.sum() + self.received_bytes.sum())
            while remaining and arrived >= remaining[0].share * total:
                self._apply(remaining.pop(0))
            self._take_objects()
            self._start_fetches()
            self._admit()
            if not self._advance():
                if not remaining:
                    break
                # The nodes that are left have all, but with those that were lost, too few bytes have arrived.
                self._apply(remaining.pop(0))
        assert not self._left_objects[self._present].any(), "a transfer waits without end"

    def _apply(self, event: Event) -> None:
        self._present[event.nodes] = not event.is_loss
        if event.is_loss:
            lost = ~self._present
            self._release(np.flatnonzero(lost[self._node] & (self._object >= 0)))
            asked = np.flatnonzero((self._source >= 0) & (self._object >= 0))
            asked = asked[lost[self._source[asked]]]
            # The bytes that have arrived stay.
            self._source[asked], self._flows[asked], self._wait_s[asked] = _UNKNOWN, False, self._limits.timeout_s
            self._requests[event.nodes] = 0
            self.done_s[event.nodes] = np.nan
            self._fetches = [(node[~lost[node]], number[~lost[node]]) for node, number in self._fetches]

    def _take_objects(self) -> None:
        """Give idle staging threads their next objects, and choose the source of each."""
        while True:
            idle = np.flatnonzero(
                (self._object[: self._num_staging] < 0) & self._present[self._node[: self._num_staging]]
            )
            node, job = self._node[idle], self._job[idle]
            column = self._next[node, job] + _position_among_equals(node * self._next.shape[1] + job)
            has_next = column < np.diff(self._objects.job_starts)[job]
            slots, node, job, column = idle[has_next], node[has_next], job[has_next], column[has_next]
            if not len(slots):
                break
            np.add.at(self._next, (node, job), 1)
            number = self._objects.orders[node, self._objects.job_starts[job] + column]
            self._object[slots], self._left[slots] = number, self._objects.sizes[number]
            self._wait_s[slots], self._source[slots] = 0.0, _UNKNOWN
            state = self._state[node, number]
            self._source[slots[state != _ABSENT]] = _OWN
            self._state[node[state == _ABSENT], number[state == _ABSENT]] = _FETCHING
            self._finish_own()
        self._choose_sources(np.flatnonzero((self._object >= 0) & (self._source == _UNKNOWN) & (self._wait_s <= 0)))

    def _finish_own(self) -> None:
        """End the work of threads whose object another thread of the node has made resident."""
        waiting = np.flatnonzero(self._source == _OWN)
        waiting = waiting[self._object[waiting] >= 0]
        ready = waiting[self._state[self._node[waiting], self._object[waiting]] == _RESIDENT]
        self._complete(ready)

    def _choose_sources(self, slots: Integers) -> None:
        node, number = self._node[slots], self._object[slots]
        source = np.full(len(slots), _UNKNOWN)
        fetches_for_others = slots >= self._num_staging
        source[fetches_for_others] = _ORIGIN
        copy = self._objects.copies[node, number]
        has_copy = (source == _UNKNOWN) & (copy >= 0) & self._present[copy] & (self._state[copy, number] == _RESIDENT)
        has_copy &= self._requests[copy] + _position_among_equals(copy) < self._limits.max_connections
        source[has_copy] = copy[has_copy]
        for rank in range(self._objects.ranked.shape[1]):
            open_ = np.flatnonzero(source == _UNKNOWN)
            if not len(open_):
                break
            candidate = self._objects.ranked[number[open_], rank]
            source[open_[candidate == node[open_]]] = _ORIGIN
            asks = candidate != node[open_]
            open_, candidate = open_[asks], candidate[asks]
            num_requests = self._requests[candidate] + _position_among_equals(candidate)
            accepts = self._present[candidate] & (num_requests < self._limits.max_connections)
            source[open_[accepts]] = candidate[accepts]
        source[source == _UNKNOWN] = _ORIGIN
        self._source[slots], self._since[slots] = source, self.now
        from_origin = slots[source == _ORIGIN]
        self._flows[from_origin], self._wait_s[from_origin] = (
            True,
            self._objects.overhead_s[self._object[from_origin]],
        )
        from_peer = source >= 0
        peer, number = source[from_peer], number[from_peer]
        self._requests += np.bincount(peer, minlength=len(self._present))
        absent = self._state[peer, number] == _ABSENT
        pairs = np.unique(np.stack([peer[absent], number[absent]]), axis=1)
        self._state[pairs[0], pairs[1]] = _FETCHING
        if pairs.size:
            self._fetches.append((pairs[0], pairs[1]))

    def _start_fetches(self) -> None:
        """Give idle fetching threads the objects that requests of other nodes wait for, in the order of requests."""
        if not self._fetches:
            return
        node, number = (np.concatenate(each) for each in zip(*self._fetches, strict=True))
        idle = self._num_staging + np.flatnonzero(self._object[self._num_staging :] < 0)
        num_idle = np.bincount(self._node[idle], minlength=len(self._present))
        position = _position_among_equals(node)
        starts = position < num_idle[node]
        first_idle = np.cumsum(num_idle) - num_idle  # `idle` is sorted by node
        slots = idle[first_idle[node[starts]] + position[starts]]
        self._object[slots], self._left[slots] = number[starts], self._objects.sizes[number[starts]]
        self._choose_sources(slots)
        self._fetches = [(node[~starts], number[~starts])] if not starts.all() else []

    def _admit(self) -> None:
        """Start the streams of nodes that have the requested objects, up to the limit of streams of each."""
        waiting = np.flatnonzero((self._source >= 0) & ~self._flows)
        waiting = waiting[self._state[self._source[waiting], self._object[waiting]] == _RESIDENT]
        if not len(waiting):
            return
        waiting = waiting[np.argsort(self._since[waiting], kind="stable")]
        flowing = self._source[self._flows]
        num_streams = np.bincount(flowing[flowing >= 0], minlength=len(self._present))
        source = self._source[waiting]
        starts = waiting[num_streams[source] + _position_among_equals(source) < self._limits.max_streams]
        self._flows[starts], self._wait_s[starts] = True, self._objects.overhead_s[self._object[starts]]

    def _advance(self) -> bool:
        """Let bytes flow until some transfers have ended. Return False if nothing can happen any more."""
        slots = np.flatnonzero(self._flows | (self._wait_s > 0))
        if not len(slots):
            return False
        moves = self._flows[slots] & (self._wait_s[slots] <= 0)
        moving, still = slots[moves], slots[~moves]
        rates = self._share_links(moving)
        ends_s = np.concatenate([self._left[moving] / rates, self._wait_s[still]])
        nth = len(ends_s) // _STEP_SHARE
        step_s = max(float(np.partition(ends_s, nth)[nth]), 0.0)
        self.now += step_s
        moved = np.minimum(self._left[moving], rates * step_s)
        self._left[moving] -= moved
        self._wait_s[still] = np.maximum(self._wait_s[still] - step_s, 0.0)
        source, node = self._source[moving], self._node[moving]
        peers, num_nodes = source >= 0, len(self._present)
        self.origin_bytes += np.bincount(node[~peers], moved[~peers], num_nodes)
        self.received_bytes += np.bincount(node[peers], moved[peers], num_nodes)
        self.sent_bytes += np.bincount(source[peers], moved[peers], num_nodes)
        ended = moving[ends_s[: len(moving)] <= step_s]
        self._state[self._node[ended], self._object[ended]] = _RESIDENT
        if (self._object[ended] == 0).any():
            self.first_s = self.now
        self._complete(ended)
        self._finish_own()
        return True

    def _complete(self, slots: Integers) -> None:
        """End the work of threads whose objects are resident, and record the nodes that have staged all."""
        staging = slots[slots < self._num_staging]
        np.subtract.at(self._left_objects, (self._node[staging], self._job[staging]), 1)
        self._release(slots)
        if len(staging):
            ended = self._present & np.isnan(self.done_s) & ~self._left_objects.any(axis=1)
            self.done_s[ended] = self.now
            self.job_s[self._job[staging]] = self.now

    def _release(self, slots: Integers) -> None:
        source = self._source[slots]
        self._requests -= np.bincount(source[source >= 0], minlength=len(self._present))
        self._object[slots], self._source[slots], self._flows[slots], self._wait_s[slots] = -1, _UNKNOWN, False, 0.0

    def _share_links(self, slots: Integers) -> Floats:
        """Return the bytes per second of each transfer, `float64[len(slots)]`."""
        node, source, num_nodes = self._node[slots], self._source[slots], len(self._present)
        limits, from_origin = self._limits, source < 0
        num_fetches = np.bincount(node[from_origin], minlength=num_nodes)
        weight = np.where(from_origin, limits.connections / np.maximum(num_fetches, 1)[node], 1.0)
        # Links: receiving of each node, sending of each node, its requests to the origin, and the origin.
        links = [node, np.where(from_origin, 2 * num_nodes, num_nodes) + np.where(from_origin, node, source)]
        links.append(np.where(from_origin, 3 * num_nodes, 3 * num_nodes + 1))
        receiving = np.minimum(limits.node_bytes_s, limits.disk_bytes_s)
        free = np.concatenate(
            [
                receiving,
                limits.node_bytes_s,
                np.full(num_nodes, limits.fetch_bytes_s),
                [limits.origin_bytes_s, NO_LIMIT],
            ]
        )
        rates, total = np.zeros(len(slots)), np.maximum(free, 1e-9)
        grows = np.ones(len(slots), bool)
        for _ in range(_ROUNDS):
            used_weight = np.zeros(len(free))
            for link in links:
                used_weight += np.bincount(link[grows], weight[grows], len(free))
            share = np.maximum(free, 0.0) / np.maximum(used_weight, 1e-12)
            added = np.where(grows, weight * np.minimum.reduce([share[link] for link in links]), 0.0)
            rates += added
            for link in links:
                free = free - np.bincount(link, added, len(free))
            is_full = free <= 1e-3 * total
            grows &= ~np.logical_or.reduce([is_full[link] for link in links])
            if not grows.any():
                break
        return rates


def _position_among_equals(values: Integers) -> Integers:
    """Return how many equal values precede each value."""
    order = np.argsort(values, kind="stable")
    by_value = values[order]
    starts = np.flatnonzero(np.concatenate([[True], by_value[1:] != by_value[:-1]])) if len(values) else order
    lengths = np.diff(np.append(starts, len(values)))
    positions = np.empty(len(values), np.int64)
    positions[order] = np.arange(len(values)) - np.repeat(starts, lengths)
    return positions
