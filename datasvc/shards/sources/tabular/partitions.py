"""Read the partition columns that Hive and Spark write as folder names, for `parquet`: `label=cat/part-0.parquet`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.format.schema import LABEL

_NULL: Final = "__HIVE_DEFAULT_PARTITION__"  # stands for null in a folder name
# Usual names of a column of class names. The first of them that exists becomes the column `label`.
_LABEL_COLUMNS: Final = (LABEL, "class", "cls", "target")


def partition_of(name: str) -> dict[str, str | None]:
    """Return the value by column from the folder names in a path: {"label": "cat"} for "label=cat/0.parquet"."""
    pairs = [folder.partition("=") for folder in name.split("/")[:-1] if "=" in folder]
    return {unquote(column): None if value == _NULL else unquote(value) for column, _, value in pairs if column}


class Partitions:
    """The partition columns of a source's files. They hold text, except a label column, which holds class indices.

    Args:
        names: names of all files.

    Attributes:
        schema: the partition columns.
        classes: sorted class names; empty if no partition column is a label.

    Raises:
        ConfigError: files have different partition columns.
    """

    def __init__(self, names: Sequence[str]) -> None:
        files = {name: partition_of(name) for name in names}
        first_name = next(iter(files), "")
        columns = list(files[first_name]) if files else []
        for name, values in files.items():
            # All samples of a source must have the same columns.
            if list(values) != columns:
                raise ConfigError(
                    f"the folders of {name} have the partition columns {list(values)}, those of {first_name} "
                    f"{columns}; ingest them as two sources, or move the files"
                )
        self._label_column = next((column for column in _LABEL_COLUMNS if column in columns), None)
        class_names = {values[self._label_column] for values in files.values()} if self._label_column else set()
        # Null is no class: the files in its folder have the label null.
        self.classes: tuple[str, ...] = tuple(sorted(name for name in class_names if name is not None))
        self.schema = pa.schema(
            [(LABEL, pa.int32()) if column == self._label_column else (column, pa.string()) for column in columns]
        )

    def add(self, batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
        """Return `batch` of the file `name` with its partition columns appended."""
        for field, (column, text) in zip(self.schema, partition_of(name).items(), strict=True):
            value = self.classes.index(text) if column == self._label_column and text is not None else text
            batch = batch.append_column(field, pa.array([value] * batch.num_rows, field.type))
        return batch

    def check_no_duplicates(self, raw: pa.Schema) -> None:
        """Raise ConfigError if a partition column is also a column of the files."""
        duplicates = sorted(set(self.schema.names) & set(raw.names))
        if duplicates:
            raise ConfigError(
                f"the columns {duplicates} are both in the files and in folder names; remove one of them"
            )
