"""Several runs in one chart: their curves, smoothed on request, and the settings in which they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from datasvc.drawing import ChartSeries, chart_table, line_chart
from datasvc.drawing.colours import NUM_COLOURS
from datasvc.drawing.numbers import thin_points
from datasvc.errors import ConfigError
from datasvc.models.versions.entry_fields import tree_leaves
from datasvc.printable import escape_controls
from datasvc.runs import RunHistory, list_runs
from datasvc.runs.step_table import Floats, Series
from datasvc.ui.pages.histogram_charts import CHART_WIDTH
from datasvc.ui.web.links import run_link, run_ref_link, runs_link, with_query
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.seen_faults import Failures
from datasvc.ui.web.site import Site
from datasvc.views.run_charts import choose_drawn, named_curves, starts_at_zero, title_and_unit
from datasvc.views.run_words import as_mapping

RUN_FIELD: Final = "run:"  # of the address, before the reference of each run: a form has a box for each
_PATH: Final = "/runs/compare"
_PARAMETERS: Final = frozenset({"smooth", "over", "panel", "x", "hide"})  # the last two are read by scripts
_MAX_POINTS: Final = 400
_MAX_OFFERED: Final = 20  # newest runs that can be added
_SMOOTHING: Final = ("0", "0.5", "0.8", "0.9", "0.95", "0.99")
_AXES: Final = {"step": "step", "time": "seconds since its start"}


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return the curves of the runs in the address, `run:NAME/ID` for each, over steps or over time."""
    refs = [name.removeprefix(RUN_FIELD) for name in query if name.startswith(RUN_FIELD) and query.text(name)]
    if len(refs) > NUM_COLOURS:
        raise ConfigError(f"{len(refs)} runs are chosen; a chart shows {NUM_COLOURS} at most")
    weight, axis = float(query.choice("smooth", _SMOOTHING)), query.choice("over", tuple(_AXES))
    others = [name for name in query if not name.startswith(RUN_FIELD) and name not in _PARAMETERS]
    failures, runs = Failures(site.faults, _PATH), dict[str, RunHistory]()
    for ref in refs:
        with failures.noted():
            if run_ref_link(ref) is None:
                raise ConfigError(f"{ref[:80]!r} is not a run; expected NAME/ID")
            name, _, run_id = ref.partition("/")
            runs[ref] = site.runs.read(site.repo.repository, name, run_id)
    chosen = {ref: f"c{number}" for number, ref in enumerate(runs)}
    curves = {ref: dict(named_curves(history)) for ref, history in runs.items()}
    names = list(dict.fromkeys(name for each in curves.values() for name in each))
    shared = sorted(names, key=lambda name: -sum(name in each for each in curves.values()))
    shown, left_out = choose_drawn(shared)
    drawn = {
        name: {
            ref: _points(curves[ref][name], runs[ref].summary.started_s, weight, axis)
            for ref in runs
            if name in curves[ref]
        }
        for name in shown
    }
    offered = [run.ref for run in list_runs(site.repo.repository, last=_MAX_OFFERED) if run.ref not in runs]
    values = {name: {ref: {"x": xs, "y": ys} for ref, (xs, ys) in points.items()} for name, points in drawn.items()}
    return Page(
        template="run_comparison.html",
        title="Compare runs",
        section="runs",
        crumbs=(Crumb("Runs", runs_link()), Crumb("Compare", with_query(_PATH, query))),
        panels={"curves": Panel(values), "settings": Panel(_differences(runs))},
        problems=(*failures.problems(), *([_ignored(others)] if others else ())),
        view={
            "runs": [
                (history.summary, run_link(history.summary.name, history.summary.id)) for history in runs.values()
            ],
            "offered": offered,
            "field": RUN_FIELD,
            "charts": [_chart(name, points, chosen, axis) for name, points in drawn.items()],
            "left_out": left_out,
            "smoothing": _SMOOTHING,
            "weight": query.text("smooth") or "0",
            "axes": _AXES,
            "axis": axis,
        },
    )


def smooth(xs: Floats, ys: Floats, weight: float) -> Floats:
    """Return the exponential moving average of values: `float64[point]`; NaN stays, and is left out of the average.

    It is debiased as in Adam (Kingma and Ba, 2015): it neither begins at zero nor clings to the first value. The
    weight of the past falls with the distance on the x axis, in median distances. So a log whose old points stand for
    many steps is smoothed as one with all of them.

    Args:
        xs: ascending.
        ys: the values.
        weight: share of the past in a value one median distance later, 0 (no smoothing) to below 1.
    """
    finite = np.isfinite(ys)
    if weight <= 0 or finite.sum() < 2:
        return ys
    smoothed, known = np.full(len(ys), np.nan), np.flatnonzero(finite)
    distance = float(np.median(np.diff(xs[known]))) or 1.0
    total = share = 0.0
    last = xs[known[0]] - distance
    for index in known.tolist():
        kept = weight ** ((xs[index] - last) / distance)
        total, share = kept * total + (1 - kept) * ys[index], kept * share + (1 - kept)
        # Several reports at one x keep all of the past: the first of them has no share yet.
        smoothed[index], last = total / share if share else ys[index], xs[index]
    return smoothed


def _ignored(names: Sequence[str]) -> Problem:
    listed = ", ".join(name[:40] for name in names[:5])
    text = (
        f"this page ignores what it does not have: {listed}; expected {RUN_FIELD}NAME/ID=1 for each run, smooth, over"
    )
    return Problem(text, severity="warning")


def _points(series: Series, started_s: float, weight: float, axis: str) -> tuple[list[float], list[float | None]]:
    """Return the points of a curve as drawn: smoothed before they are thinned."""
    xs = series.steps.astype(np.float64) if axis == "step" else np.maximum.accumulate(series.times - started_s)
    ys = [y if math.isfinite(y) else None for y in smooth(xs, series.values, weight).tolist()]
    points = thin_points(xs.tolist(), ys, _MAX_POINTS)
    return [x for x, _ in points], [y for _, y in points]


def _chart(
    name: str,
    points: Mapping[str, tuple[Sequence[float], Sequence[float | None]]],
    colours: Mapping[str, str],
    axis: str,
) -> dict[str, Any]:
    title, unit = title_and_unit(name)
    lines = [ChartSeries(ref, xs, ys, colours[ref]) for ref, (xs, ys) in points.items()]
    return {
        "name": escape_controls(title),
        "svg": line_chart(
            lines,
            title=title,
            unit=unit,
            x_label=_AXES[axis],
            width=CHART_WIDTH,
            height=220,
            from_zero=starts_at_zero(name),
        ),
        "table": chart_table(lines, title=title, unit=unit, max_rows=100),
    }


def _differences(runs: Mapping[str, RunHistory]) -> list[dict[str, Any]]:
    """Return the settings in which runs differ, each with its value in the runs that have it."""
    settings = {ref: dict(tree_leaves(as_mapping(history.header.get("config")), "")) for ref, history in runs.items()}
    rows = []
    for name in dict.fromkeys(name for each in settings.values() for name in each):
        values = {ref: each[name] for ref, each in settings.items() if name in each}
        if len(values) < len(runs) or len(set(map(repr, values.values()))) > 1:
            rows.append({"name": name, "values": values})
    return rows
