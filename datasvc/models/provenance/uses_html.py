"""Which versions consumed samples, as HTML for a notebook."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from datasvc.drawing import Markup, facts_table, folded, html_table, standalone

if TYPE_CHECKING:
    from datasvc.models.provenance.sample_uses import ConsumerReport

_MAX_ROWS: Final = 100


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
