"""Models: the list of them."""

from __future__ import annotations

from datasvc.models.registry.registry import list_models
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site


def load_list(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return all models with their newest version."""
    site.unreadable.clear()
    models = [version.to_dict() for version in list_models(site.repo.repository)]
    return Page(
        template="models.html",
        title="Models",
        section="models",
        crumbs=(Crumb("Models", "/models"),),
        problems=tuple(Problem(message) for message in site.unreadable.messages()),
        panels={"models": Panel(models, site.command("models", "ls", "--json"), site.python("models.ls"))},
        view={"site": site},
    )
