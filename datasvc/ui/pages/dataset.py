"""One version of a data set: its history, splits, columns, distributions, and what its ingest rejected."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from datasvc import drawing
from datasvc.printable import count_text
from datasvc.shards.history.version_nodes import dataset_nodes
from datasvc.shards.query.histogram import Histogram, list_columns
from datasvc.shards.query.shared_bytes import shared_bytes
from datasvc.shards.versions.describe import describe_log, describe_version, read_bad_samples
from datasvc.threads import map_in_threads
from datasvc.ui.web.links import dataset_link, diff_link, samples_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site

_MAX_VERSIONS = 50  # of the graph
_MAX_COMPARED = 20  # versions whose shared bytes are shown
_MAX_COMPARED_SHARDS = 200_000  # of all of them
_MAX_HISTOGRAMS = 12
_HISTOGRAMS_AT_ONCE = 2
_MAX_CLASSES = 200  # in the list of classes; more are searched
_USUAL_SPLIT = "train"


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the page of a version; `split`, `where` and `class` in the address select among its panels."""
    repository = site.repo.repository
    resolved, state = repository.resolve_with_state("datasets", parts["ref"], removed=True)
    name, ref = resolved.name, str(resolved)
    site.unreadable.clear(name)
    facts = describe_version(repository, ref)
    num_versions = _MAX_VERSIONS if query.text("all") is None else None
    nodes = dataset_nodes(repository, name, last=num_versions, href=dataset_link)
    more = dataset_link(ref, all=1) if len(state.versions) > len(nodes) else None
    log_options = {"--last": None if num_versions is None else str(num_versions)}
    panels = {
        "version": Panel(facts, site.command("show", ref, "--json"), site.python("datasets.describe", ref)),
        "versions": Panel(
            describe_log(repository, name, last=num_versions),
            site.command("log", name, "--json", options=log_options),
            site.python("datasets.log", name, last=num_versions),
        ),
    }
    panels |= _compare_bytes(site, name, panels["versions"].values)
    view: dict[str, Any] = {
        "site": site,
        "ref": ref,
        "name": name,
        "graph": drawing.version_graph(nodes, title=f"versions of {name}", more_href=more),
        "graph_table": drawing.version_table(nodes, caption=f"versions of {name}"),
        "previous": _previous(state.living, resolved.version, name),
        "removed": bool(facts.get("removed")),
        "diff_link": diff_link,
    }
    if not view["removed"]:
        view |= _show_split(site, ref, facts, query, panels)
        panels["quarantine"] = Panel(
            read_bad_samples(repository, ref),
            site.command("show", ref, "--bad", "--json"),
            site.python("datasets.bad_samples", ref),
        )
    return Page(
        template="dataset.html",
        title=ref,
        section="datasets",
        crumbs=(Crumb("Data sets", "/datasets"), Crumb(ref, dataset_link(ref))),
        problems=tuple(Problem(message, severity="warning") for message in site.unreadable.messages(name)),
        panels=panels,
        view=view,
    )


def _compare_bytes(site: Site, name: str, log: Sequence[Mapping[str, Any]]) -> dict[str, Panel]:
    """Return the panel of the bytes that the newest versions share; none if their shard tables are too large."""
    num_shards = list(
        itertools.accumulate(
            sum(split["shards"] for split in entry["splits"].values()) for entry in reversed(log[-_MAX_COMPARED:])
        )
    )
    last = bisect.bisect_right(num_shards, _MAX_COMPARED_SHARDS)
    if not last:
        return {}
    compared = shared_bytes(site.repo.repository, name, last=last)
    return {
        "bytes": Panel(
            [each.to_json() for each in compared],
            site.command("log", name, "--bytes", "--json", options={"--last": str(last)}),
            site.python("datasets.shared_bytes", name, last=last),
        )
    }


def _show_split(
    site: Site, ref: str, facts: Mapping[str, Any], query: Query, panels: dict[str, Panel]
) -> dict[str, Any]:
    """Add the histograms of the chosen split to `panels`; return what the template needs of them."""
    dataset = site.splits.version(site.repo.repository, ref)
    names = list(dataset)
    split = query.choice("split", (*(name for name in names if name == _USUAL_SPLIT), *names)) if names else None
    if split is None:
        return {"split": None}
    where = query.text("where")
    columns = list_columns(dataset[split])[:_MAX_HISTOGRAMS]
    counts = map_in_threads(
        lambda column: site.splits.histogram(dataset, split, column, where), columns, _HISTOGRAMS_AT_ONCE
    )
    charts = []
    for column, counted in zip(columns, counts, strict=True):
        name = f"histogram {column}"
        options = {"--split": split, "--where": where}
        panels[name] = Panel(
            counted.to_json(),
            site.command("histogram", ref, column, "--json", options=options),
            site.python("datasets.histogram", ref, column, split=split, where=where),
        )
        heading = f"{column}, bytes" if counted.is_size else column
        charts.append({"name": name, "column": heading, "counted": counted, **draw_histogram(counted, ref, split)})
    return {
        "split": split,
        "splits": names,
        "where": where or "",
        "charts": charts,
        **_classes(facts["splits"][split], query.text("class")),
    }


def draw_histogram(counted: Histogram, ref: str, split: str) -> dict[str, Any]:
    """Return the picture and the table of a histogram; its bars lead to the samples that they count."""

    def href(where: str) -> str:
        both = where if counted.where is None else f"({counted.where}\n) and {where}"
        return samples_link(ref, split, where=both)

    title = f"{counted.column}, {_read_text(counted)}"
    if counted.kind == "numbers":
        bins = [
            drawing.HistogramBin(bar.start or 0.0, bar.stop or 0.0, bar.count, href(bar.where))
            for bar in counted.bins
        ]
        unit = "bytes" if counted.is_size else ""
        return {
            "picture": drawing.histogram(bins, title=title, unit=unit),
            "table": drawing.histogram_table(bins, title=title, unit=unit),
        }
    bars = [drawing.NamedBar(bar.label, bar.count, href(bar.where)) for bar in counted.bins]
    return {
        "picture": drawing.bar_chart(bars, title=title),
        "table": drawing.bar_table(bars, title=title),
    }


def _read_text(counted: Histogram) -> str:
    """Return how many samples were counted, such as "500,000 samples from 20 of 4,000 shards"."""
    shards = count_text(counted.num_shards, "shard")
    part = "all samples" if counted.read_shards == counted.num_shards else f"{counted.read_shards} of {shards}"
    return part if counted.where is None else f"{part} where {counted.where}"


def _classes(split: Mapping[str, Any], text: str | None) -> dict[str, Any]:
    """Return the classes whose name contains a text, largest first, and the number of all of them."""
    # Without counts, classes are listed all the same, in the order of their labels.
    counts: Mapping[str, int | None] = split["class_counts"] or dict.fromkeys(split["classes"])
    found = [
        (name, count, f"label = {label}" if label < len(split["classes"]) else None)
        for label, (name, count) in enumerate(counts.items())
        if text is None or text.lower() in name.lower()
    ]
    found.sort(key=lambda item: -(item[1] or 0))
    return {
        "classes": found[:_MAX_CLASSES],
        "num_found": len(found),
        "num_classes": len(counts),
        "class_text": text or "",
    }


def _previous(living: list[int], version: int, name: str) -> str | None:
    """Return the version before this one that is not removed; None if there is none."""
    older = [number for number in living if number < version]
    return f"{name}@{older[-1]}" if older else None
