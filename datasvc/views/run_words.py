"""A run in words: its facts, what needs attention, and where the time of its steps goes. Pure.

Any program may have written the log: every value of it is checked, and is text until it is shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from datasvc.printable import count_text, text_value
from datasvc.runs.facts import RunEvent
from datasvc.runs.history import RunHistory, RunSummary
from datasvc.views.view import Fact, FactPart, fact, references

STEP_PARTS: Final[Mapping[str, str]] = {
    "wait_s": "waiting for data",
    "transfer_s": "transfer",
    "forward_s": "forward",
    "backward_s": "backward",
    "all_reduce_s": "all-reduce",
    "update_s": "update",
}
"""Curves with the parts of a step's time, in the order in which they are shown, with their titles."""
_RANKS_LISTED: Final = 8
_VERSIONS_LISTED: Final = 20
_CHANGES_LISTED: Final = 20
_NOT_TIMES: Final = frozenset({"rank", "num_ranks", "stragglers", "host", "step"})  # facts of a `ranks` event


@dataclass(frozen=True)
class RankComparison:
    """The newest comparison of the ranks of a run, stragglers first.

    Attributes:
        names: names of the times; `own_s`, the time that no other rank explains, comes first.
        rows: rank, host, whether it is a straggler, and its mean times in seconds; None for what is not a number.
        step: the step of the comparison.
        num_ranks: number of ranks; `rows` may have fewer.
    """

    names: list[str]
    rows: list[tuple[Any, Any, bool, list[float | None]]]
    step: Any
    num_ranks: int


def describe(history: RunHistory) -> str:
    """Return one sentence about a run: its outcome, how far it came, and what it has saved."""
    run = history.summary
    step = "before its first step" if run.step is None else f"at step {run.step:,}"
    message = f": {run.message}" if run.message else ""
    data = f" on {' + '.join(run.data)}" if run.data else ""
    saved = count_text(len(history.versions), "model version")
    return f"The run trained{data}, is {run.state} {step}{message}, and has saved {saved}."


def describe_stall(run: RunSummary) -> str | None:
    """Return why a run takes no steps although its program runs, and what to do; None if it is not stalled."""
    if not run.is_stalled:
        return None
    if run.stalled is not None:
        numbers = run.stalled["ranks"]
        ranks = f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else "some ranks"
        return (
            f"stalled: {ranks} did not submit {run.stalled['operation'] or 'an operation'}, and the other ranks "
            "wait. Look at the processes of these ranks (`py-spy dump --pid PID` shows where one hangs); with "
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS such a job ends by itself"
        )
    usual = "" if run.step_interval_s is None else f", where it reported a step every {run.step_interval_s:.3g} s"
    return (
        f"stalled: its program runs, but has reported nothing for {run.idle_s:,.0f} s by the clock of its machine"
        f"{usual}. `py-spy dump --pid PID` on that machine shows where it hangs"
    )


def describe_divergence(run: RunSummary) -> str | None:
    """Return in words, to be read after the name of the run, that its newest loss is not finite; None: it is."""
    loss = run.latest.get("loss")
    try:
        # Logs are JSON, which has no NaN, so they have these numbers as texts.
        if not isinstance(loss, int | float | str) or math.isfinite(float(loss)):
            return None
    except (ValueError, OverflowError):  # a text of another program, or an integer of 400 digits
        return None
    return (
        f"has diverged: its newest loss is {loss}. Continue from a version with finite weights, if there is "
        "one, or start again; with other settings"
    )


def warnings(history: RunHistory) -> list[str]:
    """Return what is wrong or slow: a hang, a diverged loss, starved loaders, stragglers, stalls, checkpoints."""
    found = [text for text in (describe_stall(history.summary), describe_divergence(history.summary)) if text]
    verdict = newest_fact(history, "diagnosis", "verdict")
    if isinstance(verdict, str) and verdict.startswith("starved"):
        found.append(verdict)
    stragglers = as_list(newest_fact(history, "ranks", "stragglers"))
    if stragglers:
        more = " and more" if len(stragglers) > _RANKS_LISTED else ""
        listed = ", ".join(map(text_value, stragglers[:_RANKS_LISTED]))
        found.append(f"the other ranks wait for rank {listed}{more}; the table of ranks has its host")
    counts = Counter(event.event for event in history.events)
    if counts["stall"]:
        found.append(f"{count_text(counts['stall'], 'step')} waited a second or longer for data")
    if counts["failed"]:
        found.append(f"{count_text(counts['failed'], 'checkpoint')} failed; the events have the errors")
    return found


def facts(history: RunHistory) -> list[Fact]:
    """Return the main facts of a run."""
    run, header = history.summary, history.header
    code, layout = as_mapping(header.get("code")), as_mapping(header.get("layout"))
    progress = as_number(run.latest.get("progress"))
    axes = ", ".join(f"{axis} {size}" for axis, size in layout.items() if size != 1)
    revision = code.get("revision")
    return [
        fact("run", run.ref),
        fact("state", run.state),
        fact("message", run.message),
        fact("step", FactPart(run.step, "number")),
        fact("progress", None if progress is None else f"{progress:.1%}"),
        fact("started", FactPart(time_text(run.started_s), "time")),
        fact("last written", FactPart(time_text(run.last_s), "time")),
        fact("attempts", FactPart(run.num_attempts, "number")),
        fact("data", *references("datasets", [ref for each in run.data for ref in each.split(", ")])),
        fact("parent", *(references("models", [str(header["parent"])]) if header.get("parent") else ())),
        fact("ranks", FactPart(run.world_size, "number")),
        fact(
            "joined and left",
            "; ".join(text for _, text in rank_changes(history)[-_CHANGES_LISTED:]) or None,
            help="the newest changes of the ranks, replicas or workers",
        ),
        fact("layout", axes, help="ranks of each axis of the layout"),
        *(fact(name, FactPart(header.get(name))) for name in ("host", "pid", "python")),
        fact("code", revision, revision and " with local changes" if code.get("dirty") else None),
        fact("datasvc", FactPart(header.get("package"))),
        fact("diagnosis", FactPart(newest_fact(history, "diagnosis", "verdict"))),
        fact("versions", *references("models", history.versions[-_VERSIONS_LISTED:]), help="the newest ones"),
    ]


def rank_changes(history: RunHistory) -> list[tuple[int, str]]:
    """Return when ranks or replicas of an elastic job, or workers of servers, came or left: step and text."""
    changes: list[tuple[int, str]] = []
    before: str | None = None
    for event in history.events:
        step, size, replicas = (event.facts.get(name) for name in ("step", "size", "replicas"))
        if not isinstance(step, int):
            continue
        if event.event == "lost" and isinstance(event.facts.get("rank"), int):
            changes.append((step, f"rank {event.facts['rank']}, a worker, was lost at step {step}"))
        elif event.event == "round" and isinstance(size, int):
            present = count_text(size, "rank")
            if isinstance(replicas, int) and 0 < replicas < size:
                present = f"{count_text(replicas, 'replica')} of {count_text(size // replicas, 'rank')}"
            if before is not None:
                earlier = "as many as before" if before == present else f"{before} before"
                changes.append((step, f"{present} from step {step} on, {earlier}"))
            before = present
    return changes


def mean_times(history: RunHistory) -> dict[str, float]:
    """Return the mean seconds of a step and of its measured parts, over all of the run."""
    measured = {name: history.series[name] for name in ("step_s", *STEP_PARTS) if name in history.series}
    return {name: float(np.average(series.values, weights=series.counts)) for name, series in measured.items()}


def rank_times(history: RunHistory) -> RankComparison | None:
    """Return the newest comparison of the ranks; None if there is none."""
    event = newest_event(history, "ranks")
    if event is None:
        return None
    ranks = as_list(event.facts.get("rank"))
    times = {
        name: as_list(values)
        for name, values in sorted(event.facts.items(), key=lambda fact: fact[0] != "own_s")
        if name not in _NOT_TIMES and len(as_list(values)) == len(ranks)
    }
    hosts = as_list(event.facts.get("host")) or [None] * len(ranks)
    stragglers = set(map(str, as_list(event.facts.get("stragglers"))))
    rows = [
        (rank, host, str(rank) in stragglers, [as_number(values[row]) for values in times.values()])
        for row, (rank, host) in enumerate(zip(ranks, hosts, strict=False))
    ]
    num_ranks = event.facts.get("num_ranks")
    return RankComparison(
        names=[*times],
        rows=sorted(rows, key=lambda row: not row[2]),
        step=event.facts.get("step"),
        num_ranks=num_ranks if isinstance(num_ranks, int) else len(ranks),
    )


def newest_event(history: RunHistory, name: str) -> RunEvent | None:
    """Return the newest event of a name; None if there is none."""
    return next((event for event in reversed(history.events) if event.event == name), None)


def newest_fact(history: RunHistory, event: str, fact: str) -> Any:
    """Return a fact of the newest event of a name; None if there is none."""
    found = newest_event(history, event)
    return None if found is None else found.facts.get(fact)


def time_text(time_s: float) -> str:
    """Return a time in UTC as ISO 8601, to the second."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")


def as_list(value: object) -> list[Any]:
    """Return a value of a log if it is a list; else an empty list."""
    return value if isinstance(value, list) else []


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a value of a log if it is a mapping; else an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def as_number(value: object) -> float | None:
    """Return a value of a log if it is a number; else None."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
