"""Chooses the run logs that `gc` deletes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

from datasvc.repository import Storage
from datasvc.runs.part import PartRange
from datasvc.runs.run_ids import RUNS, is_run_id

Newest = dict[str, float]
"""Time of the last change of each run in seconds since 1970, by its reference `NAME/ID`."""


def newest_changes(storage: Storage) -> Newest:
    """Return when each run log was changed last. Raises the errors of `Storage.walk`."""
    newest: Newest = {}
    for file in storage.walk(RUNS):
        match file.path.split("/"):
            case [_, name, run_id, _] if is_run_id(run_id):
                ref = f"{name}/{run_id}"
                newest[ref] = max(newest.get(ref, 0.0), file.modified_s)
    return newest


def delete_run(storage: Storage, ref: str, before_s: float) -> bool:
    """Delete the log of a run if all of its files are older than `before_s`; return whether it was deleted.

    A run may be continued at any time. Its headers are deleted last, and only if no new file has appeared, because
    the numbers of further attempts continue theirs.

    Raises:
        UnavailableError: the store does not respond; the run may be deleted in part.
    """
    folder = f"{RUNS}/{ref}"
    for is_last_round in (False, True):
        files = list(storage.walk(folder))
        if not files or any(file.modified_s >= before_s for file in files):
            return False
        chosen = [file.path for file in files if is_last_round or PartRange.parse(file.path.rpartition("/")[2])]
        results = [storage.delete_if_older(path, before_s) for path in chosen]
        if not all(results):
            return False
    if (path := storage.local_path(folder)) is not None:
        with suppress(OSError):  # a new attempt of the run has just begun
            path.rmdir()
    return True


def choose_old_runs(
    newest: Newest, versions: Mapping[str, bool], *, before_s: float, any_before_s: float = -math.inf
) -> list[str]:
    """Return the references of the runs to delete.

    Args:
        newest: result of `newest_changes`.
        versions: for each run that model versions name, whether one of these versions is not removed.
        before_s: a run changed before this time is deleted if it has versions, and all of them are removed.
        any_before_s: a run changed before this time is deleted whatever versions it has.
    """

    def is_old(ref: str, changed_s: float) -> bool:
        return changed_s < any_before_s or (changed_s < before_s and versions.get(ref) is False)

    return sorted(ref for ref, changed_s in newest.items() if is_old(ref, changed_s))
