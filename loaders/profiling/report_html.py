"""The report of a loader as HTML for a notebook, and as a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from datasvc.drawing import Markup, NamedBar, TableColumn, bar_chart, element, folded, html_table, standalone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from datasvc.loaders.profiling.report import Report

_UNIT: Final = "ms per step"


def report_html(report: Report) -> Markup:
    """Return the bottleneck in words, the time of a step by stage, and the longest waits."""
    verdict = element("p", str(report.bottleneck))
    if not report.totals.num_steps:
        return standalone(verdict)
    times = stage_times_ms(report)
    bars = bar_chart(
        [NamedBar(stage, time_ms) for stage, time_ms in times.items()], title="time of a step", unit=_UNIT
    )
    beside = {stage.value: seconds for stage, seconds in report.totals.beside_s.items()}
    names = [*times, *(stage for stage in beside if stage not in times)]
    table = html_table(
        ["stage", TableColumn(_UNIT), TableColumn("other threads", "s")],
        [(name, times.get(name), beside.get(name)) for name in names],
        caption=f"{report.totals.num_steps:,} steps, {report.totals.num_samples:,} {report.bottleneck.unit}",
    )
    waits = html_table(
        ["step", TableColumn("wait", "s"), "longest stage"],
        [(wait.step, wait.wait_s, wait.stage.value) for wait in report.longest],
        caption=f"longest waits; the median is {report.wait_p50_s:.4g} s, 95 % are below {report.wait_p95_s:.4g} s",
    )
    return standalone(verdict, bars, folded("as a table", table), folded("longest waits", waits))


def plot_report(report: Report, *, ax: Axes | None = None) -> Axes:
    """Plot the time of a step by stage, see `Report.plot`."""
    from datasvc.notebook.plots import plot_stacks

    times = stage_times_ms(report)
    return plot_stacks(list(times), {_UNIT: list(times.values())}, title=str(report.bottleneck), unit=_UNIT, ax=ax)


def stage_times_ms(report: Report) -> dict[str, float]:
    """Return the mean time of a step inside the call for a batch by stage, and that of the consumer."""
    totals = report.totals
    seconds = {stage.value: blocked_s for stage, blocked_s in totals.blocked_s.items()} | {
        "consumer": totals.consumer_s
    }
    return {name: 1000 * value / max(totals.num_steps, 1) for name, value in seconds.items()}
