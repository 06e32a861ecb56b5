"""The history of a model: its versions as a graph, page by page, and a metric over them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from datasvc.drawing import ChartMark, ChartSeries, Markup, line_chart, version_graph
from datasvc.models.registry.registry import ModelVersion, describe_versions
from datasvc.models.search.query import query_versions
from datasvc.printable import escape_controls
from datasvc.repository import Resolved
from datasvc.repository.logs.references import finite_metrics
from datasvc.repository.resolved import NameState
from datasvc.ui.pages.charts.histogram_charts import CHART_WIDTH
from datasvc.ui.web.links import model_link
from datasvc.ui.web.page import Panel, Query
from datasvc.ui.web.site import Site
from datasvc.ui.web.table_view import Column, TableView, view_table
from datasvc.ui.web.unreadable import collect_unreadable
from datasvc.views.models import version_nodes

VERSIONS_ON_A_PAGE: Final = 20
# A chart reads the entries of this number of versions; more come from the index, which may have to be built first.
NEWEST_IN_CHART: Final = 200
AXES: Final = ("step", "version")
_COLUMNS: Final = (
    Column("version", "version", "time"),
    Column("step", "step", "number"),
    Column("created", "created", "time"),
    Column("metrics"),
    Column("continues"),
    Column("tags"),
    Column("message", "message"),
)


@dataclass(frozen=True)
class HistoryPage:
    """Versions of one page, newest first.

    Attributes:
        versions: the versions that can be read.
        number: number of the page, from 0.
        num_pages: number of pages.
        unreadable: the versions that cannot be read, as JSON values.
    """

    versions: Sequence[ModelVersion]
    number: int
    num_pages: int
    unreadable: Sequence[dict[str, Any]]


def read_page(site: Site, version: ModelVersion, state: NameState, query: Query) -> HistoryPage:
    """Return the page of the history that the address selects; by default the one that has `version`."""
    numbers = state.versions
    num_pages = max(1, -(-len(numbers) // VERSIONS_ON_A_PAGE))
    default = (len(numbers) - 1 - bisect_left(numbers, version.version)) // VERSIONS_ON_A_PAGE
    number = query.number("page", default, high=num_pages - 1)
    stop = len(numbers) - number * VERSIONS_ON_A_PAGE
    with collect_unreadable() as unreadable:
        versions = _describe(site, version.name, numbers[max(0, stop - VERSIONS_ON_A_PAGE) : stop])
    return HistoryPage(versions, number, num_pages, unreadable.facts())


def versions_panel(site: Site, name: str, page: HistoryPage) -> Panel:
    """Return the versions of a page as `models log --json` prints them."""
    values = [*(version.to_dict() for version in page.versions), *page.unreadable]
    if page.number or not page.versions:
        # The command has no other page than the newest; a search has any range.
        first, last = (page.versions[place].version if page.versions else 0 for place in (-1, 0))
        condition = f"model = '{name}' and version between {first} and {last}"
        command = site.command("models", "find", condition, "--removed", "--json")
        return Panel(values, command, site.python("models.find", condition, removed=True))
    return Panel(
        values,
        site.command("models", "log", name, "--json", options={"--last": str(VERSIONS_ON_A_PAGE)}),
        site.python("models.log", name, last=VERSIONS_ON_A_PAGE),
    )


def history_table(page: HistoryPage, query: Query, path: str) -> TableView:
    """Return the versions of a page as a table that the address sorts."""
    rows = [
        {
            "row": version,
            "version": version.version,
            "step": version.entry["step"],
            "created": version.entry["created"],
            "message": version.entry["message"],
        }
        for version in page.versions
    ]
    return view_table(rows, _COLUMNS, query, path=path, prefix="versions_")


def draw_versions(page: HistoryPage, selected: ModelVersion) -> Markup:
    """Return the graph of a page as SVG; a parent on another page is a dashed end."""
    nodes = [
        replace(node, note=f"(this version) · {node.note}") if node.name == str(selected) else node
        for node in version_nodes(page.versions, href=model_link)
    ]
    return version_graph(nodes, limit=VERSIONS_ON_A_PAGE, title=f"versions of {selected.name}")


@dataclass(frozen=True)
class MetricChart:
    """A metric over the versions of a model.

    Attributes:
        panel: rows with version, step and value, newest first; a value is None if the version does not have it.
        metric: name of the metric.
        names: metrics to choose from.
        axis: one of `AXES`.
        is_all: whether the chart has all versions, instead of the newest ones.
        svg: the chart; it is replaced by an interactive one where scripts run.
        series: what the script of the page draws, sorted by x.
    """

    panel: Panel
    metric: str
    names: Sequence[str]
    axis: str
    is_all: bool
    svg: Markup
    series: dict[str, Any]


def read_metric(site: Site, version: ModelVersion, state: NameState, query: Query) -> MetricChart | None:
    """Return the metric that the address selects, by default the first with two values; None if there are none."""
    newest = _describe(site, version.name, state.versions[-NEWEST_IN_CHART:])
    names = dict.fromkeys(name for each in (version, *newest) for name in each.entry["metrics"])
    if not names:
        return None
    is_all = len(state.versions) <= NEWEST_IN_CHART or query.text("span") == "all"
    counts = Counter(name for each in newest for name in each.entry["metrics"])
    # By default one that has a curve: a single value has none.
    first = next((name for name in names if counts[name] > 1), next(iter(names)))
    metric = query.choice("metric", (first, *names))
    sql = _sql(version.name, metric, None if is_all else NEWEST_IN_CHART)
    if len(state.versions) <= NEWEST_IN_CHART or not is_all:
        rows = [
            {
                "step": each.entry["step"],
                "value": finite_metrics(each.entry["metrics"]).get(metric),
                "version": each.version,
            }
            for each in newest
        ]
    else:
        rows = [_finite(row) for row in query_versions(site.repo.repository, sql).to_pylist()]
    axis = query.choice("axis", AXES)
    points = sorted((row[axis], row["value"], row["version"]) for row in rows if row["value"] is not None)
    series = ChartSeries(metric, [x for x, _, _ in points], [y for _, y, _ in points])
    marks = [
        ChartMark(x, f"{tag}: version {number}", href=model_link(f"{version.name}@{tag}"))
        for tag, tagged in state.tags.items()
        for x, _, number in points
        if number == tagged
    ]
    return MetricChart(
        Panel(rows, site.command("models", "sql", sql, "--json"), site.python("models.sql", sql)),
        metric,
        tuple(names),
        axis,
        is_all,
        line_chart([series], title=f"{metric} of {version.name}", x_label=axis, marks=marks, width=CHART_WIDTH),
        {
            "name": escape_controls(metric),
            "axis": axis,
            "colour": "--c0",
            "marks": [[mark.x, mark.label, mark.is_problem, mark.href, mark.is_minor] for mark in marks],
            "x": [x for x, _, _ in points],
            "y": [y for _, y, _ in points],
            "links": [model_link(f"{version.name}@{number}") for _, _, number in points],
        },
    )


def _sql(name: str, metric: str, limit: int | None) -> str:
    value = "metrics['" + metric.replace("'", "''") + "']"
    last = "" if limit is None else f" limit {limit}"
    # A name of a model has no quotes.
    return (
        f"select version, step, {value} as value from all_versions "  # noqa: S608
        f"where model = '{name}' order by version desc{last}"
    )


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with None for a value that JSON does not have."""
    return {**row, "value": finite_metrics(row).get("value")}


def _describe(site: Site, name: str, numbers: Sequence[int]) -> list[ModelVersion]:
    """Return versions, newest first."""
    return describe_versions(site.repo.repository, [Resolved("models", name, number) for number in numbers])[::-1]
