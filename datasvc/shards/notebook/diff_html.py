"""The difference of two data-set versions as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from datasvc.drawing import Markup, html_table, markup, standalone

_KINDS: Final = ("added", "deleted", "changed")
_MAX_CLASSES: Final = 50


def difference_html(facts: Mapping[str, Any]) -> Markup:
    """Return the numbers of samples that differ, the first keys of each kind, and changes of columns and classes.

    Args:
        facts: the difference as JSON values, see `Difference.to_json`.
    """
    splits: Mapping[str, Any] = facts["splits"]
    rows = [(name, *(changes[kind] for kind in _KINDS), changes["unchanged"]) for name, changes in splits.items()]
    counts = html_table(["split", *_KINDS, "unchanged"], rows, caption=f"{facts['a']} to {facts['b']}")
    return standalone(counts, markup(_describe_split(name, changes) for name, changes in splits.items()))


def _describe_split(name: str, changes: Mapping[str, Any]) -> Markup:
    keys = [
        (kind, ", ".join(changes["keys"][kind]) + (", …" if changes[kind] > len(changes["keys"][kind]) else ""))
        for kind in _KINDS
        if changes[kind]
    ]
    schema = [
        *(("column added", f"{column}: {kind}") for column, kind in changes["columns_added"].items()),
        *(("column removed", f"{column}: {kind}") for column, kind in changes["columns_removed"].items()),
        *(
            ("column changed", f"{column}: {old} to {new}")
            for column, (old, new) in changes["columns_retyped"].items()
        ),
        *(("class added", each) for each in changes["classes_added"]),
        *(("class removed", each) for each in changes["classes_removed"]),
    ]
    drift = sorted(changes["class_counts"].items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    parts = []
    if keys or schema:
        parts.append(html_table(["change", "of"], [*keys, *schema], caption=f"changes of {name}"))
    if drift:
        counts = [(label, old, new, new - old) for label, (old, new) in drift]
        columns = ["class", "before", "after", "difference"]
        parts.append(html_table(columns, counts, caption=f"classes of {name}", max_rows=_MAX_CLASSES))
    return markup(parts)
