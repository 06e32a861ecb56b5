"""`Content`: what parts of a run log hold, namely numbers by step and events, and how it is kept small."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from datasvc.runs.facts import RunEvent, make_event, to_name, to_number
from datasvc.runs.step_table import StepTable, concat

STEP: Final = "step"
"""Name of the events whose numbers become curves."""
# A program that reports other names in each step would make a table for each step.
_MAX_TABLES: Final = 32
_MAX_VERSIONS: Final = 100
_MAX_STEP: Final = (1 << 63) - 1
_Row = tuple[int, float, tuple[float, ...]]


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


@dataclass
class Collector:
    """Collects reported events until the next part is written.

    Attributes:
        latest: newest value of each fact of the `step` events.
        versions: model versions that `checkpoint` events named, oldest first; the last `_MAX_VERSIONS`.
    """

    latest: dict[str, Any] = field(default_factory=dict)
    versions: list[str] = field(default_factory=list)
    _rows: dict[tuple[str, ...], list[_Row]] = field(default_factory=dict)
    _events: list[RunEvent] = field(default_factory=list)
    _content: Content = field(default_factory=Content)
    _newest_s: float = 0.0
    _floor_s: float = 0.0

    @property
    def has_content(self) -> bool:
        """Whether `take` returns anything."""
        return bool(self._content)

    def add(self, time_s: float, event: str, facts: dict[str, Any]) -> None:
        """Add a reported event."""
        # Times do not fall, whatever the clock does, and those of two parts differ: readers continue after a time.
        self._newest_s = time_s = max(round(time_s, 3), self._newest_s, self._floor_s)
        if _is_step(event, facts):
            numbers = {name: number for name, value in facts.items() if (number := to_number(value)) is not None}
            numbers.pop(STEP, None)
            self._rows.setdefault(tuple(numbers), []).append((facts[STEP], time_s, tuple(numbers.values())))
            self.latest = facts
            return
        made = make_event(time_s, event, facts)
        version = made.facts.get("version")
        if made.event == "checkpoint" and isinstance(version, str):
            self.versions = [*self.versions, version][-_MAX_VERSIONS:]
        self._events.append(made)

    def compact(self, max_bins: int, max_events: int) -> None:
        """Reduce what was collected to limited numbers of bins and events, see `Content.thin`."""
        if not self._rows and not self._events:
            return
        tables = [StepTable.from_rows(tuple(map(to_name, names)), rows) for names, rows in self._rows.items()]
        self._content = merge([self._content, Content(tables, self._events)]).thin(max_bins, max_events)
        self._rows, self._events = {}, []

    def take(self) -> Content:
        """Return what `compact` has left, and begin anew."""
        content, self._content = self._content, Content()
        self._floor_s = round(self._newest_s + 0.001, 3)
        return content


def _is_step(event: object, facts: dict[str, Any]) -> bool:
    """Return whether an event is a `step` event with a valid number of the step."""
    step = facts.get(STEP)
    return event == STEP and type(step) is int and 0 <= step <= _MAX_STEP


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
