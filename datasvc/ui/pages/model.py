"""One model version: its history, its facts, how it is stored, how to restore it, and what retention would remove."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from datasvc.drawing import ChartMark, ChartSeries, Markup, line_chart, version_graph
from datasvc.errors import ConfigError, DatasvcError, NotFoundError, UnavailableError
from datasvc.models.registry.registry import (
    ModelVersion,
    describe_model,
    describe_versions,
    measure_stored_size,
    show_facts,
)
from datasvc.models.registry.retention import RetentionPolicy, retain
from datasvc.models.search.query import query_versions
from datasvc.models.versions.signing import list_signers
from datasvc.printable import escape_controls
from datasvc.repository import Resolved
from datasvc.repository.logs.references import finite_metrics
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.resolved import NameState
from datasvc.ui.pages.histogram_charts import CHART_WIDTH
from datasvc.ui.web.links import model_link, with_query
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.seen_faults import collect_unreadable
from datasvc.ui.web.site import Site
from datasvc.ui.web.table_view import Column, TableView, view_table
from datasvc.views.models import describe, version_nodes

# The tensor table of more tensors is megabytes; it is read only on request.
_MAX_TENSORS: Final = 20_000
_MAX_DIFF_BYTES: Final = 256 << 10
_MAX_EVALUATED: Final = 100
_MODES: Final = ("", "max", "min")
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


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the version that the reference in the address resolves to."""
    repository = site.repo.repository
    version = describe_model(repository, parts["ref"])
    state = repository.state("models", version.name)
    ref = str(version)
    history = read_page(site, version, state, query)
    chart = read_metric(site, version, state, query)
    stored, stored_reason = _stored(site, version, query)
    retention, retention_fault = _retention(site, version.name, query)
    evaluated, evaluated_counts, evaluated_fault = _evaluated(site, ref, query)
    panels = {
        **_version_panels(site, version, stored),
        "versions": versions_panel(site, version.name, history),
        **({"metric": chart.panel} if chart else {}),
        **({"retention": retention} if retention else {}),
        **({"evaluated": evaluated} if evaluated else {}),
    }
    crumbs = (Crumb("Models", "/models"), Crumb(version.name, model_link(version.name)), Crumb(ref, model_link(ref)))
    path = model_link(parts["ref"])
    return Page(
        template="model.html",
        title=ref,
        section="models",
        crumbs=crumbs,
        panels=panels,
        problems=tuple(_problems(site, version, state)),
        view={
            "site": site,
            "ref": ref,
            "version": version,
            "facts": describe(version),
            "newest": state.living[-1] if state.living else None,
            "num_versions": len(state.versions),
            "num_removed": len(state.removed),
            "history": history,
            "history_table": history_table(history, query, path),
            "graph": draw_versions(history, version),
            "chart": chart,
            "chart_svg": chart.svg if chart else "",
            "axes": AXES,
            "num_in_chart": NEWEST_IN_CHART,
            "all_link": with_query(path, query, span="all"),
            "newest_link": with_query(path, query, span=None),
            "page_path": path,
            "page_link": with_query(path, query, page=None),
            "stored_link": with_query(path, query, stored=1),
            "stored_reason": stored_reason,
            "evaluated_link": with_query(path, query, evaluated=1),
            "evaluated_counts": evaluated_counts,
            "evaluated_fault": evaluated_fault,
            "diff": _diff(site, version),
            "query": query,
            "retention_fault": retention_fault,
            "modes": _MODES,
            "earlier": f"{version.name}@{version.version - 1}" if version.version > 1 else None,
            "restore_command": site.command("models", "restore", ref, "FOLDER"),
            "restore_python": site.python("models.restore", ref),
        },
    )


def _version_panels(site: Site, version: ModelVersion, stored: dict[str, Any] | None) -> dict[str, Panel]:
    """Return the panels of the facts of a version, of its stored size and of its signatures."""
    repository, ref = site.repo.repository, str(version)
    return {
        "version": Panel(
            show_facts(repository, version),
            site.command("models", "show", ref, "--json"),
            site.python("models.describe", ref),
        ),
        "stored": Panel(
            stored,
            site.command("models", "show", ref, "--stored", "--json"),
            f"{site.python('models.stored_size', ref)}.to_dict()",
        ),
        "signatures": Panel(
            list_signers(repository, Resolved("models", version.name, version.version)),
            site.command("models", "show", ref, "--signers", "--json"),
            site.python("models.signers", ref),
        ),
    }


def _problems(site: Site, version: ModelVersion, state: NameState) -> list[Problem]:
    counts = version.entry.get("num_nonfinite") or {}
    problems = []
    if counts:
        names = ", ".join(sorted(counts)[:5])
        problems.append(
            Problem(
                f"{version} has NaN or infinite elements in {len(counts)} of its tensors ({names}): its training "
                f"diverged or overflowed. {_way_out(site, version, state)}."
            )
        )
    return problems


def _way_out(site: Site, version: ModelVersion, state: NameState) -> str:
    """Return what to do about a version that is not finite."""
    earlier = [number for number in state.living if number < version.version][-NEWEST_IN_CHART:]
    entries = site.repo.repository.readable_entries("models", version.name, earlier)
    finite = [entry.number for entry in entries if not entry.content.get("num_nonfinite")]
    if finite:
        return f"Continue from {version.name}@{max(finite)}, the newest earlier version that has none"
    searched = "no earlier version that was searched is without them" if earlier else "there is no earlier one"
    return f"Start again, with other settings: {searched}"


def _stored(site: Site, version: ModelVersion, query: Query) -> tuple[dict[str, Any] | None, str | None]:
    """Return how the version is stored; or None, and why it is not known."""
    if version.removed:
        return None, "The version was removed, so gc may have deleted its bytes."
    if version.entry["num_tensors"] > _MAX_TENSORS and query.text("stored") is None:
        return None, "large"
    try:
        return measure_stored_size(site.repo.repository.objects, version.tensors).to_dict(), None
    except DatasvcError as error:
        return None, f"The tensor table cannot be read: {error}"


def _evaluated(site: Site, ref: str, query: Query) -> tuple[Panel | None, Mapping[str, tuple[int, int]], str | None]:
    """Return the first evaluation samples in the training data, and counts of all, on request; or why there are none.

    See `count_evaluated`.
    """
    if query.text("evaluated") is None:
        return None, {}, None
    try:
        found, counts = site.overlaps.get(
            ref,
            _MAX_EVALUATED,
            what=f"what of its evaluation {ref} was trained on",
            command=f"datasvc models evaluated {ref}",
            # The digests that are compared are those of a version, which never changes, and of its data but for a
            # purge.
            at=site.splits.last_redaction(site.repo.repository),
        )
    except (ConfigError, NotFoundError, UnavailableError) as error:
        return None, {}, str(error)
    command = site.command("models", "evaluated", ref, "--json")
    return Panel(found.to_json(), command, f"{site.python('models.find_evaluated', ref)}.to_json()"), counts, None


def _diff(site: Site, version: ModelVersion) -> str | None:
    """Return the stored local changes of the code; None if there are none, they are large or cannot be read."""
    digest = version.entry["code"].get("diff")
    if not digest:
        return None
    try:
        raw = site.repo.repository.objects.read(parse_digest(digest), _MAX_DIFF_BYTES)
    except DatasvcError:
        return None
    return raw.decode(errors="replace")


def _retention(site: Site, name: str, query: Query) -> tuple[Panel | None, str | None]:
    """Return what the policy in the address keeps and removes; or None, and what is wrong with the policy."""
    counts = {field: query.number(field, 0) or None for field in ("last", "best", "every", "every_steps")}
    metric, mode = query.text("keep_metric"), query.choice("mode", _MODES) or None
    if not any(counts.values()) and metric is None:
        return None, None
    options = {
        "--last": counts["last"],
        "--best": counts["best"],
        "--metric": metric,
        "--mode": mode,
        "--every": counts["every"],
        "--every-steps": counts["every_steps"],
    }
    try:
        policy = RetentionPolicy(
            counts["last"],
            counts["best"],
            metric,
            "max" if mode == "max" else "min" if mode == "min" else None,
            counts["every"],
            counts["every_steps"],
        )
        _, plan = retain(site.repo.repository, name, policy)
    except ConfigError as error:
        return None, str(error)
    texts = {option: None if value is None else str(value) for option, value in options.items()}
    command = site.command("models", "retain", name, "--json", options=texts)
    python = f"from datasvc.models import RetentionPolicy\n{site.python('models.retain', name, policy)}"
    return Panel({"name": name, "applied": False, **plan.to_dict()}, command, python), None


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
