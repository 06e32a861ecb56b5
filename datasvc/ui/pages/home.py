"""Home: what the repository has, and what needs attention."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from datasvc.runs import RunSummary, list_runs
from datasvc.ui.caches.recent_runs import MAX_RUNS
from datasvc.ui.pages.cluster import nodes_panel
from datasvc.ui.pages.datasets import count_names, datasets_panel, datasets_table
from datasvc.ui.pages.models import models_panel, models_table
from datasvc.ui.pages.problems import disk_problems, node_problems, recent_run_problems
from datasvc.ui.pages.runs import runs_panel, runs_table
from datasvc.ui.web.live import PageState
from datasvc.ui.web.node_monitor import NodeState
from datasvc.ui.web.page import Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site

_NUMBER: Final = re.compile(r"\d[\d,.]*")
_MAX_ENDED: Final = 5  # that are listed if no run is live


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
