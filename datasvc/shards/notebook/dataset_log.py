"""The versions of a data set as a list that a notebook shows as a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from datasvc.notebook.tables import rows_to_arrow, to_frame
from datasvc.repository import Entry, Repository
from datasvc.shards.notebook.version_nodes import entry_parents

if TYPE_CHECKING:
    import pandas as pd


class DatasetLog(list[Entry]):
    """Entries of the versions of a data set, oldest first.

    Args:
        name: name of the data set.
        entries: entries with valid splits.
        repository: where a notebook reads the tags and removals that it shows; None to show none.
    """

    def __init__(self, name: str, entries: Iterable[Entry] = (), repository: Repository | None = None) -> None:
        super().__init__(entries)
        self.name = name
        self._repository = repository

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

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows of `to_arrow` as a pandas frame. Raise ConfigError if pandas is not installed."""
        return to_frame(self.to_arrow())

    def _repr_html_(self) -> str:
        from datasvc.shards.notebook.version_html import log_html

        state = None if self._repository is None else self._repository.state("datasets", self.name)
        return log_html(self.name, self, state)
