"""Models: the list of them."""

from __future__ import annotations

from datasvc.models.registry.registry import list_models
from datasvc.ui.pages.datasets import count_names
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Query, RawResponse
from datasvc.ui.web.site import Site
from datasvc.ui.web.table_view import Column, TableView, view_table
from datasvc.ui.web.unreadable import collect_unreadable

_COLUMNS = (
    Column("model", "name"),
    Column("step", "step", "number"),
    Column("created", "created", "time"),
    Column("data"),
    Column("metrics"),
    Column("tags"),
)


def load_list(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
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
    return view_table(panel.values, _COLUMNS, query, path=path, prefix=prefix)


def models_panel(site: Site) -> Panel:
    """Return the newest version of each model, and the versions that cannot be read, as `models ls --json` does."""
    with collect_unreadable() as unreadable:
        models = [version.to_dict() for version in list_models(site.repo.repository)]
    return Panel([*models, *unreadable.facts()], site.command("models", "ls", "--json"), site.python("models.ls"))
