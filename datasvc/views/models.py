"""Model versions as HTML for a notebook, as nodes of a graph, and as a plot of a metric."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from datasvc.drawing import (
    ChartSeries,
    Markup,
    VersionNode,
    facts_table,
    folded,
    html_table,
    standalone,
    version_graph,
    version_table,
)
from datasvc.errors import ConfigError
from datasvc.ledger.masked import masks_of
from datasvc.models.registry.graph import draw_history
from datasvc.models.registry.registry import ModelVersion
from datasvc.models.versions.data_use import use_text
from datasvc.models.versions.entry_fields import tree_leaves
from datasvc.printable import count_text
from datasvc.views.view import Fact, FactPart, fact, fact_texts, references

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_GRAPH: Final = 50  # versions that a notebook shows
_MAX_VALUES: Final = 500
_MAX_COUNTS: Final = 4


def describe(version: ModelVersion) -> list[Fact]:
    """Return the facts of a version, from its entry; nothing is read."""
    entry, code, origin = version.entry, version.entry["code"] or {}, version.entry.get("origin") or {}
    bad = entry.get("num_nonfinite")
    data = dict.fromkeys(map(use_text, entry["data"]))
    return [
        fact("version", f"{version}{' (removed)' if version.removed else ''}"),
        fact("tags", ", ".join(version.tags)),
        fact("created", FactPart(entry["created"], "time")),
        fact("message", entry["message"]),
        fact("step", FactPart(entry["step"], "number"), help="optimizer steps of its weights"),
        fact("epoch", _epoch(entry), help="the newest epoch of its training data, from 0"),
        fact("run", FactPart(entry.get("run") or "not recorded: the save had no run=", "runs")),
        fact("parent", *references("models", version.parents), help="versions that it continues"),
        fact("origin", *(origin and (origin.get("version"), " of ", origin.get("repository"))), help="copied from"),
        fact("metrics", metrics_text(entry["metrics"] or {})),
        fact("code", *_code_parts(code)),
        fact("tensors", FactPart(entry["num_tensors"], "number"), ", ", FactPart(entry["bytes"], "bytes"),
             " in memory, table ", FactPart(entry["tensors"], "digest")),
        fact("stored_bytes", FactPart(entry.get("stored_bytes"), "bytes"), help="newly stored by its save"),
        fact("data", ", ".join(data) or "no consumed samples were recorded: the save had no data="),
        fact("sync", _sync_text(entry.get("execution") or {}), help="who waited for whom, if not in every step"),
        fact("tournament", _tournament_text(entry.get("tournament") or {}), help="rounds, and whose weights it has"),
        fact("modules", _counts_text(entry.get("modules")), help="the most frequent classes of modules"),
        fact("operators", _counts_text(entry.get("ops")), help="the most frequent operators of a forward pass"),
        *_masked_facts(entry),
        fact("NOT FINITE", value_text(bad or None), help="tensors with NaN or infinite elements"),
    ]  # fmt: skip


def _epoch(entry: Mapping[str, Any]) -> int | None:
    states = [use["state"] for use in entry["data"] if use.get("purpose") != "evaluation"]
    return max((state["epoch"] for state in states if isinstance(state.get("epoch"), int)), default=None)


def _sync_text(execution: Mapping[str, Any]) -> str | None:
    """Return how the ranks of a run averaged their weights; None: they combined gradients, or it is not recorded."""
    sync = execution.get("sync", "bsp")
    if sync == "bsp":
        return None
    words = {"steps of a round": "sync_steps", "outer optimizer": "outer_optimizer", "steps ahead": "staleness"}
    named = {word: execution.get(name) for word, name in words.items()}
    return f"{sync} ({', '.join(f'{name}: {value}' for name, value in named.items() if value)})"


def _counts_text(counts: Mapping[str, int] | None) -> str | None:
    """Return the largest counts with their names, and how many names there are beside; None without counts."""
    if not counts:
        return None
    ranked = sorted(counts.items(), key=lambda counted: (-counted[1], counted[0]))
    more = f", and {len(ranked) - _MAX_COUNTS} more" if len(ranked) > _MAX_COUNTS else ""
    return ", ".join(f"{count} {name}" for name, count in ranked[:_MAX_COUNTS]) + more


def _tournament_text(tournament: Mapping[str, Any]) -> str | None:
    """Return the number of rounds, and the rank whose weights the version has; None: there was no tournament."""
    rounds, winner = tournament.get("rounds"), tournament.get("winner")
    if not isinstance(rounds, list) or not (rounds or winner is not None):
        return None
    last = rounds[-1].get("round") if rounds and isinstance(rounds[-1], Mapping) else None
    count = count_text(last + 1 if isinstance(last, int) else len(rounds), "round")
    return count if winner is None else f"{count}, the weights are those of rank {winner}"


def _masked_facts(entry: Mapping[str, Any]) -> list[Fact]:
    """Return which samples and positions the training left out, from where on: forgotten, purged and skipped ones."""
    left_out, skipped = [], []
    for use in entry["data"]:
        name = f"{use['dataset']}/{use['split']}"
        try:
            masked = masks_of(use["state"])
        except ConfigError as error:
            left_out.append(str(error))
            continue
        if use.get("purpose") == "evaluation":
            continue
        if masked.samples:
            epoch, position = min(rows.since for rows in masked.samples)
            start = "the beginning" if (epoch, position) == (0, 0) else f"epoch {epoch}, position {position:,}"
            count = count_text(sum(len(rows.rows) for rows in masked.samples), "sample")
            left_out.append(f"{count} of {name}, forgotten or purged, from {start} on")
        if masked.positions:
            count = count_text(sum(stop - start for _, start, stop in masked.positions), "position")
            skipped.append(f"{count} of {name}")
    return [
        fact(
            "left out", "; ".join(left_out), help="samples that `datasvc forget`, or a purge, kept from its training"
        ),
        fact("skipped", "; ".join(skipped), help="positions that its training left out, see `--skip`"),
    ]


def _code_parts(code: Mapping[str, Any]) -> list[object]:
    if not code.get("revision"):
        return ["not in a git checkout"]
    parts: list[object] = [FactPart(code["revision"], "digest")]
    parts += [f" {word} {code[name]}" for word, name in (("on", "branch"), ("of", "remote")) if code.get(name)]
    if code.get("dirty"):
        stored = [", stored as ", FactPart(code["diff"], "digest")] if code.get("diff") else [" that were not stored"]
        parts += [", with local changes", *stored]
    return parts


def version_html(version: ModelVersion) -> Markup:
    """Return the metadata of a version as HTML."""
    folds = [
        folded(part, _tree(version.entry.get(part)), is_open=part == "metrics")
        for part in ("metrics", "config", "environment")
    ]
    return standalone(facts_table(fact_texts(describe(version))), *folds)


def versions_html(versions: Sequence[ModelVersion]) -> Markup:
    """Return versions as HTML: the graph of the newest ones and a table with their metrics."""
    if not versions:
        return standalone(html_table(["model versions"], [("none",)]))
    lines = draw_history(versions, versions[-1].name)
    nodes = version_nodes(line.version for line in lines if line.version)
    graph = version_graph(nodes, limit=_MAX_GRAPH, title="model versions")
    return standalone(graph, folded("as a table", version_table(nodes, limit=_MAX_VALUES)))


def plot_metric(versions: Iterable[ModelVersion], metric: str, *, ax: Axes | None = None) -> Axes:
    """Plot a metric over steps; see `ModelVersions.plot`."""
    from datasvc.views.plots import plot_lines

    points: dict[str, list[tuple[int, float | None]]] = {}
    known: dict[str, None] = {}
    for version in versions:
        metrics = version.entry["metrics"] or {}
        known |= dict.fromkeys(metrics)
        value = metrics.get(metric)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        points.setdefault(version.name, []).append((version.entry["step"], value if is_number else None))
    if not any(value is not None for line in points.values() for _, value in line):
        found = ", ".join(known) or "none"
        raise ConfigError(f"no version has a number as the metric {metric!r}; their metrics are: {found}")
    series = []
    for name, line in points.items():
        ordered = sorted(line, key=lambda point: point[0])
        series.append(ChartSeries(name, [step for step, _ in ordered], [value for _, value in ordered]))
    return plot_lines(series, title=f"{metric} of {', '.join(points)}", unit=metric, x_label="step", ax=ax)


def value_text(value: Any) -> str:
    """Return a JSON value as text for a table: texts without quotes, "" for None, numbers with all digits."""
    if value is None or isinstance(value, str):
        return value or ""
    # Not rounded: two values that differ must not look equal in a comparison.
    return (
        repr(value).removesuffix(".0") if isinstance(value, float) else json.dumps(value, sort_keys=True, default=str)
    )


def _tree(values: Any) -> Markup:
    rows = (
        [(name, value_text(value)) for name, value in tree_leaves(values, "")] if isinstance(values, Mapping) else []
    )
    return html_table(["name", "value"], rows, max_rows=_MAX_VALUES) if rows else Markup()


def version_nodes(versions: Iterable[ModelVersion], *, href: Callable[[str], str] | None = None) -> list[VersionNode]:
    """Return a node for each version, in their order; that of `read_history` is the one of a graph.

    Args:
        versions: the versions.
        href: returns the address of the page of a version, by its name such as "cnn@3".
    """
    return [
        VersionNode(
            str(version),
            version.parents,
            version.tags,
            _note(version.entry),
            href(str(version)) if href else None,
            version.removed,
            title=_title(version),
        )
        for version in versions
    ]


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Return metrics as one line of text."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )


def _title(version: ModelVersion) -> str:
    parents = f", from {' and '.join(version.parents)}" if version.parents else ""
    return f"{version}, created {version.entry['created']}{parents}"


def _note(entry: Mapping[str, Any]) -> str:
    parts = [
        f"step {entry['step']:,}",
        metrics_text(entry["metrics"]),
        "NOT FINITE" if entry.get("num_nonfinite") else "",
        str(entry["message"]),
    ]
    return " · ".join(part for part in parts if part)
