"""Home: what the repository has, and what needs attention."""

from __future__ import annotations

import time
from typing import Final

from datasvc.models.registry.registry import list_models
from datasvc.runs import list_runs
from datasvc.shards.versions.describe import summarize_datasets
from datasvc.ui.pages.problems import disk_problems, node_problems, recent_run_problems, starved_share
from datasvc.ui.web.page import Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site

_MAX_RUNS: Final = 50  # that are read to find live ones and problems
_MAX_ENDED: Final = 5  # that are listed if no run is live


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return the data sets, the models, the nodes, and the problems of all of them."""
    site.unreadable.clear()
    datasets = summarize_datasets(site.repo.repository)
    models = [version.to_dict() for version in list_models(site.repo.repository)]
    runs = list_runs(site.repo.repository, last=_MAX_RUNS)
    live = [run for run in runs if run.state == "running"]
    nodes = site.nodes.states()
    unreadable = [Problem(message) for message in site.unreadable.messages()]
    of_nodes = [problem for state in nodes for problem in node_problems(state)]
    disk = disk_problems(site.repo.repository.storage.local_path(""))
    problems = [*unreadable, *of_nodes, *recent_run_problems(runs, time.time()), *disk]
    return Page(
        template="home.html",
        title="datasvc",
        section="home",
        problems=tuple(problems),
        panels={
            "datasets": Panel(datasets, site.command("ls", "--json"), site.python("datasets.ls")),
            "models": Panel(models, site.command("models", "ls", "--json"), site.python("models.ls")),
            "runs": Panel(
                [run.to_dict() for run in runs],
                site.command("runs", "ls", "--json", options={"--last": str(_MAX_RUNS)}),
            ),
            "nodes": Panel({state.url: state.to_dict() for state in nodes}),
        },
        view={
            "site": site,
            "nodes": nodes,
            "num_live": len(live),
            "rows": [(run, starved_share(run.latest)) for run in (live or runs[:_MAX_ENDED])],
        },
    )
