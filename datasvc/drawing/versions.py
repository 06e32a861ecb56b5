"""The graph of versions: one lane per branch, newest on top, tags and branches as labels, removed versions hollow."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.drawing.colours import colour_class
from datasvc.drawing.elements import Markup, element, link, markup, shorten, svg, text_width
from datasvc.drawing.table import html_table

_ROW: Final = 24
_LANE: Final = 14
_MARGIN: Final = 14
_RADIUS: Final = 5
_MAX_LANES: Final = 24  # further branches share the last lane
_MAX_LABEL: Final = 40
_MAX_NOTE: Final = 80
_MAX_TAGS: Final = 6


@dataclass(frozen=True)
class VersionNode:
    """A version in a graph.

    Attributes:
        name: its reference, such as "pets@3"; unique in the graph.
        parents: names of the versions it was made from. One that is not in the graph is drawn as a dashed end.
        tags: its tags.
        note: short text behind it, such as its message.
        href: address of its page.
        is_removed: whether it was removed.
        title: text on hover; by default its name, parents and note.
        branches: names of the branches that it is the head of.
    """

    name: str
    parents: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    note: str = ""
    href: str | None = None
    is_removed: bool = False
    title: str = ""
    branches: tuple[str, ...] = ()


def version_graph(
    nodes: Sequence[VersionNode],
    *,
    start: int = 0,
    limit: int = 200,
    title: str = "versions",
    more_href: str | None = None,
) -> Markup:
    """Return the graph of versions as SVG.

    Args:
        nodes: all versions, newest first, children before their parents.
        start: number of the first version to draw.
        limit: maximum number of versions to draw. Lanes are those of the complete graph, so pages fit together.
        title: name of the picture.
        more_href: address of the older versions that are left out.
    """
    lanes, edges = plan_lanes([node.name for node in nodes], [node.parents for node in nodes])
    shown = range(start, min(start + limit, len(nodes)))
    used = [min(lanes[row], _MAX_LANES - 1) for row in shown]
    visible = [edge for edge in edges if edge.child < shown.stop and edge.parent >= start]
    used += [min(edge.travel, _MAX_LANES - 1) for edge in visible]
    text_x = _MARGIN + (max(used, default=0) + 1) * _LANE
    known = {node.name for node in nodes}
    lines = [_edge(edge, start) for edge in visible]
    stubs = [_stub(lanes[row], row - start) for row in shown if set(nodes[row].parents) - known]
    marks = [_node(nodes[row], lanes[row], row - start, text_x) for row in shown]
    num_older = len(nodes) - shown.stop
    if num_older > 0:
        text = element(
            "text",
            f"and {num_older:,} older version{'s' * (num_older > 1)}",
            x=text_x,
            y=len(shown) * _ROW + 16,
            class_="quiet",
        )
        marks.append(link(text, more_href))
    widths = [_row_width(nodes[row]) for row in shown]
    return svg(
        *lines,
        *stubs,
        *marks,
        width=text_x + max(widths, default=160) + _MARGIN,
        height=(len(shown) + (num_older > 0)) * _ROW + 8,
        title=title,
        description=f"{len(nodes):,} versions, newest first; {len(shown):,} shown",
        interactive=any(node.href for node in nodes) or more_href is not None,
    )


def version_table(
    nodes: Sequence[VersionNode], *, start: int = 0, limit: int = 200, caption: str = "versions"
) -> Markup:
    """Return the versions of `version_graph` as a table, a row for each."""
    rows = [
        (
            link(node.name, node.href),
            ", ".join([*node.tags, *(f"{branch} (branch)" for branch in node.branches)]),
            ", ".join(node.parents),
            "removed" if node.is_removed else "",
            node.note,
        )
        for node in nodes[start : start + limit]
    ]
    return html_table(["version", "tags", "parents", "state", "note"], rows, caption=caption)


def _x(lane: int) -> int:
    return _MARGIN + min(lane, _MAX_LANES - 1) * _LANE


def _y(row: int) -> int:
    return row * _ROW + _ROW // 2 + 4


def _edge(edge: LaneEdge, first_row: int) -> Markup:
    start, travel, stop = _x(edge.start), _x(edge.travel), _x(edge.stop)
    top, bottom = _y(edge.child - first_row), _y(edge.parent - first_row)
    half = _ROW // 2
    way = [f"M{start} {top}"]
    if bottom - top == _ROW:
        way.append(f"C{start} {top + half} {stop} {bottom - half} {stop} {bottom}")
    else:
        if travel != start:
            way.append(f"C{start} {top + half} {travel} {top + half} {travel} {top + _ROW}")
        way.append(f"V{bottom - _ROW}")
        way.append(f"C{travel} {bottom - half} {stop} {bottom - half} {stop} {bottom}")
    return element("path", d="".join(way), class_=f"line {colour_class(edge.travel)}", fill="none", stroke_width=2)


def _stub(lane: int, row: int) -> Markup:
    """Return the dashed end of a line whose parent is not in the graph."""
    return element(
        "path",
        d=f"M{_x(lane)} {_y(row)}v{_ROW - _RADIUS}",
        class_=f"line {colour_class(lane)}",
        stroke_width=2,
        stroke_dasharray="2 3",
    )


def _node(node: VersionNode, lane: int, row: int, text_x: int) -> Markup:
    x, y, colour = _x(lane), _y(row), colour_class(lane)
    circles = [element("circle", cx=x, cy=y, r=_RADIUS, class_=f"mark fill {'back' if node.is_removed else colour}")]
    if node.is_removed:
        circles.append(element("circle", cx=x, cy=y, r=_RADIUS, class_=f"line {colour}", stroke_width=2))
    title = node.title or "; ".join(
        filter(None, [node.name, ", ".join(node.parents) and f"from {', '.join(node.parents)}", node.note])
    )
    label = _label(node)
    named = link(
        markup([element("title", title), *circles, element("text", label, x=text_x, y=y + 4, class_="name")]),
        node.href,
        title=node.name,
    )
    x_next = text_x + text_width(label) + 12
    boxes = []
    for text, colour_of_label in _labels(node, colour):
        boxes.append(_box(text, x_next, y, colour_of_label))
        x_next += text_width(text) + 16
    note = (
        element("text", shorten(node.note, _MAX_NOTE), x=x_next, y=y + 4, class_="quiet") if node.note else Markup()
    )
    return element("g", named, *boxes, note, class_="node")


def _label(node: VersionNode) -> str:
    return shorten(node.name, _MAX_LABEL) + (" (removed)" if node.is_removed else "")


def _labels(node: VersionNode, lane_colour: str) -> list[tuple[str, str]]:
    """Return the text and the colour of each label; that of a branch has the colour of its lane."""
    tags = [(shorten(tag, _MAX_LABEL), "accent") for tag in node.tags[:_MAX_TAGS]]
    if len(node.tags) > _MAX_TAGS:
        tags.append((f"and {len(node.tags) - _MAX_TAGS} more", "accent"))
    branches = [(shorten(branch, _MAX_LABEL), lane_colour) for branch in node.branches[:_MAX_TAGS]]
    if len(node.branches) > _MAX_TAGS:
        branches.append((f"and {len(node.branches) - _MAX_TAGS} more", lane_colour))
    return [*branches, *tags]


def _box(text: str, x: float, y: int, colour: str) -> Markup:
    width = text_width(text) + 10
    kind = "tag" if colour == "accent" else "branch"
    return element(
        "g",
        element(
            "rect",
            x=x,
            y=y - 9,
            width=width,
            height=18,
            rx=4 if kind == "tag" else 9,
            class_=f"line {colour}",
            fill="none",
        ),
        element("text", text, x=x + width / 2, y=y + 4, text_anchor="middle"),
        class_=kind,
    )


def _row_width(node: VersionNode) -> float:
    boxes = sum(text_width(text) + 16 for text, _ in _labels(node, ""))
    return text_width(_label(node)) + 12 + boxes + text_width(shorten(node.note, _MAX_NOTE))


@dataclass(frozen=True)
class LaneEdge:
    """A line from a version down to a parent.

    Attributes:
        child: row of the version.
        parent: row of the parent, below.
        start: lane of the version.
        travel: lane in which the line runs between the two rows.
        stop: lane of the parent.
    """

    child: int
    parent: int
    start: int
    travel: int
    stop: int


def plan_lanes(names: Sequence[str], parents: Sequence[Sequence[str]]) -> tuple[list[int], list[LaneEdge]]:
    """Return the lane of each row, 0 on the left, and the lines in order of their lower ends.

    Args:
        names: names of the versions, newest first; each once.
        parents: for each version, the names of its parents. None has a line that is not in `names`, or is in an
            earlier row.
    """
    known = set(names)
    waiting: dict[str, list[tuple[int, int, int]]] = defaultdict(
        list
    )  # for each parent: child, start and travel of its lines
    owners: dict[int, str] = {}  # for each lane in use, the parent that it leads to
    free: list[int] = []
    drawn: set[str] = set()
    lanes: list[int] = []
    edges: list[LaneEdge] = []

    def take_lane(owner: str) -> int:
        lane = heapq.heappop(free) if free else len(owners)
        owners[lane] = owner
        return lane

    for row, (name, own_parents) in enumerate(zip(names, parents, strict=True)):
        lines = waiting.pop(name, [])
        ending = sorted({travel for _, _, travel in lines})
        lane = ending[0] if ending else take_lane(name)
        edges += [LaneEdge(child, row, start, travel, lane) for child, start, travel in lines]
        drawn.add(name)
        lanes.append(lane)
        undrawn = [parent for parent in dict.fromkeys(own_parents) if parent in known and parent not in drawn]
        for number, parent in enumerate(undrawn):
            # The first parent continues the lane of the version. Others join a lane that leads there already.
            joined = [travel for _, _, travel in waiting[parent]]
            travel = lane if number == 0 else joined[0] if joined else take_lane(parent)
            owners[travel] = parent
            waiting[parent].append((row, lane, travel))
        for ended in ending[1:] if undrawn else {lane, *ending}:
            del owners[ended]
            heapq.heappush(free, ended)
    return lanes, edges
