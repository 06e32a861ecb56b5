"""One version of a data set: its history, splits, columns, distributions, and what its ingest rejected."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasvc import drawing
from datasvc.models.search.query import find_versions
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.branches import branch_of
from datasvc.shards.query.histogram import list_columns
from datasvc.shards.query.sample_page import page_of
from datasvc.shards.query.sample_reader import SampleSummary
from datasvc.shards.versions.describe import describe_log, describe_version, read_bad_samples, shared_bytes
from datasvc.shards.views.named import read_views
from datasvc.ui.pages.histogram_charts import count_columns, draw_histogram
from datasvc.ui.pages.sample_records.certificates import certificates_panel
from datasvc.ui.web.links import dataset_link, diff_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Query, RawResponse
from datasvc.ui.web.seen_faults import Failures, collect_unreadable
from datasvc.ui.web.site import Site
from datasvc.ui.web.table_view import Column, TableView, view_table
from datasvc.views.datasets import dataset_nodes

_MAX_VERSIONS = 50  # of the graph
_MAX_COMPARED = 20  # versions whose shared bytes are shown
_MAX_COMPARED_SHARDS = 200_000  # of all of them
_MAX_HISTOGRAMS = 12
_SOME_SAMPLES = 8  # that are shown above the distributions
_MAX_BARS = 20  # of the histogram of classes; more classes have a table, too
_VERSION_COLUMNS = (
    Column("version", "version", "time"),
    Column("samples", "samples", "number"),
    Column("created", "created", "time"),
    Column("made from"),
    Column("tags"),
    Column("message", "message"),
)
_VIEW_COLUMNS = (
    Column("view", "name"),
    Column("of", "dataset"),
    Column("samples", "samples", "number"),
    Column("how it was chosen", "how"),
    Column("weights", "weights"),
    Column("created", "created", "time"),
)
_CLASS_COLUMNS = (Column("class", "name"), Column("samples", "samples", "number"))
_USUAL_SPLIT = "train"
# Models of a local repository whose entries are searched for those trained on a version; others on request.
_MAX_MODELS = 20
_MAX_MODEL_VERSIONS = 200
_MAX_TRAINED = 8  # models in the sentence


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the page of a version; `split`, `where` and `class` in the address select among its panels.

    What cannot be read, such as a corrupt shard, is a problem of the page; its other panels are shown.
    """
    repository = site.repo.repository
    resolved, state = repository.resolve_with_state("datasets", parts["ref"], removed=True)
    name, ref = resolved.name, str(resolved)
    facts = describe_version(repository, ref)
    is_removed = bool(facts.get("removed"))
    log_panel, log = _read_log(site, name, _MAX_VERSIONS if query.text("all") is None else None)
    panels = {
        "version": Panel(facts, site.command("show", ref, "--json"), site.python("datasets.describe", ref)),
        "versions": log_panel,
    }
    failures = Failures(site.faults, dataset_link(ref))
    with failures.noted():
        panels |= _compare_bytes(site, name, log)
    view: dict[str, Any] = {"split": None}
    if not is_removed:
        with failures.noted():
            shown, view = _show_split(site, ref, facts, query, failures)
            panels |= shown
        panels["quarantine"] = Panel(
            [], site.command("show", ref, "--bad", "--json"), site.python("datasets.bad_samples", ref)
        )
        with failures.noted():
            panels["quarantine"] = replace(panels["quarantine"], values=read_bad_samples(repository, ref))
    for panel, read in (("views", _views_panel), ("certificates", certificates_panel)):
        with failures.noted():
            if (found := read(site, name)).values:
                panels[panel] = found
    trained = _trained(site, ref, query, failures)
    previous = _previous(facts, log, state.living, resolved)
    return Page(
        template="dataset.html",
        title=ref,
        section="datasets",
        crumbs=(Crumb("Data sets", "/datasets"), Crumb(ref, dataset_link(ref))),
        panels=panels,
        problems=tuple(failures.problems()),
        view={
            "site": site,
            "ref": ref,
            "name": name,
            "branch": branch_of(facts),
            **_draw_log(site, name, ref, log, query, num_versions=len(state.versions)),
            "previous": previous,
            "trained": trained,
            "change": None if is_removed else _change(log, resolved.version, previous),
            "removed": is_removed,
            "num_purged": 0 if is_removed else sum(each.get("purged", 0) for each in facts["splits"].values()),
            "view_rows": _view_views(panels["views"].values, query, dataset_link(ref)) if "views" in panels else None,
            "max_trained": _MAX_TRAINED,
            "diff_link": diff_link,
            **view,
        },
    )


def _read_log(site: Site, name: str, last: int | None) -> tuple[Panel, list[dict[str, Any]]]:
    """Return the panel of the newest versions, and those of them that can be read, oldest first."""
    with collect_unreadable() as unreadable:
        log = describe_log(site.repo.repository, name, last=last)
    options = {"--last": None if last is None else str(last)}
    command = site.command("log", name, "--json", options=options)
    return Panel([*log, *unreadable.facts()], command, site.python("datasets.log", name, last=last)), log


def _draw_log(
    site: Site, name: str, ref: str, log: Sequence[Mapping[str, Any]], query: Query, *, num_versions: int
) -> dict[str, Any]:
    """Return the graph of the newest versions, or with `all` in the address of all, and the same as a table."""
    last = _MAX_VERSIONS if query.text("all") is None else None
    nodes = dataset_nodes(site.repo.repository, name, last=last, href=dataset_link)
    more = dataset_link(ref, all=1) if last is not None and num_versions > len(nodes) else None
    entries = {f"{name}@{entry['version']}": entry for entry in log}
    rows = [
        {
            "node": node,
            "version": number,
            "samples": sum(split["samples"] for split in entries[node.name]["splits"].values()),
            "created": entries[node.name].get("created"),
            "message": entries[node.name].get("message") or "",
        }
        for node in nodes
        if node.name in entries and (number := int(node.name.rpartition("@")[2]))
    ]
    table = view_table(rows, _VERSION_COLUMNS, query, path=dataset_link(ref), prefix="versions_")
    return {
        "graph": drawing.version_graph(nodes, title=f"versions of {name}", more_href=more, limit=max(len(nodes), 1)),
        "version_rows": table,
        "is_sorted": query.text("versions_sort") is not None,
        "all_link": more,
        "num_versions": num_versions,
    }


def _trained(site: Site, ref: str, query: Query, failures: Failures) -> dict[str, Any]:
    """Return the model versions that were trained on a version, or None until they are asked for, and the link."""
    repository = site.repo.repository
    condition = f"'{ref}' in data"
    refs = None
    with failures.noted():
        if query.text("models") is not None or _are_few_models(repository):
            refs = [str(version) for version in find_versions(repository, condition)]
    command = site.command("models", "find", condition, "--json")
    models: dict[str, list[str]] = {}
    for version in refs or ():
        models.setdefault(version.rpartition("@")[0], []).append(version)
    return {"refs": refs, "models": models, "command": command, "link": dataset_link(ref, models=1)}


def _are_few_models(repository: Repository) -> bool:
    """Return whether all model versions of a repository are read at once."""
    if not repository.storage.is_local:
        return False
    names = repository.names("models")
    if len(names) > _MAX_MODELS:
        return False
    return sum(len(repository.state("models", name).versions) for name in names) <= _MAX_MODEL_VERSIONS


def _change(log: Sequence[Mapping[str, Any]], version: int, previous: str | None) -> str | None:
    """Return how many samples a version has more or fewer than the one before it, in words; None if not known."""
    counts = {
        f"{entry['version']}": sum(split["samples"] for split in entry["splits"].values())
        for entry in log
        if not entry.get("removed")
    }
    before, now = counts.get((previous or "").rpartition("@")[2]), counts.get(str(version))
    if before is None or now is None:
        return None
    if before == now:
        return f"as many as {previous}"
    return f"{abs(now - before):,} {'more' if now > before else 'fewer'} than {previous}"


def _views_panel(site: Site, name: str) -> Panel:
    """Return the named views of a data set, by name."""
    views = {each: found.to_json() for each, found in read_views(site.repo.repository, name).items()}
    return Panel(views, site.command("view", name, "--json"), site.python("datasets.views", name))


def _view_views(views: Mapping[str, Mapping[str, Any]], query: Query, path: str) -> TableView:
    """Return the table of the named views of a data set."""
    rows = [
        {
            **view,
            "how": "; ".join(view["steps"]),
            "ref": f"{view['dataset']}[{view['table']}]",
            "weights": "yes" if view["weights"] else "no",
        }
        for view in views.values()
    ]
    return view_table(rows, _VIEW_COLUMNS, query, path=path, prefix="views_")


def _compare_bytes(site: Site, name: str, log: Sequence[Mapping[str, Any]]) -> dict[str, Panel]:
    """Return the panel of the bytes that the newest versions share; none of one version, or of too large tables."""
    num_shards = list(
        itertools.accumulate(
            sum(split["shards"] for split in entry["splits"].values()) for entry in reversed(log[-_MAX_COMPARED:])
        )
    )
    last = bisect.bisect_right(num_shards, _MAX_COMPARED_SHARDS)
    if last < 2:
        return {}
    with collect_unreadable() as unreadable:
        compared = shared_bytes(site.repo.repository, name, last=last)
    return {
        "bytes": Panel(
            [*(each.to_json() for each in compared), *unreadable.facts()],
            site.command("log", name, "--bytes", "--json", options={"--last": str(last)}),
            site.python("datasets.shared_bytes", name, last=last),
        )
    }


def _show_split(
    site: Site, ref: str, facts: Mapping[str, Any], query: Query, failures: Failures
) -> tuple[dict[str, Panel], dict[str, Any]]:
    """Return the panels of the histograms of the chosen split, and what the template needs of them.

    Histograms that cannot be made, for a mistyped condition or a corrupt shard, are left out and added to `failures`.
    """
    dataset = site.splits.version(site.repo.repository, ref)
    names = list(dataset)
    split = query.choice("split", (*(name for name in names if name == _USUAL_SPLIT), *names)) if names else None
    if split is None:
        return {}, {"split": None}
    where = query.text("where")
    columns = list_columns(dataset[split])[:_MAX_HISTOGRAMS]

    samples, some = site.splits.samples(dataset, split), list[SampleSummary]()
    if samples.image_columns:
        with failures.noted():
            some.extend(page_of(samples, where=where, count=_SOME_SAMPLES).samples)
    panels, charts = {}, []
    for column, counted in count_columns(site, dataset, split, columns, where, failures).items():
        name = f"histogram {column}"
        options = {"--split": split, "--where": where}
        panels[name] = Panel(
            counted.to_json(),
            site.command("histogram", "--json", options=options, last=[ref, column]),
            site.python("datasets.histogram", ref, column, split=split, where=where),
        )
        heading = f"{column}, bytes" if counted.is_size else column
        charts.append({"name": name, "column": heading, "counted": counted, **draw_histogram(counted, ref, split)})
    return panels, {
        "split": split,
        "splits": names,
        "where": where or "",
        "charts": charts,
        "some": some,
        "image_columns": samples.image_columns,
        **_classes(facts["splits"][split], query, dataset_link(ref)),
    }


def _classes(split: Mapping[str, Any], query: Query, path: str) -> dict[str, Any]:
    """Return the table of the classes whose name contains a text, and the number of all of them.

    The histogram of the label shows few classes; there is no table of them unless one is asked for.
    """
    # Without counts, classes are listed all the same, in the order of their labels.
    counts: Mapping[str, int | None] = split["class_counts"] or dict.fromkeys(split["classes"])
    text = query.text("class")
    found: list[dict[str, Any]] = [
        {"name": name, "samples": count, "where": f"label = {label}" if label < len(split["classes"]) else None}
        for label, (name, count) in enumerate(counts.items())
        if text is None or text.lower() in name.lower()
    ]
    found.sort(key=lambda row: -(row["samples"] or 0))
    is_table = len(counts) > _MAX_BARS or text is not None or query.text("classes_sort") is not None
    return {
        "classes": view_table(found, _CLASS_COLUMNS, query, path=path, prefix="classes_") if is_table else None,
        "num_found": len(found),
        "num_classes": len(counts),
        "class_text": text or "",
    }


def _previous(
    facts: Mapping[str, Any], log: Sequence[Mapping[str, Any]], living: list[int], version: Resolved
) -> str | None:
    """Return the version that this one continues, or the one before it on its line; None if there is none."""
    parent = str(facts.get("parent"))
    if parent in {f"{version.name}@{number}" for number in living}:
        return parent
    # `log` has the newest versions; an older one has none that is not in it, unless there are no branches.
    lines = {entry["version"]: entry.get("branch") for entry in log}
    older = [
        number for number in living if number < version.version and lines.get(number) == lines.get(version.version)
    ]
    return f"{version.name}@{older[-1]}" if older else None
