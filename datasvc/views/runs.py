"""A run in a notebook: its state and first curves, a plot of one curve; and its report as one HTML document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from datasvc.drawing import (
    ChartSeries,
    Markup,
    element,
    facts_table,
    folded,
    html_table,
    markup,
    small_multiples,
    standalone,
    style_sheet,
)
from datasvc.errors import ConfigError
from datasvc.printable import text_value
from datasvc.runs.facts import RunEvent
from datasvc.runs.history import RunHistory
from datasvc.runs.step_table import Series
from datasvc.views.run_charts import describe_left_out, line_charts, time_chart
from datasvc.views.run_words import as_mapping, describe, facts, mean_times, rank_times, time_text, warnings
from datasvc.views.view import fact_texts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES_SHOWN: Final = 6
_MAX_EVENTS: Final = 200
_STYLE: Final = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 860px; margin: 24px auto; padding: 0 16px; }
@media (prefers-color-scheme: dark) { body { background: #16181d; color: #e6e6e6; } }
table { border-collapse: collapse; margin: 8px 0 16px; } caption { text-align: left; font-weight: 600; }
th, td { text-align: left; vertical-align: top; padding: 2px 16px 2px 0; overflow-wrap: anywhere; }
td { font-variant-numeric: tabular-nums; } svg { max-width: 100%; height: auto; }
summary { cursor: pointer; font-weight: 600; }
"""


def history_html(history: RunHistory) -> Markup:
    """Return the state of a run and its first curves as HTML."""
    curves = [_line(name, series) for name, series in history.series.items()][:_CURVES_SHOWN]
    drawn = [small_multiples(curves, title=f"curves of {history.summary.ref}", num_columns=3)] if curves else []
    return standalone(facts_table(fact_texts(facts(history))), _list("Problems", history.problems), *drawn)


def plot_curve(history: RunHistory, name: str, *, ax: Axes | None) -> Axes:
    """Plot a curve or a metric of the evaluations, see `RunHistory.plot`."""
    from datasvc.views.plots import plot_lines

    series = history.series.get(name) or history.evaluation.get(name)
    if series is None:
        known = ", ".join([*history.series, *history.evaluation]) or "none"
        raise ConfigError(f"{history.summary.ref} has no curve {name!r}; its curves are: {known}")
    return plot_lines([_line(name, series)], title=history.summary.ref, unit=name, x_label="step", ax=ax)


def _line(name: str, series: Series) -> ChartSeries:
    values = [value if math.isfinite(value) else None for value in series.values.tolist()]
    return ChartSeries(name, series.steps.tolist(), values)


def make_report(history: RunHistory) -> str:
    """Return the report of a run as an HTML document; all text of the log is escaped."""
    run = history.summary
    title = f"Run {run.ref}"
    drawn, left_out = time_chart(history), describe_left_out(history)
    parts = [
        element("h1", title),
        element("p", describe(history)),
        _list("Problems", [*warnings(history), *history.problems]),
        facts_table(fact_texts(facts(history)), caption="What was trained"),
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
