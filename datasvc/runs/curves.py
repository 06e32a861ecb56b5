"""Combines the parts of a run to curves and events: a newer attempt replaces what it repeats. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datasvc.runs.content import STEP
from datasvc.runs.facts import RunEvent, to_number
from datasvc.runs.history import Series
from datasvc.runs.part import Part, PartRange
from datasvc.runs.step_table import StepTable

_Written = tuple[PartRange, StepTable]  # a table, and the part that has it
_Column = tuple[PartRange, StepTable, int]


@dataclass(frozen=True)
class Since:
    """Where a reader stopped: at a part of an attempt, and at the time of its newest event."""

    attempt: int = 0
    part: int = 0
    time_s: float = 0.0

    def encode(self) -> str:
        """Return the cursor as text."""
        return f"{self.attempt}:{self.part}:{self.time_s:.3f}"


def combine(parts: Sequence[Part], since: Since) -> tuple[dict[str, Series], dict[str, Series], list[RunEvent]]:
    """Return the series of steps, those of evaluations, and the events, of what `parts` have after `since`."""
    tables: list[_Written] = []
    evaluations: list[_Written] = []
    events: list[RunEvent] = []
    first_step: float = math.inf  # of the attempts that are newer than that of the part
    by_attempt: dict[int, list[Part]] = {}
    for part in parts:
        by_attempt.setdefault(part.range.attempt, []).append(part)
    for attempt in sorted(by_attempt, reverse=True):
        new_tables: list[_Written] = []
        new_evaluations: list[_Written] = []
        new_events: list[RunEvent] = []
        first_steps = [first_step]
        for part in by_attempt[attempt]:
            # A reader that stopped inside of what is now one part has seen some of it.
            is_seen = attempt == since.attempt and part.range.first <= since.part
            after_s = since.time_s if is_seen else -math.inf
            content = part.content
            new_tables += [
                (part.range, table.select((table.last < first_step) & (table.times > after_s)))
                for table in content.tables
            ]
            part_events = [event for event in content.events if event.time_s > after_s]
            new_evaluations += [
                (part.range, _evaluation_table(event)) for event in part_events if _step_of(event) < first_step
            ]
            new_events += part_events
            first_steps += [int(table.first.min()) for table in content.tables if len(table)]
        tables = new_tables + tables
        evaluations = new_evaluations + evaluations
        events = new_events + events
        first_step = min(first_steps)
    return _series(tables), _series(evaluations), events


def _step_of(event: RunEvent) -> float:
    step = event.facts.get(STEP)
    is_evaluation = event.event == "evaluation" and type(step) is int and 0 <= step < 1 << 63
    return float(step) if is_evaluation and step is not None else math.inf


def _evaluation_table(event: RunEvent) -> StepTable:
    numbers = {name: number for name, value in event.facts.items() if (number := _metric(value)) is not None}
    numbers.pop(STEP, None)
    row = (event.facts[STEP], event.time_s, tuple(numbers.values()))
    return StepTable.from_rows(tuple(numbers), [row])


def _metric(value: Any) -> float | None:
    """Return the number in a fact: a text such as "nan" stands for a number that is not finite."""
    return float(value) if value in ("nan", "inf", "-inf") else to_number(value)


def _series(tables: Iterable[_Written]) -> dict[str, Series]:
    columns: dict[str, list[_Column]] = {}
    for part, table in tables:
        for index, name in enumerate(table.names):
            columns.setdefault(name, []).append((part, table, index))
    return {name: _join(column) for name, column in columns.items() if any(len(table) for _, table, _ in column)}


def _join(column: Sequence[_Column]) -> Series:
    """Return the series of one name, ascending by step, from a column of each table; oldest parts first."""
    steps, times = (np.concatenate([getattr(table, field) for _, table, _ in column]) for field in ("last", "times"))
    # Attempts run on machines whose clocks differ, so the order of the parts decides which report of a step is the
    # last. Times decide only between the tables of one part: within an attempt they do not fall.
    parts = {part: place for place, part in enumerate(dict.fromkeys(part for part, _, _ in column))}
    places = np.repeat([parts[part] for part, _, _ in column], [len(table) for _, table, _ in column])
    order = np.lexsort((times, places, steps))
    # Of a step that was reported more than once, the last report counts.
    order = order[np.append(steps[order][1:] != steps[order][:-1], True)]
    mean, low, high = (
        np.concatenate([getattr(table, field)[:, index] for _, table, index in column])[order]
        for field in ("mean", "low", "high")
    )
    counts = np.concatenate([table.counts for _, table, _ in column])[order]
    return Series(steps[order], mean, low, high, times[order], counts)
