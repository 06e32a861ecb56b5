"""The graph of a lineage: sources, shards, data versions, runs and models.

It leads from left to right; for a narrow page there is one from top to bottom with few nodes in each layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from datasvc.drawing.colours import kind_colour
from datasvc.drawing.elements import Markup, element, link, markup, shorten, shorten_to_width, svg, text_width
from datasvc.drawing.table import html_table
from datasvc.printable import count_text

_MIN_WIDTH: Final = 88  # of a node
_MAX_WIDTH: Final = 170  # two beside each other fit a window of 400 pixels
_PADDING: Final = 10
_HEIGHT: Final = 40
_GAP: Final = 44  # between layers; the lines turn in it
_SPACE: Final = 12  # between the nodes of a layer
_WAYPOINT: Final = 12  # of a line that crosses a layer
_MARGIN: Final = 6
_NUM_SWEEPS: Final = 4
Place = str | tuple[str, str, int]  # a node, or the waypoint of an edge in a layer


@dataclass(frozen=True)
class FlowNode:
    """A node of a flow graph.

    Attributes:
        name: unique in the graph.
        label: shown text; by default the name.
        column: the lowest layer in which it is drawn, from 0; nodes of one kind have one.
        kind: what it is, such as "data version"; its colour, and the text below the label.
        href: address of its page.
        is_removed: whether it no longer exists; its frame is dashed.
        title: text on hover; by default kind and name.
        note: text below the label, instead of the kind.
    """

    name: str
    label: str = ""
    column: int = 0
    kind: str = ""
    href: str | None = None
    is_removed: bool = False
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class FlowEdge:
    """An edge of a flow graph.

    Attributes:
        source: name of the node on the left.
        target: name of the node on the right.
        label: what it says, such as "epochs 0 to 3"; on hover.
    """

    source: str
    target: str
    label: str = ""


def flow_graph(
    nodes: Sequence[FlowNode],
    edges: Sequence[FlowEdge],
    *,
    max_per_column: int = 12,
    title: str = "lineage",
    is_vertical: bool = False,
) -> Markup:
    """Return a graph in layers as SVG; every edge leads from left to right.

    Args:
        nodes: all nodes; the first of each column are drawn.
        edges: those of other nodes, and of a cycle the last one, are left out.
        max_per_column: further nodes of a column become one, "and 312 more".
        title: name of the picture.
        is_vertical: whether every edge leads from top to bottom, and columns are rows.
    """
    collapsed = _collapse(nodes, max_per_column)
    by_name = {node.name: node for node in collapsed.values()}
    merged: dict[tuple[str, str], str] = {}
    for edge in edges:
        if edge.source in collapsed and edge.target in collapsed:
            merged.setdefault((collapsed[edge.source].name, collapsed[edge.target].name), edge.label)
    plan = plan_layers({name: node.column for name, node in by_name.items()}, merged)
    boxes, width, height = _layout(plan, by_name, is_vertical=is_vertical)
    lines = [_edge([boxes[name] for name in route], merged[ends], is_vertical) for ends, route in plan.routes.items()]
    marks = [_node(node, boxes[name]) for name, node in by_name.items()]
    return svg(
        *lines,
        *marks,
        width=width,
        height=height,
        title=title,
        description=f"{count_text(len(nodes), 'node')} and {count_text(len(edges), 'edge')}, "
        f"from {'top to bottom' if is_vertical else 'left to right'}",
        interactive=any(node.href for node in nodes),
    )


def flow_table(
    nodes: Sequence[FlowNode], edges: Sequence[FlowEdge], *, caption: str = "lineage", max_rows: int = 1000
) -> Markup:
    """Return the edges of `flow_graph` as a table, followed by nodes without an edge."""
    by_name = {node.name: node for node in nodes}
    shown = [edge for edge in edges if edge.source in by_name and edge.target in by_name]
    rows = [(_cell(by_name[edge.source]), _cell(by_name[edge.target]), edge.label) for edge in shown]
    joined = {name for edge in shown for name in (edge.source, edge.target)}
    rows += [(_cell(node), Markup(), "") for node in nodes if node.name not in joined]
    return html_table(["from", "to", "how"], rows, caption=caption, max_rows=max_rows)


def _cell(node: FlowNode) -> Markup:
    text = f"{node.kind} {node.label or node.name}".strip()
    return link(text + (" (removed)" if node.is_removed else ""), node.href)


def _collapse(nodes: Sequence[FlowNode], max_per_column: int) -> dict[str, FlowNode]:
    """Return for the name of each node the node that is drawn for it."""
    num_in_column = Counter(node.column for node in nodes)
    seen: Counter[int] = Counter()
    drawn: dict[str, FlowNode] = {}
    # A name that no node has: longer than all of them.
    rest = "." * max((len(node.name) for node in nodes), default=0) + " rest {}"
    for node in nodes:
        seen[node.column] += 1
        num_more = num_in_column[node.column] - max_per_column + 1
        is_kept = num_in_column[node.column] <= max_per_column or seen[node.column] < max_per_column
        drawn[node.name] = (
            node if is_kept else FlowNode(rest.format(node.column), f"and {num_more:,} more", node.column, node.kind)
        )
    return drawn


@dataclass(frozen=True)
class _Box:
    """The place of a node, or of a line that crosses a layer."""

    x: float
    y: float
    width: float
    height: float


def _layout(
    plan: LayerPlan, nodes: Mapping[str, FlowNode], *, is_vertical: bool
) -> tuple[dict[Place, _Box], float, float]:
    """Return the boxes of nodes and waypoints, and the width and height of the picture. Layers are centred.

    A layer is as thick as its nodes need: their width, or their height if layers lie below each other.
    """

    def length_of(place: Place) -> float:
        if isinstance(place, tuple):
            return _WAYPOINT
        return _width(nodes[place]) if is_vertical else _HEIGHT

    boxes: dict[Place, _Box] = {}
    lengths = [sum(map(length_of, layer)) + _SPACE * (len(layer) - 1) for layer in plan.layers]
    longest = max(lengths, default=_HEIGHT)
    start = float(_MARGIN)
    for layer, length in zip(plan.layers, lengths, strict=True):
        widest = max((_width(nodes[place]) for place in layer if isinstance(place, str)), default=_MIN_WIDTH)
        thickness = _HEIGHT if is_vertical else widest
        at = _MARGIN + (longest - length) / 2
        for place in layer:
            size = length_of(place)
            boxes[place] = _Box(at, start, size, thickness) if is_vertical else _Box(start, at, thickness, size)
            at += size + _SPACE
        start += thickness + _GAP
    thick, long = max(start - _GAP, _HEIGHT) + _MARGIN, longest + 2 * _MARGIN
    return (boxes, long, thick) if is_vertical else (boxes, thick, long)


def _width(node: FlowNode) -> float:
    """Return the width of a node: that of its texts, within limits."""
    return (
        min(max(*map(text_width, _texts(node)), _MIN_WIDTH - 2 * _PADDING), _MAX_WIDTH - 2 * _PADDING) + 2 * _PADDING
    )


def _texts(node: FlowNode) -> tuple[str, str]:
    """Return the label, and the text below it."""
    below = node.note or node.kind
    return shorten(node.label or node.name, 100), f"{below}, removed" if node.is_removed else below


def _edge(route: Sequence[_Box], label: str, is_vertical: bool) -> Markup:
    """Return the line from the first box to the last one, through the middle of those between."""

    def point(along: float, across: float) -> str:
        return f"{across:g} {along:g}" if is_vertical else f"{along:g} {across:g}"

    def ends(box: _Box) -> tuple[float, float, float]:
        """Return where a line enters and leaves a box, and its middle across."""
        if is_vertical:
            return box.y, box.y + box.height, box.x + box.width / 2
        return box.x, box.x + box.width, box.y + box.height / 2

    _, along, across = ends(route[0])
    way = [f"M{point(along, across)}"]
    for number, box in enumerate(route[1:], 2):
        first, last, next_across = ends(box)
        middle = (along + first) / 2
        way.append(f"C{point(middle, across)} {point(middle, next_across)} {point(first, next_across)}")
        if number < len(route):  # a waypoint: the line crosses its layer
            way.append(f"L{point(last, next_across)}")
        along, across = last, next_across
    hover = [element("title", label)] if label else []
    return element("path", *hover, d="".join(way), class_="edge line grey", fill="none", stroke_width=1.5)


def _node(node: FlowNode, box: _Box) -> Markup:
    place = {"x": box.x, "y": box.y, "width": box.width, "height": box.height, "rx": 6}
    frame = element(
        "rect",
        **place,
        class_=f"mark line {kind_colour(node.kind)}",
        stroke_width=2,
        stroke_dasharray="4 3" if node.is_removed else None,
    )
    label, below = _texts(node)
    x, room, middle = box.x + _PADDING, box.width - 2 * _PADDING, box.y + box.height / 2
    texts = [
        element("text", shorten_to_width(label, room), x=x, y=middle - 3 if below else middle + 4, class_="name")
    ]
    if below:
        texts.append(element("text", shorten_to_width(below, room), x=x, y=middle + 13, class_="quiet"))
    title = node.title or f"{node.kind} {node.label or node.name}".strip()
    back = element("rect", **place, class_="fill back")
    return element(
        "g", link(markup([element("title", title), back, frame, *texts]), node.href, title=title), class_="node"
    )


# The method is that of Sugiyama, Tagawa and Toda, "Methods for Visual Understanding of Hierarchical System
# Structures", 1981: longest paths give the layers, edges across several layers get a waypoint in each, and
# barycentres the order.


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
