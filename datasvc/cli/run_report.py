"""The report of a run: one HTML file to send, which loads nothing from elsewhere and has no script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from datasvc.cli.terminal.values import text_value
from datasvc.drawing import Markup, element, facts_table, folded, html_table, markup, style_sheet
from datasvc.printable import count_text
from datasvc.runs import RunEvent, RunHistory, Series
from datasvc.ui.pages.charts.run_charts import describe_left_out, line_charts, time_chart

# The time of a step is the wait for data, these parts in any order, and what no part has.
TIME_PARTS: Final = ("wait_s", "transfer_s", "forward_s", "backward_s", "all_reduce_s", "update_s")
_MAX_EVENTS: Final = 200
_STYLE: Final = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 860px; margin: 24px auto; padding: 0 16px; }
@media (prefers-color-scheme: dark) { body { background: #16181d; color: #e6e6e6; } }
table { border-collapse: collapse; margin: 8px 0 16px; } caption { text-align: left; font-weight: 600; }
th, td { text-align: left; vertical-align: top; padding: 2px 16px 2px 0; overflow-wrap: anywhere; }
td { font-variant-numeric: tabular-nums; } svg { max-width: 100%; height: auto; }
summary { cursor: pointer; font-weight: 600; }
"""


def make_report(history: RunHistory) -> str:
    """Return the report of a run as an HTML document; all text of the log is escaped."""
    run = history.summary
    title = f"Run {run.ref}"
    drawn, left_out = time_chart(history), describe_left_out(history)
    parts = [
        element("h1", title),
        element("p", describe(history)),
        _list("Problems", problems(history)),
        facts_table(facts(history), caption="What was trained"),
        *(chart["svg"] for chart in line_charts(history)),
        *([] if left_out is None else [element("p", left_out)]),
        *([] if drawn is None else [drawn["svg"]]),
        facts_table({name: f"{1000 * value:.2f} ms" for name, value in mean_times(history).items()},
                    caption="Where the time of a step went (means)"),
        _ranks(newest(history.events, "ranks")),
        _list("Versions", history.versions),
        _evaluations(history),
        folded("Configuration", facts_table(_texts(history.header.get("config")))),
        folded("Environment", facts_table(_texts(history.header.get("facts")))),
        folded("Events", _events(history.events)),
    ]  # fmt: skip
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width"),
        element("title", title),
        element("style", Markup(_STYLE + style_sheet())),
    )
    return f"<!doctype html>\n{element('html', head, element('body', *parts), lang='en')}\n"


def describe(history: RunHistory) -> str:
    """Return one sentence about a run: its outcome, how far it came, and what it has saved."""
    run = history.summary
    step = "before its first step" if run.step is None else f"at step {run.step:,}"
    message = f": {run.message}" if run.message else ""
    data = f" on {' + '.join(run.data)}" if run.data else ""
    saved = count_text(len(history.versions), "model version")
    return f"The run trained{data}, is {run.state} {step}{message}, and has saved {saved}."


def problems(history: RunHistory) -> list[str]:
    """Return what needs attention, in words: the bottleneck of a starved run, stragglers, and unreadable parts."""
    found = []
    verdict = newest_fact(history.events, "diagnosis", "verdict")
    if isinstance(verdict, str) and verdict.startswith("starved"):
        found.append(verdict)
    stragglers = newest_fact(history.events, "ranks", "stragglers")
    if isinstance(stragglers, list) and stragglers:
        found.append(f"the other ranks wait for rank {', '.join(map(str, stragglers[:8]))}")
    stalls = sum(event.event == "stall" for event in history.events)
    if stalls:
        found.append(f"{count_text(stalls, 'step')} waited a second or longer for data")
    failures = sum(event.event == "failed" for event in history.events)
    if failures:
        found.append(f"{count_text(failures, 'checkpoint')} failed; the events have the errors")
    return [*found, *history.problems]


def facts(history: RunHistory) -> dict[str, str | float | None]:
    """Return the main facts of a run by name; None for what is not known."""
    run, header = history.summary, history.header
    code, layout = _mapping(header.get("code")), _mapping(header.get("layout"))
    revision = code.get("revision")
    dirty = " with local changes" if code.get("dirty") else ""
    facts: dict[str, str | float | None] = {
        "state": run.state,
        "message": run.message or None,
        "step": run.step,
        "progress": _percent(run.latest.get("progress")),
        "started": time_text(run.started_s),
        "last written": time_text(run.last_s),
        "attempts": run.num_attempts,
        "data": ", ".join(run.data) or None,
        "parent": _text(header.get("parent")),
        "ranks": run.world_size,
        "layout": ", ".join(f"{axis} {size}" for axis, size in layout.items() if size != 1) or None,
        "host": _text(header.get("host")),
        "code": None if revision is None else f"{revision}{dirty}",
        "datasvc": _text(header.get("package")),
        "diagnosis": _text(newest_fact(history.events, "diagnosis", "verdict")),
    }
    return {name: value for name, value in facts.items() if value is not None}


def mean_times(history: RunHistory) -> dict[str, float]:
    """Return the mean seconds of a step and of its measured parts, over all of the run."""
    return {name: _mean(history.series[name]) for name in ("step_s", *TIME_PARTS) if name in history.series}


def time_text(time_s: float) -> str:
    """Return a time in UTC as ISO 8601, to the second."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")


def newest(events: Iterable[RunEvent], name: str) -> RunEvent | None:
    """Return the newest event of a name; None if there is none."""
    return next((event for event in reversed([*events]) if event.event == name), None)


def newest_fact(events: Iterable[RunEvent], event: str, fact: str) -> Any:
    """Return a fact of the newest event of a name; None if there is none."""
    found = newest(events, event)
    return None if found is None else found.facts.get(fact)


def _mean(series: Series) -> float:
    return float(np.average(series.values, weights=series.counts))


def _ranks(event: RunEvent | None) -> Markup:
    if event is None:
        return Markup()
    ranks = event.facts.get("rank")
    if not isinstance(ranks, list):
        return Markup()
    columns = {
        name: values
        for name, values in event.facts.items()
        if isinstance(values, list) and len(values) == len(ranks) and name != "stragglers"
    }
    rows = [[text_value(value) for value in row] for row in zip(*columns.values(), strict=True)]
    return folded("Ranks", html_table([*columns], rows, caption="Seconds of a step by rank"))


def _evaluations(history: RunHistory) -> Markup:
    if not history.evaluation:
        return Markup()
    steps = sorted({int(step) for series in history.evaluation.values() for step in series.steps})[-_MAX_EVENTS:]
    values = {
        name: dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
        for name, series in history.evaluation.items()
    }
    rows = [[step, *(values[name].get(step) for name in values)] for step in steps]
    return html_table(["step", *values], rows, caption="Evaluations")


def _events(events: Sequence[RunEvent]) -> Markup:
    rows = [(time_text(event.time_s), event.event, text_value(event.facts)) for event in events[-_MAX_EVENTS:]]
    caption = f"The last {_MAX_EVENTS} of {len(events):,} events" if len(events) > _MAX_EVENTS else "All events"
    return html_table(["time", "event", "facts"], rows, caption=caption)


def _list(title: str, texts: Sequence[str]) -> Markup:
    if not texts:
        return Markup()
    return markup([element("h2", title), element("ul", *(element("li", text) for text in texts))])


def _texts(values: Any) -> dict[str, str | float | None]:
    return {str(name): text_value(value) for name, value in _mapping(values).items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return None if value is None else text_value(value)


def _percent(share: Any) -> str | None:
    return f"{share:.1%}" if isinstance(share, float | int) else None
