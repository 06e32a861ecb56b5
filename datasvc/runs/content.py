"""`Content`: what the parts of a run log have, namely numbers by step and events, and how it is kept small."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

from datasvc.runs.facts import RunEvent, encode_event
from datasvc.runs.step_table import MAX_SHIFT, StepTable, concat

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
        event_counts: for each event, how many of its name it stands for: itself, and those that `thin` has left out
            before it. Not stored. Empty: one each.
    """

    tables: Sequence[StepTable] = ()
    events: Sequence[RunEvent] = ()
    num_left_out: int = 0
    event_counts: Sequence[int] = field(default=(), compare=False)

    def __bool__(self) -> bool:
        return bool(self.tables or self.events or self.num_left_out)

    @property
    def num_bins(self) -> int:
        """Number of bins of all tables."""
        return sum(map(len, self.tables))

    def thin(self, limits: ContentLimits) -> Content:
        """Return the content within `limits`; some bytes more, because each table keeps one bin.

        Bins of steps become equally long, a power of two of steps, and of events with the same name each 2^k-th one
        and the newest stay. So what is thinned often, as it grows, is as even as what is thinned once. Rare events
        stay complete.
        """
        tables = _thin_tables(self.tables, limits)
        counts = self.event_counts or [1] * len(self.events)
        events, counts = _thin_events(self.events, counts, [1] * len(counts), limits.num_events)
        sizes = [len(encode_event(event)) for event in events]
        events, counts = _thin_events(events, counts, sizes, limits.size_bytes)
        num_left_out = self.num_left_out + len(self.events) - len(events)
        num_left_out += sum(map(len, self.tables[len(tables) :]))
        return Content(tables, events, num_left_out, counts)


def merge(contents: Iterable[Content]) -> Content:
    """Combine consecutive contents of one attempt."""
    contents = list(contents)
    return Content(
        concat(table for content in contents for table in content.tables),
        [event for content in contents for event in content.events],
        sum(content.num_left_out for content in contents),
        [count for content in contents for count in content.event_counts or [1] * len(content.events)],
    )


def _thin_tables(tables: Sequence[StepTable], limits: ContentLimits) -> Sequence[StepTable]:
    """Return the first tables whose names fit into the limits, with fewer bins if need be."""
    names_bytes = accumulate(table.names_bytes for table in tables[:_MAX_TABLES])
    tables = tables[: sum(total <= limits.size_bytes for total in names_bytes)]
    room_bytes = limits.size_bytes - sum(table.names_bytes for table in tables)
    num_bins, shift = [len(table) for table in tables], 0
    size_bytes = sum(len(table) * table.bin_bytes for table in tables)
    while (sum(num_bins) > limits.num_bins or size_bytes > room_bytes) and shift < MAX_SHIFT:
        shift += 1
        num_bins = [table.count_bins(shift) for table in tables]
        size_bytes = sum(num * table.combined_bin_bytes for num, table in zip(num_bins, tables, strict=True))
    return [table.thin(shift) for table in tables] if shift else tables


def _thin_events(
    events: Sequence[RunEvent], counts: Sequence[int], weights: Sequence[int], max_weight: int
) -> tuple[Sequence[RunEvent], Sequence[int]]:
    """Return evenly spaced events of each name, whose weights are at most `max_weight` together, and their counts."""
    if sum(weights) <= max_weight:
        return events, counts
    by_name: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        by_name.setdefault(event.event, []).append(index)

    def weigh(indexes: Iterable[int]) -> int:
        return sum(weights[index] for index in indexes)

    kept: dict[int, int] = {}
    num_names_left, room = len(by_name), max_weight
    # The rarest first: what they leave of their equal shares is for the more frequent ones.
    for indexes in sorted(by_name.values(), key=weigh):
        share = max(1, room // num_names_left)
        # The number of each event among all that were reported with this name.
        numbers = dict(zip(indexes, accumulate(counts[index] for index in indexes), strict=True))
        chosen, shift = indexes, 0
        while len(chosen) > 1 and weigh(chosen) > share:
            shift += 1
            chosen = [*{(numbers[index] - 1) >> shift: index for index in chosen}.values()]  # the last of each group
        ends = [0, *(numbers[index] for index in chosen)]
        kept |= {index: end - before for index, (before, end) in zip(chosen, pairwise(ends), strict=True)}
        room, num_names_left = max(0, room - weigh(chosen)), num_names_left - 1
    # One event of each of very many names, or a few very large ones, can be too much: then the newest ones stay.
    order = sorted(kept, reverse=True)
    totals = accumulate(weights[index] for index in order)
    order = [index for index, total in zip(order, totals, strict=True) if total <= max_weight][::-1]
    return [events[index] for index in order], [kept[index] for index in order]
