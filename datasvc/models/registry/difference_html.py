"""The difference of two model versions as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from datasvc.drawing import Markup, NamedBar, bar_chart, facts_table, folded, html_table, markup, standalone
from datasvc.models.registry.version_table import value_text

if TYPE_CHECKING:
    from datasvc.models.registry.diff import ModelDifference

_MAX_ROWS: Final = 500


def difference_html(difference: ModelDifference) -> Markup:
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
