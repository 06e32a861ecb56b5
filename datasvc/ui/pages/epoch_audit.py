"""How far a run is in its current epoch, from its ledger: what the page of a run shows of it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from datasvc.errors import DatasvcError
from datasvc.ledger.audit import audit_folders
from datasvc.ledger.audit_text import audit_facts, describe_conclusion
from datasvc.ui.web.page import Panel

_MAX_FILES: Final = 2000  # of a ledger that is read while a page waits; a run has a file for each rank and start
_SAMPLES_LISTED: Final = 10


@dataclass(frozen=True)
class CurrentEpoch:
    """The newest epoch of a ledger, as its audit has it.

    Attributes:
        ledger: name of the ledger, of its page.
        epoch: number of the epoch; None if there is none to show.
        share: part of its positions that all ranks have passed.
        text: what the audit has found, or why there is no audit.
        panel: the audit of this epoch as values; None if there is none.
    """

    ledger: str
    epoch: int | None
    share: float
    text: str
    panel: Panel | None


def audit_current_epoch(folder: Path, ledger: str) -> CurrentEpoch:
    """Audit the newest epoch of a ledger. Errors, such as those of a ledger without records, are text.

    Args:
        folder: folder of the ledgers.
        ledger: name of the ledger, its path in this folder.
    """
    path = folder / ledger
    try:
        if sum(1 for _ in path.iterdir()) > _MAX_FILES:
            return CurrentEpoch(ledger, None, 0.0, "the ledger has too many files to be read here", None)
        # The number of the epoch is that of the ledger: a program may count its epochs from another one.
        newest = audit_folders([path]).epochs[-1]
        result = audit_folders([path], epoch=newest.epoch)
    except (DatasvcError, OSError) as error:
        return CurrentEpoch(ledger, None, 0.0, str(error), None)
    command = shlex.join(["datasvc", "audit", str(path), "--epoch", str(newest.epoch), "--json"])
    panel = Panel(audit_facts(result, _SAMPLES_LISTED, None), command)
    share = newest.reached / newest.num_samples if newest.num_samples else 0.0
    return CurrentEpoch(ledger, newest.epoch, share, f"{describe_conclusion(newest)}.", panel)
