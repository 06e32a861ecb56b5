"""Search: data sets and models by a part of their name, and versions by reference."""

from __future__ import annotations

from datasvc.errors import DatasvcError
from datasvc.ui.web.links import dataset_link, model_link
from datasvc.ui.web.page import Content, Crumb, Page, Panel, Parts, Query
from datasvc.ui.web.site import Site

_MAX_RESULTS = 200


def load(site: Site, parts: Parts, query: Query) -> Page | Content:  # noqa: ARG001 - the signature of all pages
    """Return what the text in the search box matches."""
    text = (query.text("q") or "").strip()
    results = _find(site, text)[:_MAX_RESULTS] if text else []
    return Page(
        template="search.html",
        title=f"Search: {text}",
        section="",
        crumbs=(Crumb("Search", "/search"),),
        panels={"results": Panel(results)},
        view={"text": text, "max_results": _MAX_RESULTS},
    )


def _find(site: Site, text: str) -> list[dict[str, str]]:
    found = []
    for kind, collection, link in (
        ("data set", site.repo.datasets, dataset_link),
        ("model", site.repo.models, model_link),
    ):
        if "@" in text:
            try:
                version = str(collection.resolve(text, removed=True))
            except DatasvcError:
                continue
            found.append({"kind": kind, "name": version, "link": link(version)})
        else:
            names = [name for name in collection.names() if text.lower() in name.lower()]
            found += [{"kind": kind, "name": name, "link": link(name)} for name in names]
    return found
