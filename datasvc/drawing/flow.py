"""The graph of a lineage, from left to right: sources, shards, data versions, runs and models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.drawing.colours import colour_class
from datasvc.drawing.elements import Markup, element, link, markup, shorten, svg
from datasvc.drawing.layers import LayerPlan, Place, plan_layers
from datasvc.drawing.table import html_table
from datasvc.printable import count_text

_WIDTH: Final = 190
_GAP: Final = 60
_HEIGHT: Final = 40
_ROW: Final = 52
_MARGIN: Final = 10
_MAX_LABEL: Final = 24


@dataclass(frozen=True)
class FlowNode:
    """A node of a flow graph.

    Attributes:
        name: unique in the graph.
        label: shown text; by default the name.
        column: the lowest layer in which it is drawn, from 0; nodes of one kind have one.
        kind: what it is, such as "data version"; below the label.
        href: address of its page.
        is_removed: whether it no longer exists; its frame is dashed.
        title: text on hover; by default kind and name.
    """

    name: str
    label: str = ""
    column: int = 0
    kind: str = ""
    href: str | None = None
    is_removed: bool = False
    title: str = ""


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
    nodes: Sequence[FlowNode], edges: Sequence[FlowEdge], *, max_per_column: int = 12, title: str = "lineage"
) -> Markup:
    """Return a graph in layers as SVG; every edge leads from left to right.

    Args:
        nodes: all nodes; the first of each column are drawn.
        edges: those of other nodes, and of a cycle the last one, are left out.
        max_per_column: further nodes of a column become one, "and 312 more".
        title: name of the picture.
    """
    collapsed = _collapse(nodes, max_per_column)
    by_name = {node.name: node for node in collapsed.values()}
    merged: dict[tuple[str, str], str] = {}
    for edge in edges:
        if edge.source in collapsed and edge.target in collapsed:
            merged.setdefault((collapsed[edge.source].name, collapsed[edge.target].name), edge.label)
    plan = plan_layers({name: node.column for name, node in by_name.items()}, merged)
    num_rows = max(map(len, plan.layers), default=0)
    at = _coordinates(plan, num_rows)
    lines = [_edge([at[name] for name in route], merged[ends]) for ends, route in plan.routes.items()]
    colours = {kind: colour_class(number) for number, kind in enumerate(dict.fromkeys(node.kind for node in nodes))}
    marks = [_node(node, at[name], colours.get(node.kind, "grey")) for name, node in by_name.items()]
    return svg(
        *lines,
        *marks,
        width=2 * _MARGIN + max(len(plan.layers), 1) * (_WIDTH + _GAP) - _GAP,
        height=2 * _MARGIN + max(num_rows, 1) * _ROW,
        title=title,
        description=f"{count_text(len(nodes), 'node')} and {count_text(len(edges), 'edge')}, from left to right",
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


def _coordinates(plan: LayerPlan, num_rows: int) -> dict[Place, tuple[float, float]]:
    """Return the left end of each node, in the middle of its height; layers are centred."""
    return {
        name: (
            _MARGIN + number * (_WIDTH + _GAP),
            _MARGIN + (row + 0.5 + (num_rows - len(layer)) / 2) * _ROW,
        )
        for number, layer in enumerate(plan.layers)
        for row, name in enumerate(layer)
    }


def _edge(route: Sequence[tuple[float, float]], label: str) -> Markup:
    (x, y), *others = route
    way = [f"M{x + _WIDTH:g} {y:g}"]
    for next_x, next_y in others:
        middle = next_x - _GAP / 2
        way.append(f"C{middle:g} {y:g} {middle:g} {next_y:g} {next_x:g} {next_y:g}")
        if (next_x, next_y) != others[-1]:  # a waypoint: the line crosses its layer
            way.append(f"H{next_x + _WIDTH:g}")
        y = next_y
    hover = [element("title", label)] if label else []
    return element("path", *hover, d="".join(way), class_="edge line grey", fill="none", stroke_width=1.5)


def _node(node: FlowNode, at: tuple[float, float], colour: str) -> Markup:
    x, y = at
    frame = element(
        "rect",
        x=x,
        y=y - _HEIGHT / 2,
        width=_WIDTH,
        height=_HEIGHT,
        rx=6,
        class_=f"mark line {colour}",
        stroke_width=1.5,
        stroke_dasharray="4 3" if node.is_removed else None,
    )
    label = shorten(node.label or node.name, _MAX_LABEL)
    kind = f"{node.kind}, removed" if node.is_removed else node.kind
    texts = [element("text", label, x=x + 10, y=y - 2 if kind else y + 4)]
    if kind:
        texts.append(element("text", shorten(kind, _MAX_LABEL), x=x + 10, y=y + 14, class_="quiet", font_size=11))
    full = node.label or node.name
    title = node.title or f"{node.kind} {full}".strip()
    back = element("rect", x=x, y=y - _HEIGHT / 2, width=_WIDTH, height=_HEIGHT, rx=6, class_="fill back")
    return element(
        "g", link(markup([element("title", title), back, frame, *texts]), node.href, title=title), class_="node"
    )
