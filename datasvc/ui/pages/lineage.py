"""Lineage: from a model version to runs, data, shards and sources; from a sample to the versions that consumed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from datasvc.drawing import FlowEdge, FlowNode, Markup, flow_graph, flow_table
from datasvc.errors import NotFoundError
from datasvc.models.provenance.find_consumers import find_consumers
from datasvc.models.provenance.lineage import Lineage, read_lineage
from datasvc.models.provenance.sample_uses import ConsumerReport
from datasvc.ui.web.links import dataset_link, lineage_link, model_link, run_ref_link, samples_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Query, RawResponse
from datasvc.ui.web.site import Site
from datasvc.views.provenance import collapsed_flow, tournament_flow

_MAX_ROWS = 1000
_NARROW_NODES = 2  # side by side in a window of 400 pixels


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the lineage of a model version; with `key`, of a sample of a data set."""
    ref, key = parts["ref"], query.text("key")
    if key is not None:
        return _sample_page(site, ref, key, query.text("model"))
    try:
        version = site.repo.models.resolve(ref, removed=True)
    except NotFoundError:
        # A data set has no lineage before a sample is named.
        site.repo.datasets.resolve(ref, removed=True)
        return _sample_page(site, ref, None, None)
    return _version_page(site, str(version))


def _version_page(site: Site, version: str) -> Page:
    lineage = read_lineage(site.repo.repository, version)
    nodes, edges = _draw(site, lineage)
    sources = {
        str(data.source.get("url"))
        for data in lineage.datasets.values()
        if data.source.get("url") and data.source.get("kind") != "version"
    }
    return Page(
        template="lineage.html",
        title=f"Lineage of {version}",
        section="models",
        crumbs=(
            Crumb("Models", "/models"),
            Crumb(version, model_link(version)),
            Crumb(f"lineage of {version}", lineage_link(version)),
        ),
        panels={
            "lineage": Panel(
                lineage.to_dict(),
                site.command("models", "lineage", version, "--json"),
                site.python("models.lineage", version),
            )
        },
        view={
            "version": version,
            "lineage": lineage,
            "num_shards": sum(map(len, lineage.shards.values())),
            "num_sources": len(sources),
            "gaps": [*lineage.gaps, *(f"{m.name}: {gap}" for m in lineage.models.values() for gap in m.gaps)],
            **_draw_graphs(nodes, edges, f"lineage of {version}"),
            "table": flow_table(nodes, edges, max_rows=_MAX_ROWS),
            "max_rows": _MAX_ROWS,
            "tournament": _draw_tournament(site, version),
        },
    )


def _draw_tournament(site: Site, version: str) -> Markup | None:
    """Return the rounds of the tournament of a version; None if there was none, or it cannot be drawn."""
    entry = site.repo.repository.entry(site.repo.models.resolve(version, removed=True))
    tournament = entry.content.get("tournament")
    if not tournament:
        return None
    try:
        nodes, edges = tournament_flow(tournament)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # an entry of an unknown writer
        return None
    return flow_graph(nodes, edges, title=f"tournament of {version}") if nodes else None


def _draw_graphs(nodes: Sequence[FlowNode], edges: Sequence[FlowEdge], title: str) -> dict[str, Markup]:
    """Return the graph from left to right, and for narrow windows one from top to bottom with fewer nodes."""
    return {
        "graph": flow_graph(nodes, edges, title=title),
        "narrow_graph": flow_graph(nodes, edges, title=title, is_vertical=True, max_per_column=_NARROW_NODES),
    }


def _draw(site: Site, lineage: Lineage) -> tuple[list[FlowNode], list[FlowEdge]]:
    """Return the graph of a lineage: a chain of versions is one node, and removed versions are marked."""
    links: dict[str, Callable[[str], str | None]] = {
        "models": model_link,
        "datasets": dataset_link,
        "runs": run_ref_link,
    }
    nodes, edges = collapsed_flow(lineage, href=lambda kind, name: links[kind](name))
    removed = _removed(site, lineage)
    # A chain has the name of its newest version, but is not removed with it.
    is_one = {node.name: node.name.endswith(f":{node.label}") for node in nodes}
    return [replace(node, is_removed=is_one[node.name] and node.name in removed) for node in nodes], edges


def _removed(site: Site, lineage: Lineage) -> set[str]:
    """Return the removed versions of a lineage, as named in its graph."""
    repository = site.repo.repository
    models = {name.partition("@")[0] for name in lineage.models}
    datasets = {name.partition("@")[0] for name in lineage.datasets}
    return {f"models:{name}@{number}" for name in models for number in repository.state("models", name).removed} | {
        f"datasets:{name}@{number}" for name in datasets for number in repository.state("datasets", name).removed
    }


def _sample_page(site: Site, ref: str, key: str | None, model: str | None) -> Page:
    dataset = ref.partition("@")[0]
    panels, view = {}, {}
    if key is not None:
        # In all versions of the data set: a model may have read the sample in an earlier one.
        refs = (model,) if model else ()
        report = find_consumers(site.repo.repository, refs, keys=[key], data=dataset)
        options = {"--sample": key, "--data": dataset}
        panels["consumers"] = Panel(
            report.to_json(),
            site.command("models", "trained-on", *refs, "--json", options=options),
            site.python("models.trained_on", list(refs), keys=[key], data=dataset),
        )
        nodes, edges = _draw_sample(report)
        uses = report.uses(0)
        view = {
            "uses": uses[:_MAX_ROWS],
            "num_uses": len(uses),
            "with_it": report.versions_with(0),
            "num_versions": len(report.versions),
            "is_missing": bool(len(report.missing)),
            "gaps": [f"{name}: {gap}" for name, gaps in report.gaps.items() for gap in gaps],
            **(_draw_graphs(nodes, edges, f"versions that consumed {key}") if uses else {"graph": None}),
            "max_rows": _MAX_ROWS,
        }
    return Page(
        template="sample_lineage.html",
        title=f"Lineage of {key or dataset}",
        section="datasets",
        crumbs=(
            Crumb("Data sets", "/datasets"),
            Crumb(ref, dataset_link(ref)),
            Crumb(f"lineage of {key}" if key else "lineage of a sample", lineage_link(ref, key)),
        ),
        panels=panels,
        view={"ref": ref, "dataset": dataset, "key": key, "model": model, **view},
    )


def _draw_sample(report: ConsumerReport) -> tuple[list[FlowNode], list[FlowEdge]]:
    """Return the way of one sample to the versions whose own training consumed it."""
    key = report.keys[0]
    sample = f"sample:{key}"
    nodes = {sample: FlowNode(sample, key, 0, "sample")}
    edges: dict[tuple[str, str], list[str]] = {}
    for use in report.uses(0):
        data, version = f"data:{use.data}", f"model:{use.version}"
        ref, _, split = use.data.rpartition("/")
        nodes.setdefault(data, FlowNode(data, use.data, 1, "data version", samples_link(ref, split, key=key)))
        is_here = use.version in report.seen
        nodes.setdefault(
            version, FlowNode(version, use.version, 2, "model", model_link(use.version) if is_here else None)
        )
        edges.setdefault((sample, data), [])
        edges.setdefault((data, version), []).append(f"epoch {use.epoch}, position {use.position:,}")
    return list(nodes.values()), [FlowEdge(*ends, _joined(labels)) for ends, labels in edges.items()]


def _joined(labels: Sequence[str], most: int = 5) -> str:
    more = [f"and {len(labels) - most} more"] if len(labels) > most else []
    return "; ".join([*labels[:most], *more])
