"""Records of an unfinished export, kept in its destination, so that an interrupted export can continue.

The folder `.datasvc-export` marks a destination as unfinished. It holds the plan of the export, and a record for each
complete unit (usually one shard). `datasvc-export.json` is written last: a destination that has it is complete.
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
from datasvc.shards.export.destination import Destination, safe_part
from datasvc.shards.export.export_format import WrittenFiles

SUMMARY_FILE: Final = "datasvc-export.json"
_FOLDER: Final = ".datasvc-export"
_PLAN_FILE: Final = f"{_FOLDER}/plan"  # cannot collide with a unit: units have extensions


def unit_path(split: str, number: int, extension: str = "json") -> str:
    """Return the path of a unit's record; with another extension, of data that is kept for `ExportFormat.join`."""
    return f"{_FOLDER}/{safe_part(split)}-{number:06d}.{extension}"


class ExportRecords:
    """The records of one export; create it by `open_records`.

    Args:
        destination: destination of the export.
        plan: JSON values that identify the export: version, format and shard tables.
        redactions: see `open_records`.
        summary: summary of an export of which only the records are left; None: unfinished.
    """

    def __init__(
        self,
        destination: Destination,
        plan: Mapping[str, Any],
        redactions: int,
        summary: Mapping[str, Any] | None = None,
    ) -> None:
        self.summary = summary
        self.redactions = redactions
        self._destination = destination
        self._plan = plan
        # List the folder once, instead of one request for each unit.
        self._recorded = set(destination.storage.list(_FOLDER))

    def written(self, split: str, number: int) -> WrittenFiles | None:
        """Return the result of a unit; None if it is not yet written. Raise UnavailableError."""
        path = unit_path(split, number)
        if path.rpartition("/")[2] not in self._recorded:
            return None
        return WrittenFiles(**_read_json(self._destination, path))

    def record(self, split: str, number: int, written: WrittenFiles) -> None:
        """Record that a unit is written and durable. Raise UnavailableError."""
        path = unit_path(split, number)
        # `ExportFormat.write` made the unit's files durable, so this record may declare them complete.
        self._destination.put(path, _encode(asdict(written)))
        self._recorded.add(path.rpartition("/")[2])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which completes the export. Raise UnavailableError."""
        self._destination.put(SUMMARY_FILE, _encode({**self._plan, **summary}))

    def tidy(self) -> None:
        """Remove the records, which only an unfinished export needs. Raise UnavailableError."""
        self._destination.storage.delete_folder(_FOLDER)


@contextmanager
def open_records(destination: Destination, plan: Mapping[str, Any], redactions: int) -> Iterator[ExportRecords]:
    """Start an export, or continue one that was interrupted.

    `redactions` is the number of the newest entry of the log of redactions. An export that continues keeps that of
    its first run, which may have written samples that were purged since.

    Raises:
        ConfigError: the destination holds other files or another export.
        ConflictError: another process exports into it.
        UnavailableError: the store failed, or the disk is full.
    """
    # Check before the lock creates its file, so that a refused folder of other files stays unchanged.
    _inspect(destination, plan)
    with _exclusive(destination):
        # Check again: another process may have changed the destination before this one had the lock.
        summary, started = _inspect(destination, plan)
        if started:
            destination.sweep()
        else:
            started = {**plan, "redactions": redactions}
            destination.put(_PLAN_FILE, _encode(started))
        # 0: an earlier release has begun it, so it is unknown what it wrote before which purge.
        yield ExportRecords(destination, plan, int(started.get("redactions", 0)), summary)


def _inspect(
    destination: Destination, plan: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return the summary of this export if only its records are left; and what is left of its plan; else None."""
    names = set(destination.storage.list(""))
    if SUMMARY_FILE in names:
        summary = _read_json(destination, SUMMARY_FILE)
        # This export was interrupted before it removed its records; a repeated call only removes them.
        if _FOLDER in names and {name: summary.get(name) for name in plan} == plan:
            is_planned = destination.storage.size(_PLAN_FILE) is not None
            return summary, _read_json(destination, _PLAN_FILE) if is_planned else summary
        raise ConfigError(
            f"{destination.location} holds a finished export ({SUMMARY_FILE}); choose a new or empty folder"
        )
    # Without a plan, no unit was written: the folder of records does not exist, or holds only the lock.
    if _FOLDER not in names or destination.storage.size(_PLAN_FILE) is None:
        if names - {_FOLDER}:
            raise ConfigError(
                f"{destination.location} is not empty ({', '.join(sorted(names)[:5])}), and an export overwrites "
                "nothing; choose a new or empty folder"
            )
        return None, None
    stored_plan = _read_json(destination, _PLAN_FILE)
    if {name: stored_plan.get(name) for name in plan} != plan:
        raise ConfigError(
            f"{destination.location} holds an unfinished export of {stored_plan.get('version')} as "
            f"{stored_plan.get('format')}, splits {', '.join(stored_plan.get('tables', []))}; repeat that export to "
            "finish it, or choose a new or empty folder"
        )
    return None, stored_plan


@contextmanager
def _exclusive(destination: Destination) -> Iterator[None]:
    """Lock a local folder against other exports. Raise ConflictError if another process has the lock."""
    # A remote store has no lock and needs none, because two runs of the same export write the same bytes.
    if not destination.is_local:
        yield
        return
    folder = destination.folder / _FOLDER
    with map_exceptions("create", str(folder)):
        durable.make_folder(folder)
        lock = (folder / "lock").open("ab")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConflictError(
                f"another process is exporting into {destination.location}; wait until it ends"
            ) from error
        yield


def _encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _read_json(destination: Destination, name: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CorruptDataError, NotFoundError or UnavailableError."""
    raw = destination.storage.read(name)
    try:
        value = json.loads(raw)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CorruptDataError(
            f"{destination.storage.location(name)} is not a JSON object: {raw[:80]!r}; export into a new folder"
        )
    return value
