"""`Collector`: turns reported events into the content of the next part. The thread of the log is its only user."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from datasvc.runs.content import STEP, Content, ContentLimits, merge
from datasvc.runs.facts import RunEvent, make_event, to_name, to_number, to_text
from datasvc.runs.step_table import MAX_NAMES, StepTable

MAX_VERSIONS: Final = 100
_MAX_RANKS: Final = 8
_MAX_VERDICT_CHARS: Final = 1000
_MAX_NAME_CHARS: Final = 200
BUSY: Final = "busy"
"""Name of the events that say what a program does while it takes no steps: its silence is then no stall.

They are a state, not a part of the history: heads of parts have the newest one until another event comes. One without
`work` ends it."""
STALLED: Final = "stalled"
"""Name of the events that say that ranks do not arrive: the watch reports them while the training hangs."""
_MAX_STEP: Final = (1 << 63) - 1
_Row = tuple[int, float, tuple[float, ...]]


@dataclass
class Collector:
    """Collects reported events until the next part is written.

    Attributes:
        latest: newest value of each fact of the `step` events.
        versions: model versions that `checkpoint` events named, oldest first; the last `MAX_VERSIONS`.
        warnings: fields of the head of a part that lists of runs show as problems, see docs/reference/formats.md.
        num_signs: number of events that show that the program goes on: all but `stalled`.
    """

    latest: dict[str, Any] = field(default_factory=dict)
    versions: list[str] = field(default_factory=list)
    warnings: dict[str, Any] = field(default_factory=dict)
    num_signs: int = 0
    _last_step_s: float | None = None
    _busy_since_s: float = 0.0
    _rows: dict[tuple[str, ...], list[_Row]] = field(default_factory=dict)
    _events: list[RunEvent] = field(default_factory=list)
    _content: Content = field(default_factory=Content)
    _num_cut: int = 0
    _newest_s: float = 0.0
    _floor_s: float = 0.0

    def continue_after(
        self, started_s: float, head: Mapping[str, Any], parent: str | None, unreported: Sequence[tuple[str, int]]
    ) -> None:
        """Begin with the head of the attempt before, and with the version that this one continues.

        `unreported` has version and step of each version that the attempt before did not report: this one does, as of
        its start, `started_s`.
        """
        self.latest = {**head.get("latest", {}), **self.latest}
        events = [
            make_event(round(started_s, 3), "checkpoint", {"version": version, "step": step})
            for version, step in unreported
        ]
        # In front: what this attempt has reported by now comes after them.
        self._content = merge([Content((), events), self._content])
        found = [version for version, _ in unreported] or ([] if parent is None else [parent])
        versions = dict.fromkeys([*head.get("versions", []), *found, *self.versions])
        self.versions = [*versions][-MAX_VERSIONS:]
        stalls = {name: head[name] for name in ("num_stalls", "last_stall_s") if name in head}
        self.warnings = {**stalls, **self.warnings}

    @property
    def has_content(self) -> bool:
        """Whether `take` returns anything."""
        return bool(self._content)

    def add(self, time_s: float, event: str, facts: dict[str, Any]) -> None:
        """Add a reported event."""
        # Times do not fall, whatever the clock does, and those of two parts differ: readers continue after a time.
        self._newest_s = time_s = max(round(time_s, 3), self._newest_s, self._floor_s)
        if event != STALLED:
            self.num_signs += 1
            self.warnings.pop(STALLED, None)
            self._end_busy(time_s)
        if _is_step(event, facts):
            if self._last_step_s is not None:
                self.warnings["step_interval_s"] = round(time_s - self._last_step_s, 3)
            self._last_step_s = time_s
            values = {
                name: number
                for name, value in facts.items()
                if (number := value if type(value) is float else to_number(value)) is not None
            }
            values.pop(STEP, None)
            if len(values) > MAX_NAMES:  # readers refuse a table with more
                values = dict(islice(values.items(), MAX_NAMES))
                self._num_cut += 1
            step = int(facts[STEP])
            self._rows.setdefault(tuple(values), []).append((step, time_s, tuple(values.values())))
            self.latest = {**facts, STEP: step}
            return
        if event == BUSY:
            if work := to_text(facts.get("work") or "", _MAX_NAME_CHARS):
                self.warnings[BUSY], self._busy_since_s = work, time_s
            return
        made = make_event(time_s, event, facts)
        version = made.facts.get("version")
        if made.event == "checkpoint" and isinstance(version, str):
            self.versions = [*self.versions, version][-MAX_VERSIONS:]
        self._note_warning(made)
        self._events.append(made)

    def _end_busy(self, time_s: float) -> None:
        if self.warnings.pop(BUSY, None) and self._last_step_s is not None:
            self._last_step_s += time_s - self._busy_since_s  # this time is not one between steps

    def _note_warning(self, event: RunEvent) -> None:
        if event.event == "stall":
            num_stalls = self.warnings.get("num_stalls", 0) + 1
            self.warnings |= {"num_stalls": num_stalls, "last_stall_s": event.time_s}
        elif event.event == "ranks":
            stragglers = event.facts.get("stragglers")
            self.warnings["stragglers"] = list(stragglers)[:_MAX_RANKS] if isinstance(stragglers, list) else []
        elif event.event == STALLED:
            ranks = event.facts.get("ranks")
            self.warnings[STALLED] = {
                "operation": to_text(event.facts.get("operation") or "", _MAX_NAME_CHARS),
                "ranks": list(ranks)[:_MAX_RANKS] if isinstance(ranks, list) else [],
            }
        elif event.event == "diagnosis":
            self.warnings["verdict"] = to_text(event.facts.get("verdict") or "", _MAX_VERDICT_CHARS)

    def compact(self, limits: ContentLimits, read_resources: Callable[[], Mapping[str, float]] = dict) -> None:
        """Reduce what was collected to `limits`, see `Content.thin`.

        `read_resources` is called if there are steps: its values become numbers of all steps since the last call.
        """
        if not self._rows and not self._events:
            return
        shared = read_resources() if self._rows else {}
        tables = [_make_table(names, rows, shared) for names, rows in self._rows.items()]
        self._content = merge([self._content, Content(tables, self._events, self._num_cut)]).thin(limits)
        self._rows, self._events, self._num_cut = {}, [], 0

    def take(self) -> Content:
        """Return what `compact` has left, and start with nothing."""
        content, self._content = self._content, Content()
        self._floor_s = round(self._newest_s + 0.001, 3)
        return content


def _make_table(names: tuple[str, ...], rows: list[_Row], shared: Mapping[str, float]) -> StepTable:
    """Return the table of some steps with the numbers that they share; those that were reported count."""
    added = {name: value for name, value in shared.items() if name not in names}
    if len(names) + len(added) > MAX_NAMES:  # readers refuse a table with more
        added = {}
    # In the same table, and not in one of their own: each step stays one bin.
    rows = [(step, time_s, (*values, *added.values())) for step, time_s, values in rows]
    return StepTable.from_rows((*map(to_name, names), *added), rows)


def _is_step(event: object, facts: dict[str, Any]) -> bool:
    """Return whether an event is a `step` event with a valid number of the step."""
    if event != STEP:
        return False
    step = facts.get(STEP)
    return (
        # Nearly every step is an `int`: the check of an abstract class takes longer.
        (type(step) is int or isinstance(step, numbers.Integral))
        and not isinstance(step, bool)
        and 0 <= int(step) <= _MAX_STEP
    )
