"""Versions, splits and logs of data sets as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from datasvc.drawing import (
    Markup,
    NamedBar,
    TableColumn,
    bar_chart,
    bar_table,
    facts_table,
    folded,
    html_table,
    markup,
    standalone,
    version_graph,
    version_table,
)
from datasvc.repository import Entry
from datasvc.repository.logs.lines import branch_of
from datasvc.repository.resolved import NameState
from datasvc.shards.format.schema import is_blob
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.notebook.sample import Sample, sample_grid
from datasvc.shards.notebook.version_nodes import change_of, entry_nodes, entry_parents
from datasvc.sizes import format_size

_MAX_GRAPH: Final = 50  # versions that a notebook shows
_MAX_ROWS: Final = 500
_MAX_TEXT: Final = 100  # characters of a value


def version_html(version: str, content: Mapping[str, Any]) -> Markup:
    """Return the metadata of a version and the sizes of its splits, from its entry; nothing is read."""
    source, parents = content.get("source"), entry_parents(content)
    facts = {
        "data set version": version,
        "created": str(content.get("created") or "unknown"),
        "message": str(content.get("message") or "") or None,
        "made by": change_of(content),
        "branch": branch_of(content),
        "from": ", ".join(parents) or (str(source.get("url") or "") if isinstance(source, Mapping) else None),
    }
    rows = [
        (name, split["samples"], split["bytes"], split["shards"]) for name, split in sorted(content["splits"].items())
    ]
    return standalone(
        facts_table(facts), html_table(["split", "samples", TableColumn("bytes", "bytes"), "shards"], rows)
    )


def split_html(name: str, table: ShardTable, samples: Sequence[Sample], class_counts: Mapping[str, int]) -> Markup:
    """Return the size, columns, class counts and some samples of a split."""
    facts: dict[str, str | float | None] = {
        "split": name,
        "samples": table.num_samples,
        "shards": table.num_shards,
        "size": format_size(table.size_bytes),
        "classes": f"{len(table.classes):,}" if table.classes else None,
    }
    columns = html_table(["column", "type"], [(field.name, str(field.type)) for field in table.sample_schema])
    return standalone(
        facts_table(facts), _class_counts(class_counts), _first_samples(table, samples), folded("columns", columns)
    )


def log_html(name: str, entries: Sequence[Entry], state: NameState | None) -> Markup:
    """Return the graph of the versions of a data set, with tags and removals if `state` has them, and a table."""
    tags, branches, removed = (state.tags, state.branches, state.removed) if state else ({}, {}, ())
    nodes = entry_nodes(name, reversed(entries), tags=tags, branches=branches, removed=removed)
    graph = version_graph(nodes, limit=_MAX_GRAPH, title=f"versions of {name}")
    return standalone(graph, folded("as a table", version_table(nodes, limit=_MAX_ROWS)))


def _class_counts(counts: Mapping[str, int]) -> Markup:
    bars = [NamedBar(name, count) for name, count in counts.items()]
    if not bars:
        return Markup()
    numbers = bar_table(bars, title="classes", name="class", max_rows=_MAX_ROWS)
    return markup([bar_chart(bars, title="classes", max_bars=10), folded("all classes", numbers)])


def _first_samples(table: ShardTable, samples: Sequence[Sample]) -> Markup:
    if any(sample.images for sample in samples):
        return sample_grid(samples)
    columns = [field.name for field in table.sample_schema if not is_blob(field.type)]
    rows = [[_shown(sample.get(column)) for column in columns] for sample in samples]
    return html_table(columns, rows) if rows else Markup()


def _shown(value: Any) -> str | float | None:
    if value is None or isinstance(value, (int, float)):
        return value
    text = str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
