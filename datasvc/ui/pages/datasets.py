"""Data sets: the list of them."""

from __future__ import annotations

from datasvc.shards.lines.commit import summarize_datasets
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Query, RawResponse
from datasvc.ui.web.site import Site
from datasvc.ui.web.table_view import Column, TableView, view_table
from datasvc.ui.web.unreadable import collect_unreadable

_COLUMNS = (
    Column("data set", "name"),
    Column("samples", "samples", "number"),
    Column("bytes", "bytes", "number", "bytes"),
    Column("created", "created", "time"),
    Column("tags"),
)


def load_list(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
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
    return view_table(panel.values, _COLUMNS, query, path=path, prefix=prefix)


def count_names(panel: Panel) -> int:
    """Return the number of data sets, or of models, in a list that names a data set for each unreadable version."""
    return len({row["name"] for row in panel.values})
