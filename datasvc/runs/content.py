"""`Content`: what parts of a run log hold, namely numbers by step and events, and how it is kept small."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.runs.facts import RunEvent
from datasvc.runs.step_table import StepTable, concat

STEP: Final = "step"
"""Name of the events whose numbers become curves."""
# A program that reports other names in each step would make a table for each step.
_MAX_TABLES: Final = 32


@dataclass(frozen=True)
class Content:
    """Numbers by step and events, both in the order in which they were reported.

    Attributes:
        tables: numbers of the `step` events; one table for each set of names.
        events: all other events.
        num_left_out: number of events that `thin` has left out.
    """

    tables: Sequence[StepTable] = ()
    events: Sequence[RunEvent] = ()
    num_left_out: int = 0

    def __bool__(self) -> bool:
        return bool(self.tables or self.events or self.num_left_out)

    def thin(self, max_bins: int, max_events: int) -> Content:
        """Return the content with at most `max_bins` bins, and about `max_events` events.

        Of events with the same name, evenly spaced ones stay, the newest among them. Rare events stay complete.
        """
        tables = self.tables[:_MAX_TABLES]
        num_bins = sum(map(len, tables))
        if num_bins > max_bins:
            tables = [table.thin(max(1, max_bins * len(table) // num_bins)) for table in tables]
        events = _thin_events(self.events, max_events)
        num_left_out = self.num_left_out + len(self.events) - len(events)
        return Content(tables, events, num_left_out + sum(len(table) for table in self.tables[_MAX_TABLES:]))


def merge(contents: Iterable[Content]) -> Content:
    """Combine the contents of consecutive parts."""
    contents = list(contents)
    return Content(
        concat(table for content in contents for table in content.tables),
        [event for content in contents for event in content.events],
        sum(content.num_left_out for content in contents),
    )


def _thin_events(events: Sequence[RunEvent], max_events: int) -> Sequence[RunEvent]:
    if len(events) <= max_events:
        return events
    by_name: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        by_name.setdefault(event.event, []).append(index)
    kept: list[int] = []
    num_names_left, room = len(by_name), max_events
    # The rarest first: what they leave of their equal shares is for the more frequent ones.
    for indexes in sorted(by_name.values(), key=len):
        share = max(1, room // num_names_left)
        stride = -(-len(indexes) // share)
        chosen = indexes[::-1][::stride]
        kept += chosen
        room, num_names_left = max(0, room - len(chosen)), num_names_left - 1
    return [events[index] for index in sorted(kept)[-2 * max_events :]]
