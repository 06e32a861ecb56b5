"""Home: what the repository has, and what needs attention; and the lists of data sets and of models."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from datasvc.models.registry.registry import list_models
from datasvc.runs import RunSummary, list_runs
from datasvc.shards.lines.commit import summarize_datasets
from datasvc.ui.caches import MAX_RUNS
from datasvc.ui.pages.cluster import nodes_panel
from datasvc.ui.pages.problems import disk_problems, node_problems, recent_run_problems
from datasvc.ui.pages.runs import runs_panel, runs_table
from datasvc.ui.web.live import PageState
from datasvc.ui.web.node_monitor import NodeState
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.seen_faults import collect_unreadable
from datasvc.ui.web.site import Site
from datasvc.ui.web.table_view import Column, TableView, view_table

_NUMBER: Final = re.compile(r"\d[\d,.]*")
_MAX_ENDED: Final = 5  # that are listed if no run is live
_MODEL_COLUMNS = (
    Column("model", "name"),
    Column("step", "step", "number"),
    Column("created", "created", "time"),
    Column("data"),
    Column("metrics"),
    Column("tags"),
)
_DATASET_COLUMNS = (
    Column("data set", "name"),
    Column("samples", "samples", "number"),
    Column("bytes", "bytes", "number", "bytes"),
    Column("created", "created", "time"),
    Column("tags"),
)


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return the data sets, the models, the nodes, and the problems of all of them."""
    datasets, models = datasets_panel(site), models_panel(site)
    runs, nodes = list_runs(site.repo.repository, last=MAX_RUNS), site.nodes.states()
    return Page(
        template="home.html",
        title="datasvc",
        section="home",
        problems=tuple(_problems(site, runs, nodes)),
        panels={"datasets": datasets, "models": models, **_live_panels(site, runs, nodes)},
        view={
            **_live_view(site, runs, nodes, query),
            "num_datasets": count_names(datasets),
            "num_faults": len(site.faults.problems()),
            "num_models": count_names(models),
            "datasets_table": datasets_table(datasets, query, path="/", prefix="datasets_"),
            "models_table": models_table(models, query, path="/", prefix="models_"),
        },
    )


def load_live(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - see `load`
    """Return the live parts of the page alone: its other parts take a listing of each data set and model."""
    runs, nodes = site.recent_runs.read(site.repo.repository), site.nodes.states()
    return Page(
        template="home_live.html",
        title="datasvc",
        section="home",
        panels=_live_panels(site, runs, nodes),
        view=_live_view(site, runs, nodes, query),
    )


def state_of(site: Site, parts: Parts) -> PageState:  # noqa: ARG001 - the signature of all live pages
    """Return the state of the page: its runs and nodes; its problems are its shape."""
    runs, nodes = site.recent_runs.read(site.repo.repository), site.nodes.states()
    # Not the numbers in the texts of problems: ages change with every look.
    problems = [(each.link, each.severity, _NUMBER.sub("", each.text)) for each in _problems(site, runs, nodes)]
    shape = [problems, [(run.ref, run.state) for run in runs]]
    version = [(run.ref, run.state, run.last_s) for run in runs]
    return PageState(f"{site.nodes.num_readings} {version}", shape=str(shape))


def _problems(site: Site, runs: Sequence[RunSummary], nodes: Sequence[NodeState]) -> list[Problem]:
    """Return the problems that pages have met, and those of nodes, runs, and the disk of the repository."""
    of_nodes = [problem for state in nodes for problem in node_problems(state)]
    disk = disk_problems(site.repo.repository.storage.local_path(""))
    return [*site.faults.problems(), *of_nodes, *recent_run_problems(runs, time.time()), *disk]


def _live_panels(site: Site, runs: Sequence[RunSummary], nodes: Sequence[NodeState]) -> Mapping[str, Panel]:
    return {"runs": runs_panel(site, runs, last=MAX_RUNS), "nodes": nodes_panel(nodes)}


def _live_view(site: Site, runs: Sequence[RunSummary], nodes: Sequence[NodeState], query: Query) -> Mapping[str, Any]:
    live = [run for run in runs if run.state == "running"]
    return {
        "site": site,
        "nodes": nodes,
        "num_live": len(live),
        "runs_table": runs_table(live or runs[:_MAX_ENDED], query, path="/", prefix="runs_"),
    }


def load_models(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return all models with their newest version."""
    panel = models_panel(site)
    return Page(
        template="models.html",
        title="Models",
        section="models",
        crumbs=(Crumb("Models", "/models"),),
        panels={"models": panel},
        view={"site": site, "num_models": count_names(panel), "models_table": models_table(panel, query)},
    )


def models_table(panel: Panel, query: Query, *, path: str = "/models", prefix: str = "") -> TableView:
    """Return the page of the table of models that the address names; for arguments, see `view_table`."""
    return view_table(panel.values, _MODEL_COLUMNS, query, path=path, prefix=prefix)


def models_panel(site: Site) -> Panel:
    """Return the newest version of each model, and the versions that cannot be read, as `models ls --json` does."""
    with collect_unreadable() as unreadable:
        models = [version.to_dict() for version in list_models(site.repo.repository)]
    return Panel([*models, *unreadable.facts()], site.command("models", "ls", "--json"), site.python("models.ls"))


def load_datasets(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return all data sets with their newest version."""
    panel = datasets_panel(site)
    return Page(
        template="datasets.html",
        title="Data sets",
        section="datasets",
        crumbs=(Crumb("Data sets", "/datasets"),),
        panels={"datasets": panel},
        view={"site": site, "num_datasets": count_names(panel), "datasets_table": datasets_table(panel, query)},
    )


def datasets_panel(site: Site) -> Panel:
    """Return the newest version of each data set, and the versions that cannot be read, as `datasvc ls --json`."""
    with collect_unreadable() as unreadable:
        datasets = summarize_datasets(site.repo.repository)
    return Panel([*datasets, *unreadable.facts()], site.command("ls", "--json"), site.python("datasets.ls"))


def datasets_table(panel: Panel, query: Query, *, path: str = "/datasets", prefix: str = "") -> TableView:
    """Return the page of the table of data sets that the address names; for arguments, see `view_table`."""
    return view_table(panel.values, _DATASET_COLUMNS, query, path=path, prefix=prefix)


def count_names(panel: Panel) -> int:
    """Return the number of data sets, or of models, in a list that names a data set for each unreadable version."""
    return len({row["name"] for row in panel.values})
