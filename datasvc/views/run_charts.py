"""Charts of a run: its curves, and where the time of its steps goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from datasvc.drawing import ChartMark, ChartSeries, chart_table, line_chart, stacked_areas
from datasvc.drawing.numbers import thin_points
from datasvc.printable import escape_controls
from datasvc.runs.history import RunHistory
from datasvc.runs.resources import RESOURCES
from datasvc.runs.step_table import Series
from datasvc.views.run_words import STEP_PARTS, rank_changes

_MAX_POINTS: Final = 600
_MAX_CHARTS: Final = 12
_MAX_LISTED: Final = 20  # names of curves that are not drawn
_MAX_MARKS: Final = 200
# Each part of a step has the same colour in every run.
_COLOURS: Final = {
    "wait_s": "c1",
    "transfer_s": "c4",
    "forward_s": "c0",
    "backward_s": "c2",
    "all_reduce_s": "c3",
    "update_s": "c5",
}
_OTHER: Final = ("other", "grey")
# Shown as numbers elsewhere on the page.
_NOT_DRAWN: Final = frozenset({"epoch", "progress", "coverage", "samples", "step_s", *STEP_PARTS})
_FIRST: Final = ("loss", "rate")
_TITLES: Final = {"rate": "learning rate"}
_UNITS: Final = {"_s": "s", "_bytes": "bytes"}


def line_charts(history: RunHistory, *, width: int = 640) -> list[dict[str, Any]]:
    """Return a chart for each curve of a run that `choose_drawn` chooses, metrics of several evaluations included.

    Args:
        history: the run.
        width: of each chart, pixels.

    Returns:
        Dicts with `id`, `name`, `svg`, `table`, and `data`, what the script of the page draws.
    """
    marks = _marks(history)
    curves = {name: (series, colour) for name, series, colour in _curves(history)}
    return [
        _chart(f"chart-{number}", name, *curves[name], marks, width)
        for number, name in enumerate(choose_drawn(list(curves))[0])
    ]


def choose_drawn(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split names of curves into those that are drawn, and the others: the first 12 are drawn, and all resources."""
    others = [name for name in names if name not in RESOURCES]
    return others[:_MAX_CHARTS] + [name for name in RESOURCES if name in names], others[_MAX_CHARTS:]


def describe_left_out(history: RunHistory) -> str | None:
    """Return which curves `line_charts` leaves out, in words; None if it leaves out none."""
    drawn, left_out = choose_drawn([name for name, _, _ in _curves(history)])
    if not left_out:
        return None
    more = " and more" if len(left_out) > _MAX_LISTED else ""
    return (
        f"{len(drawn)} of {len(drawn) + len(left_out):,} curves are drawn; "
        f"not {', '.join(left_out[:_MAX_LISTED])}{more}. "
        f"`datasvc runs show {history.summary.ref} --json` has all of them."
    )


def _curves(history: RunHistory) -> list[tuple[str, Series, str]]:
    """Return name, values and colour of each curve, in the order in which they are drawn."""
    names = [name for name in history.series if name not in _NOT_DRAWN]
    names.sort(key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    # One value is no curve: the table of evaluations has it.
    evaluation = [
        (name, series) for name, series in history.evaluation.items() if name not in _NOT_DRAWN and len(series) > 1
    ]
    return [
        *((_TITLES.get(name, name), history.series[name], "c0") for name in names),
        *((f"evaluation: {name}", series, "c2") for name, series in evaluation),
    ]


def named_curves(history: RunHistory) -> list[tuple[str, Series]]:
    """Return name and values of each curve that `line_charts` draws, and of those that it leaves out."""
    return [(name, series) for name, series, _ in _curves(history)]


def time_chart(history: RunHistory, *, width: int = 800) -> dict[str, Any] | None:
    """Return stacked areas of the parts of a step in milliseconds; None if the run has not measured its steps."""
    whole = history.series.get("step_s")
    if whole is None or not len(whole):
        return None
    kept = np.unique(np.linspace(0, len(whole) - 1, min(len(whole), _MAX_POINTS)).astype(int))
    steps = whole.steps[kept]
    rest = np.nan_to_num(whole.values[kept], posinf=0, neginf=0)
    areas = []
    for name, title in STEP_PARTS.items():
        part = history.series.get(name)
        if part is None or not len(part):
            continue
        # On a GPU only some steps are measured: their values stand for the steps until the next ones.
        times_s = np.nan_to_num(part.values[np.searchsorted(part.steps[:-1], steps)], posinf=0, neginf=0)
        times_s = np.minimum(times_s, rest)
        rest = rest - times_s
        areas.append(ChartSeries(title, steps.tolist(), (1000 * times_s).tolist(), _COLOURS[name]))
    areas.append(ChartSeries(_OTHER[0], steps.tolist(), (1000 * rest).tolist(), _OTHER[1]))
    title = "Time of a step"
    return {
        "svg": stacked_areas(areas, title=title, unit="ms", width=width),
        "table": chart_table(areas, title=title, unit="ms", max_rows=100),
    }


def _chart(
    chart_id: str, name: str, series: Series, colour: str, marks: Sequence[ChartMark], width: int
) -> dict[str, Any]:
    values = [value if math.isfinite(value) else None for value in series.values.tolist()]
    points = thin_points(series.steps.tolist(), values, _MAX_POINTS)
    title, unit = title_and_unit(name)
    is_from_zero = starts_at_zero(name)
    line = ChartSeries(title, [x for x, _ in points], [y for _, y in points], colour)
    return {
        "id": chart_id,
        "name": escape_controls(title),
        "svg": line_chart(
            [line], title=title, unit=unit, marks=marks, width=width, height=220, from_zero=is_from_zero
        ),
        "table": chart_table([line], title=title, unit=unit, max_rows=100),
        "data": {
            "name": escape_controls(title),
            "unit": unit,
            "from_zero": is_from_zero,
            "colour": f"--{colour}",
            "x": line.xs,
            # The log has float32: more digits are noise, and most of the bytes of a live page.
            "y": [None if y is None else float(f"{y:.7g}") for y in line.ys],
            "marks": [[mark.x, mark.label, mark.is_problem, mark.href, mark.is_minor] for mark in marks],
        },
    }


def title_and_unit(name: str) -> tuple[str, str]:
    """Return the title of a curve and its unit; names of the training program end in their units."""
    if name in RESOURCES:
        return RESOURCES[name]
    if name.endswith("_per_s"):
        return name.removesuffix("_per_s").replace("_", " ") + "/s", ""
    for ending, unit in _UNITS.items():
        if name.endswith(ending):
            return name.removesuffix(ending).replace("_", " "), unit
    return name, ""


def starts_at_zero(name: str) -> bool:
    """Return whether the axis of a curve starts at zero: it is a rate, or a part of something."""
    return name.endswith(("_per_s", "_bytes", "_percent"))


def _marks(history: RunHistory) -> list[ChartMark]:
    """Return checkpoints, stalls and changes of the ranks of a run, the newest ones if there are very many."""
    marks = [ChartMark(step, text) for step, text in rank_changes(history)]
    for event in history.events:
        facts = event.facts
        step = facts.get("step")
        if not isinstance(step, int):
            continue
        if event.event == "checkpoint":
            marks.append(ChartMark(step, f"checkpoint at step {step}: {facts.get('version')}", is_minor=True))
        elif event.event == "stall":
            text = f"stall at step {step}: waited {facts.get('wait_s')} s for data"
            marks.append(ChartMark(step, text, is_problem=True))
    return sorted(marks, key=lambda mark: mark.x)[-_MAX_MARKS:]
