"""Plans the lanes of a graph of versions: the column of each node and the lines between, as in `git log --graph`."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


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
