"""Comparison of two data-set versions: samples with their pictures, drift of classes, and changes of columns."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np

from datasvc.printable import count_text
from datasvc.shards.query.sample_reader import NumberedSamples, SampleSummary
from datasvc.shards.versions.dataset import DatasetVersion
from datasvc.shards.versions.diff import SplitDifference, count_unshared, diff_versions
from datasvc.ui.web.links import dataset_link, diff_link, samples_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site
from datasvc.views.diffs import schema_changes

# A comparison reads the sample indexes of all shards that only one version has: at most so many samples on a page.
_MAX_UNSHARED = 1_000_000
_SHOWN_SAMPLES = 24  # of each kind and split
_SHOWN_CLASSES = 50


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the page of the changes from one version to another; `n` is the number of samples of each kind."""
    repository = site.repo.repository
    old, new = (site.splits.version(repository, parts[name]) for name in ("old", "new"))
    a, b = str(old.resolved), str(new.resolved)
    shown = query.number("n", _SHOWN_SAMPLES, low=1, high=1000)
    num_unshared = sum(
        count_unshared(old[name].table, new[name].table) if name in old and name in new else 0
        for name in {*old, *new}
    )
    panels, problems, splits = {}, [], []
    command, python = site.command("diff", a, b, "--json"), site.python("datasets.diff", a, b)
    if num_unshared > _MAX_UNSHARED:
        text = f"{num_unshared:,} samples are in shards that only one of the versions has: too many for a page; run "
        problems.append(Problem(f"{text}{site.command('diff', a, b)}", severity="warning"))
    else:
        difference = diff_versions(repository, old.resolved, new.resolved)
        panels["difference"] = Panel(difference.to_json(), command, python)
        splits = [
            _describe_split(site, old, new, name, changes, shown) for name, changes in difference.splits.items()
        ]
    left_out = sum(
        len(getattr(split["changes"], kind)) - len(split[kind])
        for split in splits
        for kind in ("added", "deleted", "changed", "relabelled")
    )
    return Page(
        template="diff.html",
        title=f"{a} to {b}",
        section="datasets",
        crumbs=(
            Crumb("Data sets", "/datasets"),
            Crumb(a, dataset_link(a)),
            Crumb(f"to {b}", diff_link(a, b)),
        ),
        problems=tuple(problems),
        panels=panels,
        view={
            "site": site,
            "a": a,
            "b": b,
            "splits": splits,
            "shown": shown,
            "sentence": _sentence(a, b, splits),
            "num_left_out": left_out,
        },
    )


def _describe_split(
    site: Site, old: DatasetVersion, new: DatasetVersion, name: str, changes: SplitDifference, shown: int
) -> dict[str, Any]:
    """Return what the template shows of one split."""
    before = site.splits.samples(old, name) if name in old else None
    after = site.splits.samples(new, name) if name in new else None
    changed_from = zip(changes.changed_from.shards.tolist(), changes.changed_from.rows.tolist(), strict=True)
    added = _samples(after, ((shard, row) for _, shard, row in changes.added.places()), shown)
    deleted = _samples(before, ((shard, row) for _, shard, row in changes.deleted.places()), shown)
    changed_to = _samples(after, ((shard, row) for _, shard, row in changes.changed.places()), shown)
    schema = schema_changes(changes.to_json(0), _SHOWN_CLASSES)
    counts = map(len, (changes.added, changes.deleted, changes.changed))
    drift = sorted(changes.class_counts.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    relabelled = _samples(after, ((shard, row) for _, shard, row in changes.relabelled_places), shown)
    return {
        "name": name,
        "changes": changes,
        "images": [column for samples in (after or before,) if samples for column in samples.image_columns],
        "added": added,
        "deleted": deleted,
        "changed": list(zip(_samples(before, changed_from, shown), changed_to, strict=True)),
        "relabelled": [(sample, change.old) for sample, change in zip(relabelled, changes.relabelled, strict=False)],
        "confusion": changes.confusion[:_SHOWN_CLASSES],
        "num_pairs": len(changes.confusion),
        "drift": drift[:_SHOWN_CLASSES],
        "schema": schema,
        "is_equal": not any((*counts, schema, changes.class_counts)),
        "class_links": _class_links(old, new, name, str(old.resolved), str(new.resolved)),
        "is_new": before is None,
        "is_removed": after is None,
    }


def _class_links(old: DatasetVersion, new: DatasetVersion, name: str, a: str, b: str) -> dict[str, str]:
    """Return for each class of a split the address of its samples: in the newer version if this has the class."""
    links: dict[str, str] = {}
    for version, ref in ((old, a), (new, b)):
        if name in version:
            links |= {
                text: samples_link(ref, name, where=f"label = {label}")
                for label, text in enumerate(version[name].classes)
            }
    return links


def _samples(samples: NumberedSamples | None, places: Iterable[tuple[int, int]], shown: int) -> list[SampleSummary]:
    """Return the samples at the first `shown` places, each a shard and a row, in their order."""
    if samples is None:
        return []
    numbers = [samples.live_numbers(shard, np.array([row], np.int64))[row] for shard, row in islice(places, shown)]
    return samples.summaries(numbers)


def _sentence(a: str, b: str, splits: list[dict[str, Any]]) -> str:
    """Return the changes in words."""
    counts = [
        (sum(len(getattr(split["changes"], kind)) for split in splits), kind)
        for kind in ("added", "deleted", "changed", "relabelled")
    ]
    parts = [f"{count_text(count, 'sample')} {kind}" for count, kind in counts if count]
    if not splits:
        return f"{a} and {b} were not compared."
    return f"From {a} to {b}: {', '.join(parts)}." if parts else f"{a} and {b} have the same samples."
