"""Data sets: the list of them."""

from __future__ import annotations

from datasvc.shards.versions.describe import summarize_datasets
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site


def load_list(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return all data sets with their newest version."""
    site.unreadable.clear()
    datasets = summarize_datasets(site.repo.repository)
    return Page(
        template="datasets.html",
        title="Data sets",
        section="datasets",
        crumbs=(Crumb("Data sets", "/datasets"),),
        problems=tuple(Problem(message) for message in site.unreadable.messages()),
        panels={"datasets": Panel(datasets, site.command("ls", "--json"), site.python("datasets.ls"))},
        view={"site": site},
    )
