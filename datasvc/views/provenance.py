"""The lineage of a version as a graph, from sources to runs and models, and the uses of samples, for a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from datasvc.drawing import (
    FlowEdge,
    FlowNode,
    Markup,
    facts_table,
    flow_graph,
    flow_table,
    folded,
    html_table,
    standalone,
)
from datasvc.models.provenance.evaluated import EvaluationOverlap, TrainedSample
from datasvc.models.provenance.lineage import DataOrigin, Lineage, ModelOrigin, collapse_chains
from datasvc.models.provenance.sample_uses import ConsumerReport
from datasvc.printable import count_text

_SOURCE, _SHARDS, _DATA, _RUN, _MODEL = range(5)  # lowest layers
_MAX_ROWS: Final = 100
_MAX_ROUNDS: Final = 5  # of a tournament
_MAX_DIGITS: Final = 12  # of a digest, as shown


def lineage_flow(
    lineage: Lineage, *, href: Callable[[str, str], str | None] | None = None
) -> tuple[list[FlowNode], list[FlowEdge]]:
    """Return the nodes and edges of a lineage, the version itself first among the models.

    The shards of a split are one node: a split may have thousands. A version that is not in the repository is a node,
    too.

    Args:
        lineage: the lineage.
        href: returns the address of a page by its kind and name: of a version of "datasets" or "models", or of a run,
            "runs".
    """
    graph = _LineageGraph(href or (lambda _kind, _name: None))
    for data in lineage.datasets.values():
        graph.add_data(data, lineage)
    for model in lineage.models.values():
        graph.add_model(model)
    return list(graph.nodes.values()), list(graph.edges.values())


def collapsed_flow(
    lineage: Lineage, *, href: Callable[[str, str], str | None] | None = None
) -> tuple[list[FlowNode], list[FlowEdge]]:
    """Return `lineage_flow` with one node for each chain of versions, see `collapse_chains`."""
    short, chains = collapse_chains(lineage)
    nodes, edges = lineage_flow(short, href=href)
    names = {f"models:{newest}": chain for newest, chain in chains.items() if len(chain) > 1}
    return [_chain_node(node, names[node.name]) if node.name in names else node for node in nodes], edges


def _chain_node(node: FlowNode, chain: Sequence[str]) -> FlowNode:
    title = f"{chain[0]} to {chain[-1]}"
    label = f"{chain[-1]} to @{chain[0].rpartition('@')[2]}"  # versions of one name
    return replace(node, label=label, note=count_text(len(chain), "version"), title=title)


class _LineageGraph:
    """Nodes by name and edges by their ends."""

    def __init__(self, href: Callable[[str, str], str | None]) -> None:
        self._href = href
        self.nodes: dict[str, FlowNode] = {}
        self.edges: dict[tuple[str, str], FlowEdge] = {}

    def add_data(self, data: DataOrigin, lineage: Lineage) -> None:
        name = self._version("datasets", data.name)
        # The source of a derived version is its parent, which has an edge of its own.
        is_source = data.source.get("kind") != "version" and (data.source.get("url") or data.source.get("kind"))
        if is_source:
            kind, url = str(data.source.get("kind", "source")), str(data.source.get("url") or "")
            self._node(f"source:{kind}:{url}", url or kind, _SOURCE, "source", note=kind)
            self._edge(f"source:{kind}:{url}", name, str(data.change.get("kind", "ingest")))
        for split, facts in data.splits.items():
            table = facts.get("table")
            if table in lineage.shards:
                label = f"{count_text(len(lineage.shards[table]), 'shard')} of {split}"
                self._node(f"shards:{table}", label, _SHARDS, "shards", note=f"table {str(table)[:_MAX_DIGITS]}")
                self._edge(f"shards:{table}", name, f"shards of {split}")
        for parent in data.parents:
            self._edge(self._version("datasets", parent), name, str(data.change.get("kind", "")))

    def add_model(self, model: ModelOrigin) -> None:
        name = self._version("models", model.name)
        reader = name
        if model.run:
            # The data lead to the run that read them, and from there to its versions.
            reader = f"run:{model.run}"
            self._node(reader, model.run, _RUN, "run", self._href("runs", model.run))
            self._edge(reader, name, "saved")
        for parent in model.parents:
            self._edge(self._version("models", parent), name, "continued")
        for segment in model.consumed:
            version, _, split = str(segment["data"]).rpartition("/")
            (first, start), (last, stop) = segment["start"], segment["stop"]
            label = f"{split}: from epoch {first}, position {start:,}, to epoch {last}, position {stop:,}"
            self._edge(self._version("datasets", version), reader, label)
        for evaluated in model.evaluated:
            self._edge(self._version("datasets", evaluated.rpartition("/")[0]), name, "evaluated on it")

    def _version(self, kind: str, name: str) -> str:
        column, label = (_MODEL, "model") if kind == "models" else (_DATA, "data version")
        key = f"{kind}:{name}"
        self._node(key, name, column, label, self._href(kind, name))
        return key

    def _node(self, key: str, label: str, column: int, kind: str, href: str | None = None, *, note: str = "") -> None:
        self.nodes.setdefault(key, FlowNode(key, label, column, kind, href, note=note))

    def _edge(self, source: str, target: str, label: str) -> None:
        known = self.edges.get((source, target))
        text = label if known is None or label in known.label else f"{known.label}; {label}"
        self.edges[source, target] = FlowEdge(source, target, text)


def tournament_flow(tournament: Mapping[str, Any]) -> tuple[list[FlowNode], list[FlowEdge]]:
    """Return the last rounds of a tournament as a graph: a layer per round, and at its end the last comparison.

    A node is a rank before a round, with its loss; an edge leads to each rank that has its weights afterwards.

    Args:
        tournament: field `tournament` of an entry.

    Raises:
        AttributeError, IndexError, KeyError, TypeError, ValueError: an entry of an unknown writer has another form.
    """
    rounds = list(tournament["rounds"])[-_MAX_ROUNDS:]
    nodes, edges = [], []
    for column, played in enumerate([*rounds, tournament]):
        step = f", step {played['step']:,}" if "step" in played else ""
        for rank, loss in enumerate(played.get("losses", ())):
            text = "not finite" if loss is None else f"loss {loss:.4g}"
            is_best = played is tournament and rank == tournament["winner"]
            nodes.append(
                FlowNode(
                    f"{column}:{rank}", f"rank {rank}", column, "model" if is_best else "run",
                    note=f"{text}{step}{', the model' if is_best else ''}",
                )
            )  # fmt: skip
            has_lost = {loser: winner for winner, loser in played.get("pairs", ())}
            if played is not tournament:
                source = has_lost.get(rank, rank)
                how = f"takes over rank {source}" if rank in has_lost else "keeps its weights"
                edges.append(FlowEdge(f"{column}:{source}", f"{column + 1}:{rank}", how))
    return nodes, edges


def lineage_html(lineage: Lineage) -> Markup:
    """Return a lineage as HTML for a notebook: the graph, the same as a table, and what is not known."""
    nodes, edges = collapsed_flow(lineage)
    gaps = html_table(["not known"], [(gap,) for gap in lineage.gaps]) if lineage.gaps else Markup()
    title = f"lineage of {lineage.version}"
    table = folded("as a table", flow_table(nodes, edges, caption=title))
    return standalone(flow_graph(nodes, edges, title=title), gaps, table)


def uses_html(report: ConsumerReport) -> Markup:
    """Return the versions with the numbers of samples that they consumed, the first uses, and what is not known."""
    facts = {"samples": f"{len(report.keys):,}", "in no data that was read": f"{len(report.missing):,}"}
    versions = html_table(
        ["version", "samples", "of its own training", "complete"],
        [(version.name, version.num_samples, version.num_own, version.is_complete) for version in report.versions],
        max_rows=_MAX_ROWS,
    )
    uses = [
        (use.key, use.data, use.version, str(use.epoch), use.position, use.step, use.is_certain)
        for use in islice(report.all_uses(), _MAX_ROWS)
    ]
    columns = ["key", "data", "version", "epoch", "position", "step", "certain"]
    gaps = [(name, gap) for name, found in report.gaps.items() for gap in found]
    return standalone(
        facts_table(facts),
        versions,
        folded(f"the first {len(uses)} uses", html_table(columns, uses) if uses else Markup()),
        folded(
            "not known", html_table(["version", "gap"], gaps, max_rows=_MAX_ROWS) if gaps else Markup(), is_open=True
        ),
    )


def evaluated_html(overlap: EvaluationOverlap) -> Markup:
    """Return how many evaluation samples a version was trained on, and the first of them."""
    facts = {"version": overlap.version} | {
        f"samples of {name}": f"{num_samples:,}" for name, num_samples in overlap.evaluated.items()
    }
    facts["in the training data"] = f"{len(overlap.samples):,}"
    if overlap.num_unchecked:
        facts["not compared, without a sample index"] = f"{overlap.num_unchecked:,}"
    return standalone(
        facts_table(facts),
        html_table(list(TrainedSample._fields), overlap.samples, max_rows=_MAX_ROWS) if overlap.samples else Markup(),
        folded("not known", html_table(["gap"], [(gap,) for gap in overlap.gaps]), is_open=True)
        if overlap.gaps
        else Markup(),
    )
