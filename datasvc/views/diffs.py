"""Differences of two data-set versions, and of two or more model versions, as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from datasvc.drawing import Markup, NamedBar, bar_chart, facts_table, folded, html_table, markup, standalone
from datasvc.views.models import value_text

if TYPE_CHECKING:
    from datasvc.models.registry.compare import VersionComparison
    from datasvc.models.registry.diff import ModelDifference
    from datasvc.shards.versions.diff import Difference

_KINDS: Final = ("added", "deleted", "changed")
_MAX_CLASSES: Final = 50
_MAX_ROWS: Final = 500


def dataset_difference_html(difference: Difference) -> Markup:
    """Return the numbers of samples that differ, the first keys of each kind, and changes of columns and classes."""
    facts = difference.to_json()
    splits: Mapping[str, Any] = facts["splits"]
    rows = [(name, *(changes[kind] for kind in _KINDS), changes["unchanged"]) for name, changes in splits.items()]
    counts = html_table(["split", *_KINDS, "unchanged"], rows, caption=f"{facts['a']} to {facts['b']}")
    return standalone(counts, markup(_describe_split(name, changes) for name, changes in splits.items()))


def schema_changes(changes: Mapping[str, Any], max_classes: int | None = None) -> dict[str, str]:
    """Return which columns and classes of a split differ, as text by kind, from `SplitDifference.to_json`."""
    texts = {
        **{
            kind: [f"{name}: {column_type}" for name, column_type in changes[kind].items()]
            for kind in ("columns_added", "columns_removed")
        },
        "columns_retyped": [f"{name}: {old} to {new}" for name, (old, new) in changes["columns_retyped"].items()],
        **{kind: changes[kind][:max_classes] for kind in ("classes_added", "classes_removed")},
    }
    return {kind.replace("_", " "): ", ".join(each) for kind, each in texts.items() if each}


def _describe_split(name: str, changes: Mapping[str, Any]) -> Markup:
    keys = [
        (kind, ", ".join(changes["keys"][kind]) + (", …" if changes[kind] > len(changes["keys"][kind]) else ""))
        for kind in _KINDS
        if changes[kind]
    ]
    labels = [f"{each['key']}: {each['old']} to {each['new']}" for each in changes["labels"]]
    if labels:
        keys.append(("relabelled", ", ".join(labels) + (", …" if changes["relabelled"] > len(labels) else "")))
    schema = schema_changes(changes).items()
    drift = sorted(changes["class_counts"].items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    parts = []
    if keys or schema:
        parts.append(html_table(["change", "of"], [*keys, *schema], caption=f"changes of {name}"))
    if changes["confusion"]:
        pairs = [(each["old"], each["new"], each["samples"]) for each in changes["confusion"]]
        parts.append(html_table(["class", "became", "samples"], pairs, caption=f"changed labels of {name}"))
    if drift:
        counts = [(label, old, new, new - old) for label, (old, new) in drift]
        columns = ["class", "before", "after", "difference"]
        parts.append(html_table(columns, counts, caption=f"classes of {name}", max_rows=_MAX_CLASSES))
    return markup(parts)


def model_difference_html(difference: ModelDifference) -> Markup:
    """Return the values that differ, and the relative change of each tensor, the largest first."""
    tensors = difference.tensors
    first, second = str(difference.a), str(difference.b)
    facts = {
        "from": f"{first}, step {difference.steps[0]:,}",
        "to": f"{second}, step {difference.steps[1]:,}",
        "tensors": f"{tensors.num_equal:,} equal, {len(tensors.changed):,} changed, {len(tensors.added):,} added, "
        f"{len(tensors.removed):,} removed, {len(tensors.retyped):,} with another type or shape",
    }
    rows = list(_value_rows(difference))
    values = html_table(["value", first, second], rows, max_rows=_MAX_ROWS) if rows else Markup()
    return standalone(facts_table(facts), values, _changes(difference))


def _value_rows(difference: ModelDifference) -> Iterator[tuple[str, str, str]]:
    for part, changes in difference.values.items():
        for name, (old, new) in changes.changed.items():
            yield f"{part}.{name}", value_text(old), value_text(new)
        for name, value in changes.added.items():
            yield f"{part}.{name}", "", value_text(value)
        for name, value in changes.removed.items():
            yield f"{part}.{name}", value_text(value), ""


def _changes(difference: ModelDifference) -> Markup:
    changes = sorted(difference.tensors.changes, key=lambda change: -(change.relative or 0.0))
    if not changes:
        return Markup()
    # A tensor that was zero has no relative change; the table has its norm.
    bars = [NamedBar(change.name, change.relative) for change in changes if change.relative is not None]
    rows = [
        (change.name, change.relative, change.norm, change.num_changed, change.num_elements, change.num_nonfinite)
        for change in changes
    ]
    columns = ["tensor", "relative change", "norm of the change", "changed elements", "elements", "not finite"]
    return markup(
        [
            bar_chart(bars, title="relative change of tensors", unit=""),
            folded("all changed tensors", html_table(columns, rows, max_rows=_MAX_ROWS)),
        ]
    )


def comparison_html(comparison: VersionComparison) -> Markup:
    """Return the values in which versions differ, with a column for each version."""
    rows = [
        (row.name, *(value_text(row.values.get(name)) for name in comparison.versions)) for row in comparison.values
    ]
    return standalone(html_table(["value", *comparison.versions], rows, max_rows=_MAX_ROWS))
