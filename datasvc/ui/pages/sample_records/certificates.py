"""The certificates of the purges of a data set: what was removed, when, by whom, and what the proof has searched."""

from __future__ import annotations

from typing import Any, Final

from datasvc.api.certificates import list_certificates, read_certificate
from datasvc.ui.web.links import certificate_link, dataset_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Query, RawResponse
from datasvc.ui.web.site import Site
from datasvc.ui.web.table_view import Column, view_table

_COLUMNS: Final = (Column("key", "key"),)


def certificates_panel(site: Site, name: str) -> Panel:
    """Return the certificates of a data set, oldest first."""
    return Panel(
        list_certificates(site.repo.repository, name),
        site.command("certificates", name, "--json"),
        site.python("datasets.list_certificates", name),
    )


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the page of one certificate of a data set, which the first characters of its digest name."""
    name = parts["ref"]
    found = read_certificate(site.repo.repository, parts["certificate"], name)
    digest = found["certificate"]
    here = certificate_link(name, digest)
    keys = view_table([{"key": key} for key in found["keys"]], _COLUMNS, query, path=here, prefix="keys_")
    return Page(
        template="certificate.html",
        title=f"Certificate {digest[:12]}",
        section="datasets",
        crumbs=(
            Crumb("Data sets", "/datasets"),
            Crumb(name, dataset_link(name)),
            Crumb(f"certificate {digest[:12]}", here),
        ),
        panels={
            "certificate": Panel(
                found,
                site.command("certificates", name, digest, "--json"),
                site.python("datasets.certificate", digest),
            )
        },
        view={"site": site, "name": name, "found": found, "keys": keys, "lists": _lists(found)},
    )


def _lists(found: dict[str, Any]) -> dict[str, list[str]]:
    """Return what still has the bytes, or is unknown, by a title."""
    proof = found["proof"]
    return {
        "Samples of the same bytes under other keys": [
            f"{key} in {data}/{split}" for data, split, key in found["copies"]
        ],
        "Objects that running work may still use": proof["unfinished"],
        "Objects that cannot be read": proof["unreadable"],
        "Versions in other repositories, from which it was copied": found["origins"],
        "Recorded copies, of which nothing is promised": [
            f"{each['version']} to {each['destination']}, {each['kind']} of {each['created'][:10]} by {each['by']}"
            for each in found.get("destinations", ())  # earlier releases recorded no copies
        ],
        "Caches with shards that were in use": [folder for folder, held in found["held"].items() if held],
    }
