"""Reads run logs: `list_runs`, `read_run` and `follow_run`. Readers need no lock: parts never change.

A part appears before those that it replaces disappear. If a reader finds that a listed part is gone, it lists the
folder again. A newer attempt replaces the steps that it repeats.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from datasvc.errors import ConfigError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository import Repository
from datasvc.repository.logs.log import Log
from datasvc.repository.logs.references import check_name, is_name
from datasvc.repository.store.storage import Storage
from datasvc.runs.content import STEP
from datasvc.runs.facts import RunEvent, to_number
from datasvc.runs.history import RunHistory, RunSummary, summarize
from datasvc.runs.part import READS_AT_ONCE, Part, PartRange, choose_parts, read_parts
from datasvc.runs.run_folders import RUNS, check_run_id, is_run_id, parse_run, run_folder
from datasvc.runs.step_table import Series, StepTable
from datasvc.threads import map_in_threads

_LISTINGS: Final = 8  # how often a reader lists a folder again while its parts are replaced
_HEADER: Final = re.compile(r"(\d{8,18})\.json")
_CURSOR: Final = re.compile(r"(\d{1,18}):(\d{1,18}):(\d{1,15}\.\d{3})")


_Written = tuple[PartRange, StepTable]  # a table, and the part that has it
_Column = tuple[PartRange, StepTable, int]


def list_runs(repository: Repository, name: str | None = None, *, last: int | None = None) -> list[RunSummary]:
    """Return the runs of a repository, newest first.

    This lists the folders of names and runs, and reads one small file of each run that it returns.

    Args:
        repository: repository with the logs.
        name: only runs of this name.
        last: only so many of the newest runs; None: all.

    Raises:
        ConfigError: `name` is not valid.
        UnavailableError: the store does not respond.
    """
    storage = repository.storage
    runs = list_run_ids(repository, name)[:last]
    now_s = time.time()

    def read(run: tuple[str, str]) -> RunSummary | None:
        return read_summary(storage, run[1], run[0], now_s)

    found = list(map(read, runs)) if storage.is_local else map_in_threads(read, runs, READS_AT_ONCE)
    return [summary for summary in found if summary is not None]


def list_run_ids(repository: Repository, name: str | None = None) -> list[tuple[str, str]]:
    """Return the identifier and the name of each run, newest first; no log is read. For errors, see `list_runs`."""
    storage = repository.storage
    names = [found for found in storage.list(RUNS) if is_name(found)] if name is None else [check_name(name, "run")]
    runs = [(run_id, found) for found in names for run_id in storage.list(f"{RUNS}/{found}") if is_run_id(run_id)]
    return sorted(runs, reverse=True)


def resolve_run(repository: Repository, ref: str) -> tuple[str, str]:
    """Return the name and the identifier of a run from `NAME/ID`, or of the newest run from `NAME`.

    Raises:
        ConfigError: `ref` is no such reference.
        NotFoundError: there is no such run; the message lists those that exist.
        UnavailableError: the store does not respond.
    """
    name, run_id = parse_run(ref)
    ids = [found for found in repository.storage.list(f"{RUNS}/{name}") if is_run_id(found)]
    if run_id is None and ids:
        return name, max(ids)
    if run_id is None or run_id not in ids:
        existing = [f"{name}/{found}" for found in sorted(ids)[-5:]]
        existing = existing or [found for found in repository.storage.list(RUNS) if is_name(found)]
        listed = ", ".join(existing) or "no run; datasvc train writes one, unless --no-run-log is given"
        raise NotFoundError(f"there is no run {ref!r} in {repository.storage.location('')}; it has {listed}")
    return name, run_id


def read_run(repository: Repository, name: str, run_id: str) -> RunHistory:
    """Return what the log of a run has; for errors, see `follow_run`."""
    return follow_run(repository, name, run_id, "")


def follow_run(repository: Repository, name: str, run_id: str, after: str) -> RunHistory:
    """Return what the log of a run has after the `cursor` of an earlier result; "" returns all.

    The summary and the headers are complete. If the number of attempts has grown, steps of the newer attempt may
    replace those that were returned before: read the run again.

    Args:
        repository: repository with the log.
        name: name of the run.
        run_id: identifier of the run.
        after: cursor.

    Raises:
        ConfigError: `name`, `run_id` or `after` is not valid.
        NotFoundError: there is no such run.
        UnavailableError: the store does not respond.
    """
    check_name(name, "run")
    check_run_id(run_id)
    since = _parse_cursor(after)
    storage, folder = repository.storage, run_folder(name, run_id)
    for _ in range(_LISTINGS):
        files = storage.list(folder)
        if not files:
            resolve_run(repository, f"{name}/{run_id}")
        ranges = choose_parts(files)
        # The newest part is always read, for the state of the run.
        wanted = [part for part in ranges if (part.attempt, part.last) > (since.attempt, since.part)] or ranges[-1:]
        parts, problems = read_parts(storage, folder, wanted)
        if parts is not None:
            break
    else:
        raise ConfigError(f"{storage.location(folder)} changed in each of {_LISTINGS} readings; try again")
    numbers = _attempts(files)
    headers, errors = Log(storage, folder).try_entries(numbers)
    series, evaluation, events = combine(parts, since)
    summary = _summarize(name, run_id, ranges, parts, problems, len(numbers), time.time())
    if summary.num_lost:
        problems.append(f"{count_text(summary.num_lost, 'event')} of the last attempt could not be written")
    num_left_out = sum(part.content.num_left_out for part in parts)
    if num_left_out:
        problems.append(
            f"{count_text(num_left_out, 'event')} left out to keep the log small: of events that are reported very "
            "often, it has evenly spaced ones, and of a step the first 1,024 numbers"
        )
    cursor = _cursor_after(ranges, parts, since).encode()
    problems = [*map(str, errors.values()), *problems]
    contents = {entry.number: entry.content for entry in headers}
    return RunHistory(summary, contents, series, evaluation, events, problems, cursor)


def read_summary(storage: Storage, name: str, run_id: str, now_s: float) -> RunSummary | None:
    """Return the summary of a run at a time in seconds since 1970, or None if it no longer exists."""
    folder = run_folder(name, run_id)
    for _ in range(_LISTINGS):
        files = storage.list(folder)
        ranges = choose_parts(files)
        if not files:
            return None
        parts, problems = read_parts(storage, folder, ranges[-1:])
        if parts is not None:
            return _summarize(name, run_id, ranges, parts, problems, len(_attempts(files)), now_s)
    return None


def _summarize(
    name: str,
    run_id: str,
    ranges: Sequence[PartRange],
    parts: Sequence[Part],
    problems: Sequence[str],
    num_attempts: int,
    now_s: float,
) -> RunSummary:
    """Return the summary of a run; if its newest part cannot be read, its state says so."""
    summary = summarize(name, run_id, parts[-1].head if parts else None, num_attempts, now_s)
    if ranges and (not parts or parts[-1].range != ranges[-1]):
        return replace(summary, state="not responding", message=problems[-1])
    return summary


def _attempts(files: Sequence[str]) -> list[int]:
    """Return the numbers of the attempts that have a header, ascending."""
    return sorted(int(match[1]) for name in files if (match := _HEADER.fullmatch(name)))


def _cursor_after(ranges: Sequence[PartRange], parts: Sequence[Part], since: Since) -> Since:
    if not ranges:
        return since
    newest = ranges[-1]
    times = [0.0 if newest.attempt != since.attempt else since.time_s]
    for part in parts:
        if part.range.attempt == newest.attempt:
            times += [float(table.times.max()) for table in part.content.tables if len(table)]
            times += [event.time_s for event in part.content.events]
    return Since(newest.attempt, newest.last, max(times))


def _parse_cursor(text: str) -> Since:
    if not text:
        return Since()
    match = _CURSOR.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is no cursor of a run; pass the `cursor` of an earlier result")
    return Since(int(match[1]), int(match[2]), float(match[3]))


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
