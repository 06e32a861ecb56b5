"""The history of a run for people: as HTML in a notebook, as a table, and as a plot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from datasvc.drawing import ChartSeries, Markup, facts_table, small_multiples, standalone
from datasvc.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from datasvc.runs.history import RunHistory, Series

_CURVES_SHOWN: Final = 6


def history_html(history: RunHistory) -> Markup:
    """Return the state of a run and its first curves as HTML."""
    run = history.summary
    facts = {
        "run": run.ref,
        "state": f"{run.state}: {run.message}" if run.message else run.state,
        "step": run.step,
        "attempts": run.num_attempts,
        "versions": ", ".join(history.versions[-5:]) or "none",
        "problems": "; ".join(history.problems) or None,
    }
    curves = [_line(name, series) for name, series in history.series.items()][:_CURVES_SHOWN]
    drawn = [small_multiples(curves, title=f"curves of {run.ref}", num_columns=3)] if curves else []
    return standalone(facts_table(facts), *drawn)


def history_table(history: RunHistory) -> pa.Table:
    """Return a row for each point of each curve, see `RunHistory.to_arrow`."""
    columns: dict[str, list[object]] = {name: [] for name in _COLUMNS}
    for kind, curves in {"step": history.series, "evaluation": history.evaluation}.items():
        for name, series in curves.items():
            columns["kind"] += [kind] * len(series)
            columns["name"] += [name] * len(series)
            for column, values in zip(
                ("step", "value", "low", "high", "time_s", "num_steps"),
                (series.steps, series.values, series.low, series.high, series.times, series.counts),
                strict=True,
            ):
                columns[column] += values.tolist()
    return pa.table(columns, schema=pa.schema(_COLUMNS.items()))


def plot_curve(history: RunHistory, name: str, ax: Axes | None) -> Axes:
    """Plot a curve or a metric of the evaluations, see `RunHistory.plot`."""
    from datasvc.notebook.plots import plot_lines

    series = history.series.get(name) or history.evaluation.get(name)
    if series is None:
        known = ", ".join([*history.series, *history.evaluation]) or "none"
        raise ConfigError(f"{history.summary.ref} has no curve {name!r}; its curves are: {known}")
    return plot_lines([_line(name, series)], title=history.summary.ref, unit=name, x_label="step", ax=ax)


def _line(name: str, series: Series) -> ChartSeries:
    values = [value if math.isfinite(value) else None for value in series.values.tolist()]
    return ChartSeries(name, series.steps.tolist(), values)


_COLUMNS: Final = {
    "kind": pa.string(),
    "name": pa.string(),
    "step": pa.int64(),
    "value": pa.float64(),
    "low": pa.float64(),
    "high": pa.float64(),
    "time_s": pa.float64(),
    "num_steps": pa.int64(),
}
