"""`Content`: what parts of a run log hold, namely numbers by step and events, and how it is kept small."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from datasvc.runs.facts import RunEvent
from datasvc.runs.step_table import StepTable, concat

STEP: Final = "step"
"""Name of the events whose numbers become curves."""
# A program that reports other names in each step would make a table for each step.
_MAX_TABLES: Final = 32


@dataclass(frozen=True)
class ContentLimits:
    """How much `Content.thin` keeps.

    Attributes:
        num_bins: number of bins of all tables.
        num_events: number of events.
        size_bytes: bytes of JSON of the tables, and as many of the events.
    """

    num_bins: int
    num_events: int
    size_bytes: int


@dataclass(frozen=True)
class Content:
    """Numbers by step and events, both in the order in which they were reported.

    Attributes:
        tables: numbers of the `step` events; one table for each set of names.
        events: all other events.
        num_left_out: number of events that `thin` has left out, or that have lost some of their names.
    """

    tables: Sequence[StepTable] = ()
    events: Sequence[RunEvent] = ()
    num_left_out: int = 0

    def __bool__(self) -> bool:
        return bool(self.tables or self.events or self.num_left_out)

    @property
    def num_bins(self) -> int:
        """Number of bins of all tables."""
        return sum(map(len, self.tables))

    @property
    def num_events(self) -> int:
        """Number of events, those of steps included, that were reported for this content."""
        return sum(int(table.counts.sum()) for table in self.tables) + len(self.events) + self.num_left_out

    def thin(self, limits: ContentLimits) -> Content:
        """Return the content within `limits`; some bytes more, because each table keeps one bin.

        Of events with the same name, evenly spaced ones stay, the newest among them. Rare events stay complete.
        """
        tables = _thin_tables(self.tables, limits)
        events = _thin_events(self.events, [1] * len(self.events), limits.num_events)
        events = _thin_events(events, [len(json.dumps(event.to_json())) for event in events], limits.size_bytes)
        num_left_out = self.num_left_out + len(self.events) - len(events)
        return Content(tables, events, num_left_out + sum(map(len, self.tables[len(tables) :])))


def merge(contents: Iterable[Content]) -> Content:
    """Combine the contents of consecutive parts."""
    contents = list(contents)
    return Content(
        concat(table for content in contents for table in content.tables),
        [event for content in contents for event in content.events],
        sum(content.num_left_out for content in contents),
    )


def _thin_tables(tables: Sequence[StepTable], limits: ContentLimits) -> Sequence[StepTable]:
    """Return the first tables whose names fit into the limits, with fewer bins if need be."""
    names_bytes = accumulate(table.names_bytes for table in tables[:_MAX_TABLES])
    tables = tables[: sum(total <= limits.size_bytes for total in names_bytes)]
    room_bytes = limits.size_bytes - sum(table.names_bytes for table in tables)
    num_bins = sum(map(len, tables))
    size_bytes = sum(len(table) * table.bin_bytes for table in tables)
    if num_bins <= limits.num_bins and size_bytes <= room_bytes:
        return tables
    size_bytes = sum(len(table) * table.combined_bin_bytes for table in tables)
    share = min(limits.num_bins / num_bins, room_bytes / size_bytes)
    return [table.thin(max(1, int(share * len(table)))) for table in tables]


def _thin_events(events: Sequence[RunEvent], weights: Sequence[int], max_weight: int) -> Sequence[RunEvent]:
    """Return evenly spaced events of each name, whose weights are at most `max_weight` together."""
    if sum(weights) <= max_weight:
        return events
    by_name: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        by_name.setdefault(event.event, []).append(index)

    def weigh(indexes: Sequence[int]) -> int:
        return sum(weights[index] for index in indexes)

    kept: list[int] = []
    num_names_left, room = len(by_name), max_weight
    # The rarest first: what they leave of their equal shares is for the more frequent ones.
    for indexes in sorted(by_name.values(), key=weigh):
        share = max(1, room // num_names_left)
        stride = -(-weigh(indexes) // share)
        while len(chosen := indexes[::-1][::stride]) > 1 and weigh(chosen) > share:
            stride += 1
        kept += chosen
        room, num_names_left = max(0, room - weigh(chosen)), num_names_left - 1
    # One event of each of very many names, or a few very large ones, can be too much: then the newest ones stay.
    kept.sort(reverse=True)
    totals = accumulate(weights[index] for index in kept)
    return [events[index] for index, total in zip(kept, totals, strict=True) if total <= max_weight][::-1]
