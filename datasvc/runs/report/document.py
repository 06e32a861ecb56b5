"""The report of a run: one HTML file to send, which loads nothing from elsewhere and has no script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from datasvc.drawing import Markup, element, facts_table, folded, html_table, markup, style_sheet
from datasvc.printable import text_value
from datasvc.runs.facts import RunEvent
from datasvc.runs.history import RunHistory
from datasvc.runs.report.charts import describe_left_out, line_charts, time_chart
from datasvc.runs.report.description import (
    as_mapping,
    describe,
    facts,
    mean_times,
    rank_times,
    time_text,
    warnings,
)

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
        _list("Problems", [*warnings(history), *history.problems]),
        facts_table(facts(history), caption="What was trained"),
        *(chart["svg"] for chart in line_charts(history)),
        *([] if left_out is None else [element("p", left_out)]),
        *([] if drawn is None else [drawn["svg"]]),
        facts_table({name: f"{1000 * value:.2f} ms" for name, value in mean_times(history).items()},
                    caption="Where the time of a step went (means)"),
        _ranks(history),
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


def _ranks(history: RunHistory) -> Markup:
    times = rank_times(history)
    if times is None or not times.rows:
        return Markup()
    rows = [
        [text_value(rank), text_value(host), "straggler" if is_straggler else "-", *values]
        for rank, host, is_straggler, values in times.rows
    ]
    return folded(
        "Ranks", html_table(["rank", "host", "state", *times.names], rows, caption="Seconds of a step by rank")
    )


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
    return {str(name): text_value(value) for name, value in as_mapping(values).items()}
