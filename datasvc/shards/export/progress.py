"""What an unfinished export has done, kept in the destination itself, so that the same export goes on after a kill.

A folder `.datasvc-export` marks a destination as unfinished and says of what; it holds a record for each unit that is
written whole. `datasvc-export.json` comes last: a destination that has it is complete.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

from datasvc import durable
from datasvc.errors import ConfigError, ConflictError, CorruptDataError
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.export.destination import Destination
from datasvc.shards.export.export_format import WrittenFiles
from datasvc.shards.export.names import safe_part

SUMMARY_FILE: Final = "datasvc-export.json"
_FOLDER: Final = ".datasvc-export"
_PLAN_FILE: Final = f"{_FOLDER}/plan"  # no unit is called so: units have extensions


def unit_path(split: str, number: int, extension: str = "json") -> str:
    """Return where the record of a unit lies, or with another extension what its format keeps until the end."""
    return f"{_FOLDER}/{safe_part(split)}-{number:06d}.{extension}"


class ExportRecords:
    """The records of one export. Made by `open_progress`.

    Args:
        destination: of the export.
        plan: what is exported: JSON values by which the same export is known again.
        summary: of the export where it is finished, and was killed while it tidied up.
    """

    def __init__(
        self, destination: Destination, plan: Mapping[str, Any], summary: Mapping[str, Any] | None = None
    ) -> None:
        self.summary = summary
        self._destination = destination
        self._plan = plan
        self._recorded = set(destination.storage.list(_FOLDER))

    def written(self, split: str, number: int) -> WrittenFiles | None:
        """Return what was written of a unit; None when it is still to do. Raises UnavailableError."""
        path = unit_path(split, number)
        if path.rpartition("/")[2] not in self._recorded:
            return None
        return WrittenFiles(**_read_json(self._destination, path))

    def record(self, split: str, number: int, written: WrittenFiles) -> None:
        """Say that a unit is written, and safe. Raises UnavailableError."""
        path = unit_path(split, number)
        self._destination.put(path, _encode(asdict(written)))
        self._recorded.add(path.rpartition("/")[2])

    def finish(self, summary: Mapping[str, Any]) -> int:
        """Write the summary, from which moment the export is complete; returns its size. Raises UnavailableError."""
        size_bytes = self._destination.put(SUMMARY_FILE, _encode({**self._plan, **summary}))
        self.tidy()
        return size_bytes

    def tidy(self) -> None:
        """Remove what only an unfinished export needs. Raises UnavailableError."""
        self._destination.storage.delete_folder(_FOLDER)


@contextmanager
def open_progress(destination: Destination, plan: Mapping[str, Any]) -> Iterator[ExportRecords]:
    """Begin an export, or go on with it where it was interrupted.

    Raises:
        ConfigError: the destination holds something else.
        ConflictError: another process is exporting into it.
        UnavailableError: the store failed, or the disk is full.
    """
    _survey(destination, plan)  # nothing is made in a folder that is not ours
    with _exclusive(destination):
        summary, is_begun = _survey(destination, plan)
        if is_begun:
            destination.sweep()
        else:
            destination.put(_PLAN_FILE, _encode(plan))
        yield ExportRecords(destination, plan, summary)


def _survey(destination: Destination, plan: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, bool]:
    """Return the summary, where there is only tidying left, and whether this export was begun before."""
    names = set(destination.storage.list(""))
    if SUMMARY_FILE in names:
        summary = _read_json(destination, SUMMARY_FILE)
        if _FOLDER in names and {name: summary.get(name) for name in plan} == plan:
            return summary, True
        raise ConfigError(f"{destination.location} holds a finished export ({SUMMARY_FILE}); name a new folder")
    begun = _FOLDER in names and destination.storage.size(_PLAN_FILE) is not None
    if not begun:
        if names - {_FOLDER}:
            raise ConfigError(
                f"{destination.location} is not empty ({', '.join(sorted(names)[:5])}); name a new folder, nothing "
                "is overwritten"
            )
        return None, False
    found = _read_json(destination, _PLAN_FILE)
    if found != plan:
        raise ConfigError(
            f"{destination.location} holds an unfinished export of {found.get('version')} as {found.get('format')}, "
            f"splits {', '.join(found.get('tables', []))}; run that one again to finish it, or name a new folder"
        )
    return None, True


@contextmanager
def _exclusive(destination: Destination) -> Iterator[None]:
    """Keep other exports out of a local folder; in a store two of the same write the same bytes."""
    if not destination.is_local:
        yield
        return
    folder = destination.folder / _FOLDER
    with map_exceptions("make", str(folder)):
        durable.make_folder(folder)
        lock = (folder / "lock").open("ab")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConflictError(f"another process is exporting into {destination.location}; let it finish") from error
        yield


def _encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _read_json(destination: Destination, name: str) -> dict[str, Any]:
    raw = destination.storage.read(name)
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise CorruptDataError(f"{destination.storage.location(name)} is no JSON: {raw[:80]!r}") from error
    if not isinstance(value, dict):
        raise CorruptDataError(f"{destination.storage.location(name)} is no JSON object: {raw[:80]!r}")
    return value
