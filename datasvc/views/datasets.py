"""Data sets: versions, splits, samples and logs as HTML for a notebook, and versions as nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from datasvc.drawing import (
    Markup,
    NamedBar,
    TableColumn,
    VersionNode,
    bar_chart,
    bar_table,
    facts_table,
    figure,
    folded,
    html_table,
    markup,
    standalone,
    version_graph,
    version_table,
)
from datasvc.errors import BadSampleError
from datasvc.repository import Entry, Repository
from datasvc.repository.logs.branches import branch_of
from datasvc.shards.format.schema import KEY, LABEL, is_blob
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.lines.dataset_log import DatasetLog, change_of, entry_parents
from datasvc.shards.versions.dataset import DatasetVersion, Split, readable_versions
from datasvc.shards.versions.describe import count_classes
from datasvc.shards.versions.samples import Sample
from datasvc.sizes import format_size

_MAX_GRAPH: Final = 50  # versions that a notebook shows
_MAX_SAMPLES: Final = 12  # of a split
_MAX_ROWS: Final = 500
_MAX_TEXT: Final = 100  # characters of a value in a table of samples
_MAX_VALUE: Final = 300  # characters of a value of one sample
_SIDE: Final = 192  # of the picture of one sample, in pixels
_GRID_SIDE: Final = 96


def dataset_nodes(
    repository: Repository, name: str, *, last: int | None = None, href: Callable[[str], str] | None = None
) -> list[VersionNode]:
    """Return a node for each of the `last` newest versions of a data set (None: all), newest first.

    Args:
        repository: repository of the data set.
        name: name of the data set, or NAME@BRANCH for the versions of a branch and their ancestors.
        last: number of versions.
        href: returns the address of the page of a version, by its name such as "pets@3".

    Raises:
        The errors of `readable_versions`.
    """
    entries = readable_versions(repository, name, last=last)
    state = repository.state("datasets", entries.name)
    return entry_nodes(
        entries.name, reversed(entries), tags=state.tags, branches=state.branches, removed=state.removed, href=href
    )


def entry_nodes(
    name: str,
    entries: Iterable[Entry],
    *,
    tags: Mapping[str, int] | None = None,
    branches: Mapping[str, int] | None = None,
    removed: Collection[int] = (),
    href: Callable[[str], str] | None = None,
) -> list[VersionNode]:
    """Return a node for each entry, in their order.

    Args:
        name: name of the data set.
        entries: entries with valid splits.
        tags: version of each tag.
        branches: head of each branch.
        removed: numbers of the removed versions.
        href: returns the address of the page of a version, by its name such as "pets@3".
    """
    return [
        VersionNode(
            f"{name}@{entry.number}",
            entry_parents(entry.content),
            tuple(tag for tag, number in (tags or {}).items() if number == entry.number),
            _note(entry.content),
            href(f"{name}@{entry.number}") if href else None,
            entry.number in removed,
            title=_title(name, entry),
            branches=tuple(branch for branch, number in (branches or {}).items() if number == entry.number),
        )
        for entry in entries
    ]


def _title(name: str, entry: Entry) -> str:
    branch = branch_of(entry.content)
    on_branch = "" if branch is None else f" on branch {branch}"
    parents = entry_parents(entry.content)
    origin = f", from {' and '.join(parents)}" if parents else ""
    return f"{name}@{entry.number}{on_branch}, created {entry.content.get('created', 'at an unknown time')}{origin}"


def _note(content: Mapping[str, Any]) -> str:
    num_samples = sum(split["samples"] for split in content["splits"].values())
    parts = [f"{num_samples:,} samples", change_of(content), str(content.get("message") or "")]
    return " · ".join(part for part in parts if part)


def version_html(dataset: DatasetVersion) -> Markup:
    """Return the metadata of a version and the sizes of its splits, from its entry; nothing is read."""
    content = dataset.entry.content
    source, parents = content.get("source"), entry_parents(content)
    facts = {
        "data set version": str(dataset.resolved),
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


def split_html(split: Split) -> Markup:
    """Return the size, columns, class counts and some samples of a split."""
    table = split.table
    # A shard of a remote repository is read completely: too slow for a value that is only shown.
    samples = split[:_MAX_SAMPLES] if split.repository.storage.is_local else []
    class_counts = count_classes(table.label_counts, table.classes)
    facts: dict[str, str | float | None] = {
        "split": f"{split.dataset}/{split.name}",
        "samples": table.num_samples,
        "shards": table.num_shards,
        "size": format_size(table.size_bytes),
        "classes": f"{len(table.classes):,}" if table.classes else None,
    }
    columns = html_table(["column", "type"], [(field.name, str(field.type)) for field in table.sample_schema])
    return standalone(
        facts_table(facts), _class_counts(class_counts), _first_samples(table, samples), folded("columns", columns)
    )


def log_html(log: DatasetLog) -> Markup:
    """Return the graph of the versions of a data set, with the tags and removals of its repository, and a table."""
    state = None if log.repository is None else log.repository.state("datasets", log.name)
    tags, branches, removed = (state.tags, state.branches, state.removed) if state else ({}, {}, ())
    nodes = entry_nodes(log.name, reversed(log), tags=tags, branches=branches, removed=removed)
    graph = version_graph(nodes, limit=_MAX_GRAPH, title=f"versions of {log.name}")
    return standalone(graph, folded("as a table", version_table(nodes, limit=_MAX_ROWS)))


def _class_counts(counts: Mapping[str, int]) -> Markup:
    bars = [NamedBar(name, count) for name, count in counts.items()]
    if not bars:
        return Markup()
    numbers = bar_table(bars, title="classes", name="class", max_rows=_MAX_ROWS)
    return markup([bar_chart(bars, title="classes", max_bars=10), folded("all classes", numbers)])


def _first_samples(table: ShardTable, samples: Sequence[Sample]) -> Markup:
    if any(sample.images for sample in samples):
        return _sample_grid(samples)
    columns = [field.name for field in table.sample_schema if not is_blob(field.type)]
    rows = [[_shown(sample.get(column)) for column in columns] for sample in samples]
    return html_table(columns, rows) if rows else Markup()


def _shown(value: Any) -> str | float | None:
    if value is None or isinstance(value, (int, float)):
        return value
    text = str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def sample_html(sample: Sample) -> Markup:
    """Return the pictures and the values of a sample."""
    pictures = [
        _picture(sample, column, _SIDE, [column]) for column in sample.images if sample.get(column) is not None
    ]
    facts = {str(name): _value_text(value) for name, value in sample.items() if name not in sample.images}
    if sample.class_name not in {None, str(sample.get(LABEL))}:
        facts[LABEL] = f"{sample.get(LABEL)} ({sample.class_name})"
    return standalone(markup(pictures), facts_table(facts))


def _sample_grid(samples: Iterable[Sample]) -> Markup:
    """Return the first picture of each sample, with class name and key below."""
    return markup(
        _picture(sample, sample.images[0], _GRID_SIDE, [sample.class_name or "", str(sample.get(KEY, ""))])
        for sample in samples
        if sample.images
    )


def _picture(sample: Sample, column: str, side: int, captions: Sequence[str]) -> Markup:
    # Pillow is imported for pictures only: `datasvc show` reads no sample.
    from datasvc.shards.images.thumbnail import png_thumbnail

    title = f"{column} of {sample.get(KEY, 'a sample')}"
    try:
        return figure(png_thumbnail(bytes(sample[column]), side), captions, title=title)
    except (BadSampleError, TypeError, ValueError) as error:
        return figure(None, [*captions, f"does not decode: {error}"], title=title, is_problem=True)


def _value_text(value: Any) -> str:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return format_size(len(value))
    text = str(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}…"
