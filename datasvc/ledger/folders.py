"""Ledgers as folders: finds them below a folder, and audits them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from datasvc.errors import CorruptDataError
from datasvc.ledger.audit import Audit, audit
from datasvc.ledger.file import SUFFIX, LedgerFile, read_ledger

_MAX_DEPTH: Final = 4
_MAX_FOLDERS: Final = 10_000


def find_ledgers(folder: Path) -> list[str]:
    """Return the ledgers below a folder, that is the folders with files of a ledger, relative to it and sorted.

    "." is the folder itself. Folders that cannot be read are left out. The search ends four levels below `folder`,
    and after ten thousand folders. Symbolic links are not followed.
    """
    found = []
    for number, (path, folders, files) in enumerate(os.walk(folder)):
        if number >= _MAX_FOLDERS:
            break
        relative = Path(path).relative_to(folder)
        if len(relative.parts) >= _MAX_DEPTH:
            folders.clear()
        if any(name.endswith(SUFFIX) for name in files):
            found.append(str(relative))
    return sorted(found)


def audit_folders(paths: Sequence[Path], *, epoch: int | None = None) -> Audit:
    """Audit the ledger of a run.

    Args:
        paths: folders of the ledger, or files; several, if each node has its own folder.
        epoch: epoch to audit; None: all epochs in the files.

    Raises:
        CorruptDataError: no file can be read, and some are damaged. If others can be read, damage is in the result.
        NotFoundError: a path is no ledger, or there are no records; see `audit`.
        ConfigError, UnavailableError: a file has another format, or cannot be read.
    """
    results = [list(read_ledger(path)) for path in paths]
    damage = [str(file) for folder in results for file in folder if isinstance(file, CorruptDataError)]
    folders = [[file for file in folder if isinstance(file, LedgerFile)] for folder in results]
    # An audit needs at least one readable file: its header states the data set and the access order.
    if damage and not any(folders):
        raise CorruptDataError("\n".join(damage))
    return audit(folders, epoch=epoch, damage=damage)
