"""Columns that stand in folder names, as Hive writes them: `label=cat/part-0.parquet`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import unquote

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.format.schema import LABEL

_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_LABELS: Final = (LABEL, "class", "cls", "target")

Values = Mapping[str, str | None]


def partition_of(name: str) -> dict[str, str | None]:
    """Return the columns that the folders of a file name say, by column."""
    pairs = [folder.partition("=") for folder in name.split("/")[:-1] if "=" in folder]
    return {unquote(column): None if value == _NULL else unquote(value) for column, _, value in pairs if column}


class Partitions:
    """The columns that the folders of a source's files name; text, but for a label, which becomes an index.

    Args:
        names: of all files.

    Attributes:
        schema: the columns.
        classes: names of the label, sorted; empty where no folder names one.

    Raises:
        ConfigError: files name different columns.
    """

    def __init__(self, names: Sequence[str]) -> None:
        values = {name: partition_of(name) for name in names}
        first = next(iter(values), "")
        columns = list(values[first]) if values else []
        for name, found in values.items():
            if list(found) != columns:
                raise ConfigError(
                    f"the folders of {name} name the columns {list(found)}, those of {first} {columns}; "
                    "ingest them as two sources, or move them"
                )
        label = next((column for column in _LABELS if column in columns), None)
        self._label = label
        self.classes: tuple[str, ...] = ()
        if label is not None:
            self.classes = tuple(sorted({str(found[label]) for found in values.values() if found[label] is not None}))
        self.schema = pa.schema(
            [(LABEL, pa.int32()) if column == label else (column, pa.string()) for column in columns]
        )

    def add(self, batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
        """Return `batch` of the file `name` with the columns of its folders."""
        for column, value in partition_of(name).items():
            if column == self._label:
                number = None if value is None else self.classes.index(value)
                batch = _with(batch, LABEL, pa.array([number] * batch.num_rows, pa.int32()))
            else:
                batch = _with(batch, column, pa.array([value] * batch.num_rows, pa.string()))
        return batch

    def check_new(self, raw: pa.Schema) -> None:
        """Raise ConfigError where a file holds a column that its folder names too."""
        twice = sorted(set(self.schema.names) & set(raw.names))
        if twice:
            raise ConfigError(f"the columns {twice} stand in the files and in their folders' names; drop one of them")


def _with(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [*batch.columns, column], schema=batch.schema.append(pa.field(name, column.type))
    )
