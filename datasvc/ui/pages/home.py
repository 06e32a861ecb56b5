"""Home: what the repository has, and what needs attention."""

from __future__ import annotations

import time
from typing import Final

from datasvc.runs import list_runs
from datasvc.ui.pages.cluster import nodes_panel
from datasvc.ui.pages.datasets import count_names, datasets_panel, datasets_table
from datasvc.ui.pages.models import models_panel, models_table
from datasvc.ui.pages.problems import disk_problems, node_problems, recent_run_problems
from datasvc.ui.pages.run_table import runs_table
from datasvc.ui.pages.runs import runs_panel
from datasvc.ui.web.page import Page, Parts, Query, RawResponse
from datasvc.ui.web.site import Site

_MAX_RUNS: Final = 50  # that are read to find live ones and problems
_MAX_ENDED: Final = 5  # that are listed if no run is live


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return the data sets, the models, the nodes, and the problems of all of them."""
    datasets, models = datasets_panel(site), models_panel(site)
    runs = list_runs(site.repo.repository, last=_MAX_RUNS)
    live = [run for run in runs if run.state == "running"]
    nodes = site.nodes.states()
    of_nodes = [problem for state in nodes for problem in node_problems(state)]
    disk = disk_problems(site.repo.repository.storage.local_path(""))
    problems = [*site.faults.problems(), *of_nodes, *recent_run_problems(runs, time.time()), *disk]
    return Page(
        template="home.html",
        title="datasvc",
        section="home",
        problems=tuple(problems),
        panels={
            "datasets": datasets,
            "models": models,
            "runs": runs_panel(site, runs, last=_MAX_RUNS),
            "nodes": nodes_panel(nodes),
        },
        view={
            "site": site,
            "nodes": nodes,
            "num_datasets": count_names(datasets),
            "num_models": count_names(models),
            "datasets_table": datasets_table(datasets, query, path="/", prefix="datasets_"),
            "models_table": models_table(models, query, path="/", prefix="models_"),
            "num_live": len(live),
            "runs_table": runs_table(live or runs[:_MAX_ENDED], query, path="/", prefix="runs_"),
        },
    )
