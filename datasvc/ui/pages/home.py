"""Home: what the repository has, and what needs attention."""

from __future__ import annotations

from datasvc.models.registry.registry import list_models
from datasvc.shards.versions.describe import summarize_datasets
from datasvc.ui.pages.problems import node_problems
from datasvc.ui.web.page import Content, Page, Panel, Parts, Problem, Query
from datasvc.ui.web.site import Site


def load(site: Site, parts: Parts, query: Query) -> Page | Content:  # noqa: ARG001 - the signature of all pages
    """Return the data sets, the models, the nodes, and the problems of all of them."""
    site.unreadable.clear()
    datasets = summarize_datasets(site.repo.repository)
    models = [version.to_dict() for version in list_models(site.repo.repository)]
    nodes = site.nodes.states()
    unreadable = [Problem(message) for message in site.unreadable.messages()]
    problems = [*unreadable, *(problem for state in nodes for problem in node_problems(state))]
    return Page(
        template="home.html",
        title="datasvc",
        section="home",
        problems=tuple(problems),
        panels={
            "datasets": Panel(datasets, site.command("ls", "--json"), site.python("datasets.ls")),
            "models": Panel(models, site.command("models", "ls", "--json"), site.python("models.ls")),
            "nodes": Panel({state.url: state.to_dict() for state in nodes}),
        },
        view={"site": site, "nodes": nodes},
    )
