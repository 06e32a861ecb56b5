"""The versions of a data set as a list that a notebook shows as a graph, and what each was made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from datasvc.repository import Entry, Repository
from datasvc.repository.logs.heads import recorded_parents
from datasvc.shown import ShownTable, rows_to_arrow


class DatasetLog(ShownTable, list[Entry]):
    """Entries of the versions of a data set, oldest first.

    Args:
        name: name of the data set.
        entries: entries with valid splits.
        repository: where a notebook reads the tags and removals that it shows; None to show none.
    """

    def __init__(self, name: str, entries: Iterable[Entry] = (), repository: Repository | None = None) -> None:
        super().__init__(entries)
        self.name = name
        self.repository = repository

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has clients of its own.
        return DatasetLog, (self.name, list(self))

    def to_arrow(self) -> pa.Table:
        """Return a row for each version: `version`, `created`, `samples`, `bytes`, `shards`, `parents`, `message`."""
        return rows_to_arrow(
            [
                {
                    "version": f"{self.name}@{entry.number}",
                    "created": entry.content.get("created"),
                    **{
                        field: sum(split[field] for split in entry.content["splits"].values())
                        for field in ("samples", "bytes", "shards")
                    },
                    "parents": list(entry_parents(entry.content)),
                    "message": entry.content.get("message") or "",
                }
                for entry in self
            ]
        )


def entry_parents(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the versions that a version was made from, as its entry records them; () for an ingest."""
    change = content.get("change")
    parents: list[Any] = recorded_parents(content)
    if isinstance(change, Mapping) and change.get("kind") == "merge":
        parents += change.get("versions", ())
    elif isinstance(change, Mapping) and change.get("kind") == "revert" and change.get("to"):
        parents.append(change["to"])
    return tuple(dict.fromkeys(map(str, parents)))


def change_of(content: Mapping[str, Any]) -> str:
    """Return how a version was made: "ingest", "append", "delete", "merge" or another change."""
    change = content.get("change")
    return str(change.get("kind")) if isinstance(change, Mapping) else "ingest"
