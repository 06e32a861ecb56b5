"""Folders of runs: identifiers, references to them, and which folders `gc` deletes.

An identifier begins with the time of the start of the run, in UTC.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from datasvc.errors import ConfigError
from datasvc.repository import Storage
from datasvc.repository.logs.references import check_name
from datasvc.runs.part import PartRange

RUNS: Final = "runs"
"""Folder of all run logs in a repository."""
Newest = dict[str, float]
"""Time of the last change of each run in seconds since 1970, by its reference `NAME/ID`."""
_TIME: Final = "%Y%m%d-%H%M%S"
_ID: Final = re.compile(r"([0-9]{8}-[0-9]{6})-[0-9a-f]{6}")


def new_run_id() -> str:
    """Return the identifier of a run that starts now. Identifiers sort by their time."""
    return f"{datetime.now(UTC).strftime(_TIME)}-{secrets.token_hex(3)}"


def is_run_id(text: str) -> bool:
    """Return whether `text` is an identifier of a run."""
    return _ID.fullmatch(text) is not None


def check_run_id(text: str) -> str:
    """Return `text` if it is an identifier of a run, otherwise raise ConfigError."""
    if not is_run_id(text):
        raise ConfigError(f"{text!r} is no identifier of a run; expected one such as '20261123-221830-3fa9c1'")
    return text


def started_s(run_id: str) -> float:
    """Return when a run started, in seconds since 1970, from its identifier; 0 if that has no valid time."""
    try:
        return datetime.strptime(run_id[:15], _TIME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def run_folder(name: str, run_id: str) -> str:
    """Return the folder of a run, relative to the root of the repository."""
    return f"{RUNS}/{name}/{run_id}"


def parse_run(ref: str) -> tuple[str, str | None]:
    """Return the name and the identifier in `NAME/ID`; the identifier is None in `NAME`, the newest run.

    Raises:
        ConfigError: `ref` is no such reference.
    """
    name, slash, run_id = ref.partition("/")
    check_name(name, "run")
    return name, check_run_id(run_id) if slash else None


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
