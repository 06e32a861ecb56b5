"""Search: names and references, runs, keys of samples, digests. Each search is bounded, and says what it covered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Final

from datasvc.errors import CorruptDataError, DatasvcError, NotFoundError
from datasvc.printable import count_text
from datasvc.runs.reader import list_run_ids
from datasvc.shards.query.sample_details import MIN_DIGITS, is_digest_prefix
from datasvc.shards.query.sample_page import search_key
from datasvc.ui.pages.searching.digest_search import Match, SearchCoverage, find_digests
from datasvc.ui.web.links import dataset_link, model_link, run_link, sample_link, samples_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Query, RawResponse
from datasvc.ui.web.site import Site

_MAX_RESULTS: Final = 200
# Keys are compared one shard after the other, so that an answer takes less than a second.
_MAX_SHARDS: Final = 64
_MAX_DATASETS: Final = 32
_SHORT_DIGEST: Final = re.compile(f"[0-9a-f]{{1,{MIN_DIGITS - 1}}}")


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return what the text in the search box matches."""
    text = (query.text("q") or "").strip()
    coverage = SearchCoverage()
    results = list(islice(_find(site, text, coverage), _MAX_RESULTS)) if text else []
    return Page(
        template="search.html",
        title=f"Search: {text}",
        section="",
        crumbs=(Crumb("Search", "/search"),),
        panels={
            "results": Panel(results),
            "notes": Panel(coverage.notes),
            "searched": Panel(coverage.searched),
            "not_searched": Panel(coverage.left_out),
        },
        view={"text": text, "max_results": _MAX_RESULTS},
    )


def _find(site: Site, text: str, coverage: SearchCoverage) -> Iterator[Match]:
    """Yield the matches, the most probable ones first; describe in `coverage` what was searched and what was not."""
    yield from _find_names(site, text)
    coverage.searched.append("names and references of data sets and models")
    yield from _find_runs(site, text)
    coverage.searched.append("names and identifiers of runs")
    prefix = text.lower()
    if is_digest_prefix(prefix):
        yield from find_digests(site, prefix, coverage)
    elif _SHORT_DIGEST.fullmatch(prefix):
        digits = count_text(len(text), "hexadecimal digit")
        coverage.notes.append(f"Digests were not searched: {digits} are too few, type {MIN_DIGITS} or more.")
    yield from _find_samples(site, text, coverage)


def _find_names(site: Site, text: str) -> Iterator[Match]:
    for kind, collection, link in (
        ("data set", site.repo.datasets, dataset_link),
        ("model", site.repo.models, model_link),
    ):
        if "@" in text:
            try:
                version = str(collection.resolve(text, removed=True))
            except DatasvcError:
                continue
            yield {"kind": kind, "name": version, "link": link(version)}
        else:
            names = [name for name in collection.names() if text.lower() in name.lower()]
            yield from ({"kind": kind, "name": name, "link": link(name)} for name in names)


def _find_runs(site: Site, text: str) -> Iterator[Match]:
    for run_id, name in list_run_ids(site.repo.repository):
        if text.lower() in f"{name}/{run_id}":
            yield {"kind": "run", "name": f"{name}/{run_id}", "link": run_link(name, run_id)}


def _find_samples(site: Site, text: str, coverage: SearchCoverage) -> Iterator[Match]:
    """Yield the samples with the key `text` in the newest version of each data set; large splits are left out."""
    left_out = coverage.left_out
    num_shards = num_splits = 0
    names = site.repo.datasets.names()
    for name in names[:_MAX_DATASETS]:
        try:
            dataset = site.splits.version(site.repo.repository, name)
        except NotFoundError:
            continue  # all its versions are removed
        except DatasvcError as error:
            left_out.append({"kind": "data set", "name": f"keys of {name}: {error}", "link": dataset_link(name)})
            continue
        ref = str(dataset.resolved)
        for split, value in dataset.items():
            link = samples_link(ref, split, key=text)
            try:
                shards = value.table.num_shards
                if num_shards + shards > _MAX_SHARDS:
                    what = f"keys of {ref}/{split}, which has {count_text(shards, 'shard')}"
                    left_out.append({"kind": "split", "name": what, "link": link})
                    continue
                num_shards += shards
                number = search_key(site.splits.samples(dataset, split), text)
            except DatasvcError as error:
                left_out.append({"kind": "split", "name": f"keys of {ref}/{split}: {error}", "link": link})
                if isinstance(error, CorruptDataError | NotFoundError):
                    site.faults.note(error, dataset_link(ref))
                continue
            num_splits += 1
            if number is not None:
                found = sample_link(ref, split, number)
                yield {"kind": "sample", "name": f"{text} of {ref}/{split}", "link": found}
    coverage.searched.append(
        f"keys of samples, compared exactly, in {count_text(num_splits, 'split')} of the newest versions"
    )
    if len(names) > _MAX_DATASETS:
        left_out.append(
            {"kind": "data set", "name": f"keys of {len(names) - _MAX_DATASETS} more", "link": "/datasets"}
        )
