"""The audit of a run as HTML for a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from datasvc.drawing import Markup, element, facts_table, html_table, standalone
from datasvc.ledger.audit_text import describe_conclusion

if TYPE_CHECKING:
    from datasvc.ledger.audit import Audit

_COLUMNS: Final = ("epoch", "verdict", "served", "masked", "dropped", "padded", "never", "more than once", "again")


def audit_html(audit: Audit) -> Markup:
    """Return the verdict of each epoch with its counts, and what is wrong."""
    facts = {
        "audit of": audit.header.source,
        "result": "proven" if audit.is_proven else "not proven",
        "files": audit.num_files,
        "ranks": " → ".join(map(str, audit.world_sizes)),
    }
    rows = [
        (
            str(epoch.epoch),
            describe_conclusion(epoch),
            epoch.served,
            epoch.masked,
            epoch.dropped,
            epoch.padded,
            epoch.never.count,
            epoch.repeated.count,
            epoch.again,
        )
        for epoch in audit.epochs
    ]
    problems = [*audit.damage, *audit.disagreements, *(reason for epoch in audit.epochs for reason in epoch.reasons)]
    listed = [element("p", f"problem: {problem}") for problem in problems]
    return standalone(facts_table(facts), html_table(list(_COLUMNS), rows), *listed)
