"""Search: names and references, runs, keys of samples, digests. Each search is bounded, and says what it covered."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from datasvc.errors import CorruptDataError, DatasvcError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository.repository import Kind
from datasvc.runs.reader import list_run_ids
from datasvc.shards.query.sample_page import search_key
from datasvc.ui.web.links import dataset_link, model_link, run_link, sample_link, samples_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Query, RawResponse
from datasvc.ui.web.site import Site

_MAX_RESULTS: Final = 200
# Keys are compared one shard after the other, so that an answer takes less than a second.
_MAX_SHARDS: Final = 64
_MAX_DATASETS: Final = 32
_MAX_ENTRIES: Final = 200
_DIGEST: Final = re.compile(r"[0-9a-f]{6,64}")
# Fields of an entry that name something by a digest or a revision.
_DIGESTS: Final = ("tensors", "state", "sharding", "content", "commit")

_Match = dict[str, str]


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return what the text in the search box matches."""
    text = (query.text("q") or "").strip()
    searched: list[str] = []
    left_out: list[_Match] = []
    results = list(islice(_find(site, text, searched, left_out), _MAX_RESULTS)) if text else []
    return Page(
        template="search.html",
        title=f"Search: {text}",
        section="",
        crumbs=(Crumb("Search", "/search"),),
        panels={"results": Panel(results), "searched": Panel(searched), "not_searched": Panel(left_out)},
        view={"text": text, "max_results": _MAX_RESULTS},
    )


def _find(site: Site, text: str, searched: list[str], left_out: list[_Match]) -> Iterator[_Match]:
    """Yield the matches, the most probable ones first.

    Adds to `searched` what was searched, and to `left_out` what was not, with a link that searches it.
    """
    yield from _find_names(site, text)
    searched.append("names and references of data sets and models")
    yield from _find_runs(site, text)
    searched.append("names and identifiers of runs")
    if _DIGEST.fullmatch(text):
        yield from _find_digests(site, text, searched)
    yield from _find_samples(site, text, searched, left_out)


def _find_names(site: Site, text: str) -> Iterator[_Match]:
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


def _find_runs(site: Site, text: str) -> Iterator[_Match]:
    for run_id, name in list_run_ids(site.repo.repository):
        if text.lower() in f"{name}/{run_id}":
            yield {"kind": "run", "name": f"{name}/{run_id}", "link": run_link(name, run_id)}


def _find_digests(site: Site, text: str, searched: list[str]) -> Iterator[_Match]:
    """Yield the versions whose entries have a digest, or a revision of the code, that begins with `text`."""
    repository = site.repo.repository
    kinds: tuple[Kind, ...] = ("datasets", "models")
    names = [(kind, name) for kind in kinds for name in repository.names(kind)]
    most = max(1, _MAX_ENTRIES // max(len(names), 1))
    of_names = "each data set and model"
    if len(names) > _MAX_ENTRIES:
        of_names = f"the first {_MAX_ENTRIES} of {len(names):,} data sets and models"
    for kind, name in names[:_MAX_ENTRIES]:
        for entry in reversed(repository.entries(kind, name, last=most)):
            version = f"{name}@{entry.number}"
            for what, value in _digests(entry.content):
                if value.startswith(text):
                    link = dataset_link(version) if kind == "datasets" else model_link(version)
                    yield {"kind": what, "name": f"{value} of {version}", "link": link}
    searched.append(
        f"digests in the newest {count_text(most, 'version')} of {of_names}: tensors, states, shard tables, commits "
        "and revisions of the code; not those of shards and samples"
    )


def _digests(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the value of each digest in an entry; what is not valid is left out."""
    found: list[tuple[str, Any]] = [(f"digest ({name})", entry.get(name)) for name in _DIGESTS]
    code, splits = entry.get("code"), entry.get("splits")
    if isinstance(code, Mapping):
        found += [("code revision", code.get("revision")), ("digest (local changes of the code)", code.get("diff"))]
    if isinstance(splits, Mapping):
        found += [
            ("digest (shard table)", facts.get("table")) for facts in splits.values() if isinstance(facts, Mapping)
        ]
    yield from ((what, value) for what, value in found if isinstance(value, str))


def _find_samples(site: Site, text: str, searched: list[str], left_out: list[_Match]) -> Iterator[_Match]:
    """Yield the samples with the key `text` in the newest version of each data set; large splits are left out."""
    num_shards = num_splits = 0
    names = site.repo.datasets.names()
    for name in names[:_MAX_DATASETS]:
        try:
            dataset = site.splits.version(site.repo.repository, name)
        except NotFoundError:
            continue  # all its versions are removed
        except DatasvcError as error:
            left_out.append({"kind": "data set", "name": f"{name}: {error}", "link": dataset_link(name)})
            continue
        ref = str(dataset.resolved)
        for split, value in dataset.items():
            shards = value.table.num_shards
            if num_shards + shards > _MAX_SHARDS:
                what = f"{ref}/{split}, which has {count_text(shards, 'shard')}"
                left_out.append({"kind": "split", "name": what, "link": samples_link(ref, split, key=text)})
                continue
            num_shards += shards
            try:
                number = search_key(site.splits.samples(dataset, split), text)
            except DatasvcError as error:
                link = samples_link(ref, split, key=text)
                left_out.append({"kind": "split", "name": f"{ref}/{split}: {error}", "link": link})
                if isinstance(error, CorruptDataError | NotFoundError):
                    site.faults.note(error, dataset_link(ref))
                continue
            num_splits += 1
            if number is not None:
                link = sample_link(ref, split, number)
                yield {"kind": "sample", "name": f"{text} of {ref}/{split}", "link": link}
    searched.append(f"keys of samples, compared exactly, in {count_text(num_splits, 'split')} of the newest versions")
    if len(names) > _MAX_DATASETS:
        left_out.append({"kind": "data set", "name": f"{len(names) - _MAX_DATASETS} more", "link": "/datasets"})
