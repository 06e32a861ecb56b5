"""Search: names and references, runs, keys of samples, digests. Each search is bounded, and says what it covered.

No shard is read: the digests of samples are in sample indexes, those of shards in shard tables.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from datasvc.errors import CorruptDataError, DatasvcError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository import Entry, Resolved
from datasvc.repository.resolved import Kind, keep_valid
from datasvc.runs.reader import list_run_ids
from datasvc.shards.lines.commit import check_splits
from datasvc.shards.query.sample_details import (
    MAX_SAMPLE_DIGITS,
    MIN_DIGITS,
    find_samples,
    find_shards,
    is_digest_prefix,
)
from datasvc.shards.query.sample_page import search_key
from datasvc.shards.versions.dataset import DatasetVersion, Split
from datasvc.threads import map_in_threads
from datasvc.ui.web.links import dataset_link, model_link, run_link, sample_link, samples_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Query, RawResponse
from datasvc.ui.web.site import Site

_MAX_RESULTS: Final = 200
# Keys are compared one shard after the other, so that an answer takes less than a second.
_MAX_SHARDS: Final = 64
_MAX_DATASETS: Final = 32
_SHORT_DIGEST: Final = re.compile(f"[0-9a-f]{{1,{MIN_DIGITS - 1}}}")
_MAX_ENTRIES: Final = 200
_MAX_DIGESTS: Final = 20  # different ones that are shown
_MAX_PLACES: Final = 20  # that are shown of one digest, such as the versions that have a shard
_MAX_TABLES: Final = 200
_MAX_ROWS: Final = 200_000  # of all these tables
_TABLES_AT_ONCE: Final = 4
_MAX_SAMPLES: Final = 1_000_000
# Fields of an entry that name something by a digest or a revision.
_DIGESTS: Final = ("tensors", "state", "sharding", "content", "commit")

Match = dict[str, str]


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


# Each part is bounded: entries of versions, rows of their shard tables, and the samples of the newest versions, whose
# digests are in sample indexes. No shard is read.


@dataclass
class SearchCoverage:
    """What a search covers.

    Attributes:
        searched: what was searched, in words.
        left_out: what was not, with a link that leads to it.
        notes: what a reader has to do to find more.
    """

    searched: list[str] = field(default_factory=list)
    left_out: list[Match] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_digests(site: Site, prefix: str, coverage: SearchCoverage) -> Iterator[Match]:
    """Yield what has a digest, or a revision of the code, that begins with `prefix`, newest versions first."""
    versions: list[DatasetVersion] = []
    found = [
        *_find_in_entries(site, prefix, versions, coverage),
        *_find_shards(site, prefix, versions, coverage),
        *_find_sample_digests(site, prefix, coverage),
    ]
    places = Counter(digest for digest, _, _, _ in found)
    shown = set(list(places)[:_MAX_DIGESTS])
    if len(places) > _MAX_DIGESTS:
        coverage.notes.append(
            f"{prefix} is the beginning of {count_text(len(places), 'digest')}, of which the first {_MAX_DIGESTS} "
            "are shown: type more digits."
        )
    num_shown: Counter[str] = Counter()
    for digest, kind, place, link in found:
        if digest not in shown or num_shown[digest] == _MAX_PLACES:
            continue
        num_shown[digest] += 1
        yield {"kind": kind, "name": f"{digest} of {place}", "link": link}
        if num_shown[digest] == _MAX_PLACES < places[digest]:
            coverage.notes.append(f"{digest} is at {places[digest]:,} places, of which {_MAX_PLACES} are shown.")


_Found = tuple[str, str, str, str]
"""Digest, kind, where it is, and the address of that."""


def _find_in_entries(
    site: Site, prefix: str, versions: list[DatasetVersion], coverage: SearchCoverage
) -> Iterator[_Found]:
    """Yield what the entries of versions name, and add the data-set versions that are not removed to `versions`."""
    repository = site.repo.repository
    kinds: tuple[Kind, ...] = ("datasets", "models")
    names = [(kind, name) for kind in kinds for name in repository.names(kind)]
    most = max(1, _MAX_ENTRIES // max(len(names), 1))
    of_names = "each data set and model"
    if len(names) > _MAX_ENTRIES:
        of_names = f"the first {_MAX_ENTRIES} of {len(names):,} data sets and models"
    for kind, name in names[:_MAX_ENTRIES]:
        entries = list(reversed(repository.entries(kind, name, last=most)))
        if kind == "datasets":
            versions += _living(site, name, entries)
        for entry in entries:
            version = f"{name}@{entry.number}"
            link = dataset_link(version) if kind == "datasets" else model_link(version)
            for what, value in _digests(entry.content):
                if value.startswith(prefix):
                    yield value, what, version, link
    coverage.searched.append(
        f"digests in the newest {count_text(most, 'version')} of {of_names}: tensors, states, shard tables, commits "
        "and revisions of the code"
    )


def _living(site: Site, name: str, entries: list[Entry]) -> Iterator[DatasetVersion]:
    """Yield the versions of a data set that are not removed, and whose entries are valid."""
    repository = site.repo.repository
    removed = repository.state("datasets", name).removed
    for entry in keep_valid("datasets", name, entries, check_splits):
        if entry.number not in removed:
            yield DatasetVersion(repository, Resolved("datasets", name, entry.number), entry)


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


def _find_shards(
    site: Site, prefix: str, versions: list[DatasetVersion], coverage: SearchCoverage
) -> Iterator[_Found]:
    """Yield the shards, sample indexes and deletions that the shard tables of versions list."""
    by_table: dict[str, list[Split]] = {}
    num_rows = 0
    for version in versions:
        described = version.entry.content["splits"]
        for name, split in version.items():
            if split.digest not in by_table:
                num_rows += described[name]["shards"]
                if num_rows > _MAX_ROWS or len(by_table) == _MAX_TABLES:
                    num_rows -= described[name]["shards"]
                    _leave_out(coverage, f"shards of {split.dataset}/{name}", split.dataset)
                    continue
            by_table.setdefault(split.digest, []).append(split)

    def search(splits: list[Split]) -> list[_Found] | DatasvcError:
        try:
            table = splits[0].table
            # The places of all versions that have this table.
            starts = [0, *table.samples_per_shard.cumsum().tolist()]
            return [
                (
                    match.digest,
                    f"digest ({match.kind})",
                    f"{split.dataset}/{split.name}" + ("" if match.shard is None else f", shard {match.shard:,}"),
                    samples_link(split.dataset, split.name, start=starts[match.shard or 0] or None),
                )
                for match in find_shards(table, prefix)
                for split in splits
            ]
        except DatasvcError as error:
            return error

    for splits, found in zip(
        by_table.values(), map_in_threads(search, by_table.values(), _TABLES_AT_ONCE), strict=True
    ):
        if isinstance(found, DatasvcError):
            _note_error(site, coverage, splits[0], found)
        else:
            yield from found
    coverage.searched.append(
        f"digests of shards, sample indexes and deletions in {count_text(len(by_table), 'shard table')} of these "
        "versions"
    )


def _find_sample_digests(site: Site, prefix: str, coverage: SearchCoverage) -> Iterator[_Found]:
    """Yield the samples of the newest version of each data set; large splits are left out."""
    if len(prefix) > MAX_SAMPLE_DIGITS:
        coverage.searched.append(f"no digests of samples: they have {MAX_SAMPLE_DIGITS} digits")
        return
    num_shards = num_samples = num_splits = 0
    names = site.repo.datasets.names()
    for name in names[:_MAX_DATASETS]:
        try:
            dataset = site.splits.version(site.repo.repository, name)
        except DatasvcError:
            continue  # removed, or named by the search for keys
        for split in dataset.values():
            of_split = f"digests of the samples of {split.dataset}/{split.name}"
            try:
                table = split.table
                stored = int(table.stored_per_shard.sum())
                if num_shards + table.num_shards > _MAX_SHARDS or num_samples + stored > _MAX_SAMPLES:
                    shards = count_text(table.num_shards, "shard")
                    _leave_out(coverage, f"{of_split}, which has {shards}", split.dataset)
                    continue
                num_shards, num_samples = num_shards + table.num_shards, num_samples + stored
                matches = find_samples(site.splits.samples(dataset, split.name), prefix)
            except DatasvcError as error:
                _note_error(site, coverage, split, error)
                continue
            indexed = sum(table.index(shard) is not None for shard in range(table.num_shards))
            if indexed < table.num_shards:
                shards = f"{table.num_shards - indexed} of {count_text(table.num_shards, 'shard')}"
                _leave_out(coverage, f"{of_split}: {shards} without a sample index", split.dataset)
            num_splits += indexed > 0
            for match in matches:
                kind = "digest (sample)" if match.kind == "sample" else "digest (content of a sample)"
                place = f"{match.key} of {split.dataset}/{split.name}"
                yield match.digest, kind, place, sample_link(split.dataset, split.name, match.number)
    if len(names) > _MAX_DATASETS:
        what = f"digests of the samples of {len(names) - _MAX_DATASETS} more"
        coverage.left_out.append({"kind": "data set", "name": what, "link": "/datasets"})
    coverage.searched.append(f"digests of samples in {count_text(num_splits, 'split')} of the newest versions")


def _leave_out(coverage: SearchCoverage, what: str, version: str) -> None:
    coverage.left_out.append({"kind": "split", "name": what, "link": dataset_link(version)})


def _note_error(site: Site, coverage: SearchCoverage, split: Split, error: DatasvcError) -> None:
    _leave_out(coverage, f"digests of {split.dataset}/{split.name}: {error}", split.dataset)
    if isinstance(error, CorruptDataError | NotFoundError):
        site.faults.note(error, dataset_link(split.dataset))
