"""Plans a layered graph: the layer of each node, left to right, and the order within a layer with few crossings.

The method is that of Sugiyama, Tagawa and Toda, "Methods for Visual Understanding of Hierarchical System Structures",
1981: longest paths give the layers, edges across several layers get a waypoint in each, and barycentres the order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

_NUM_SWEEPS: Final = 4
Place = str | tuple[str, str, int]  # a node, or the waypoint of an edge in a layer


@dataclass(frozen=True)
class LayerPlan:
    """A layered graph.

    Attributes:
        layers: for each layer, from left to right, the nodes and waypoints from top to bottom.
        routes: for each edge (source, target), all nodes and waypoints from its source to its target.
    """

    layers: list[list[Place]]
    routes: dict[tuple[str, str], list[Place]]


def plan_layers(columns: Mapping[str, int], edges: Iterable[tuple[str, str]]) -> LayerPlan:
    """Return layers in which every edge leads to the right.

    Args:
        columns: for each node, the lowest layer in which it may be.
        edges: pairs of nodes. Of a cycle, the last edge is left out.
    """
    kept = _acyclic(columns, edges)
    level = _longest_paths(columns, kept)
    used = {number: position for position, number in enumerate(sorted(set(level.values())))}  # without empty layers
    layers: list[list[Place]] = [[] for _ in used]
    for node in columns:
        layers[used[level[node]]].append(node)
    routes: dict[tuple[str, str], list[Place]] = {}
    neighbours: list[tuple[Place, Place]] = []
    for source, target in kept:
        between = range(used[level[source]] + 1, used[level[target]])
        waypoints: list[Place] = [(source, target, number) for number in between]
        for number, waypoint in zip(between, waypoints, strict=True):
            layers[number].append(waypoint)
        route: list[Place] = [source, *waypoints, target]
        routes[source, target] = route
        neighbours.extend(pairwise(route))
    return LayerPlan(_few_crossings(layers, neighbours), routes)


def _acyclic(nodes: Iterable[str], edges: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the edges without those that close a cycle, found by a search in depth without recursion."""
    targets: dict[str, list[str]] = {node: [] for node in nodes}
    for source, target in dict.fromkeys(edges):
        if source in targets and target in targets and source != target:
            targets[source].append(target)
    done: set[str] = set()
    kept: list[tuple[str, str]] = []
    for root in targets:
        path: dict[str, int] = {root: 0} if root not in done else {}  # nodes of the path, each with its next target
        while path:
            node, number = path.popitem()
            if number == len(targets[node]):
                done.add(node)
                continue
            target = targets[node][number]
            path[node] = number + 1
            if target in path:
                continue
            kept.append((node, target))
            if target not in done:
                path[target] = 0
    return kept


def _longest_paths(columns: Mapping[str, int], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    level = dict(columns)
    targets: dict[str, list[str]] = defaultdict(list)
    num_sources = dict.fromkeys(columns, 0)
    for source, target in edges:
        targets[source].append(target)
        num_sources[target] += 1
    ready = [node for node, count in num_sources.items() if not count]
    for node in ready:  # grows
        for target in targets[node]:
            level[target] = max(level[target], level[node] + 1)
            num_sources[target] -= 1
            if not num_sources[target]:
                ready.append(target)
    return level


def _few_crossings(layers: list[list[Place]], edges: Sequence[tuple[Place, Place]]) -> list[list[Place]]:
    sources: dict[Place, list[Place]] = defaultdict(list)
    targets: dict[Place, list[Place]] = defaultdict(list)
    for source, target in edges:
        sources[target].append(source)
        targets[source].append(target)
    for sweep in range(_NUM_SWEEPS):
        # Alternate: order by the neighbours on the left, then by those on the right.
        neighbours, step = (sources, 1) if sweep % 2 == 0 else (targets, -1)
        place: dict[Place, float] = {}
        for layer in layers[::step]:
            places = {node: [place[other] for other in neighbours[node]] for node in layer}
            order = {node: index for index, node in enumerate(layer)}
            layer.sort(key=lambda node: sum(places[node]) / len(places[node]) if places[node] else order[node])
            place |= {node: index for index, node in enumerate(layer)}
    return layers
