"""A manifest as a table: which of its columns names files, labels, splits and keys, and what they say."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.repository.store.storage import redact_url
from datasvc.shards.format.schema import HEIGHT, IMAGE, KEY, LABEL, WIDTH, image_field
from datasvc.shards.sources.common.column_types import converted, is_text, sample_type
from datasvc.shards.sources.common.files import COMPRESSIONS
from datasvc.shards.sources.common.source import BadSample
from datasvc.shards.sources.common.tables import TableSource
from datasvc.shards.sources.tabular.csv_files import EXTENSIONS as CSV_EXTENSIONS
from datasvc.shards.sources.tabular.csv_files import CsvFiles
from datasvc.shards.sources.tabular.json_lines import EXTENSIONS as JSON_EXTENSIONS
from datasvc.shards.sources.tabular.json_lines import JsonLines
from datasvc.shards.sources.tabular.parquet import EXTENSIONS as PARQUET_EXTENSIONS
from datasvc.shards.sources.tabular.parquet import ParquetSource

FILE_COLUMNS: Final = ("file", "path", "filename", "file_name", "image")
LABEL_COLUMNS: Final = ("label", "class")
SPLIT_COLUMN: Final = "split"
_TAKEN: Final = frozenset({KEY, IMAGE, LABEL, WIDTH, HEIGHT})
_MAX_LABEL: Final = (1 << 31) - 1


@dataclass(frozen=True)
class ManifestTable:
    """A manifest that was read.

    Attributes:
        table: its columns, with the types that they have in samples.
        location: of the manifest, for messages.
        file: column that names the files.
        key: column that holds the keys, if any.
        label: column of class names or integers, if any.
        split: column of splits, if any.
        extras: all other columns.
        is_csv: whether it is a CSV file, with a header and without types.
    """

    table: pa.Table
    location: str
    file: str
    key: str | None
    label: str | None
    split: str | None
    extras: list[str]
    is_csv: bool

    @classmethod
    def read(cls, url: str, key: str | None) -> ManifestTable:
        """Read a CSV, JSON lines or Parquet file; `key`: column that holds the keys.

        Raises:
            NotFoundError: it is not there, or empty.
            ConfigError: a line does not parse, or it has no column of files, or no column `key`.
            UnavailableError: the store does not answer.
        """
        location = redact_url(url)
        table = _read_columns(url, location, key)
        names = table.column_names
        file = next((name for name in FILE_COLUMNS if name in names), None)
        if file is None:
            raise ConfigError(f"{location} has no column of files: expected one of {FILE_COLUMNS}; found {names}")
        key = key or (KEY if KEY in names else None)
        if key is not None and key not in names:
            raise ConfigError(f"{location} has no column {key!r} to take keys from; found {names}")
        label = next((name for name in LABEL_COLUMNS if name in names and name != key), None)
        split = SPLIT_COLUMN if SPLIT_COLUMN in names else None
        extras = [name for name in names if name not in (file, key, label, split)]
        return cls(table, location, file, key, label, split, extras, _extension(location) in CSV_EXTENSIONS)

    def line(self, index: int) -> str:
        """Return where a sample of the manifest is, for messages."""
        return f"line {index + 1 + self.is_csv} of {self.location}"

    def texts(self, name: str) -> list[str]:
        """Return the values of a column of text or integers, as text.

        Raises:
            ConfigError: it holds something else, or a line has nothing.
        """
        column = self.table.column(name)
        if not (is_text(column.type) or pa.types.is_integer(column.type)):
            raise ConfigError(f"column {name!r} of {self.location} is {column.type}; expected text")
        values: list[Any] = column.cast(pa.string()).to_pylist()
        empty = next((index for index, value in enumerate(values) if not value), None)
        if empty is not None:
            raise ConfigError(f"column {name!r} is empty in {self.line(empty)}; fill it, or remove the line")
        return values

    def schema(self, labels: Sequence[int | None]) -> pa.Schema:
        """Return the columns of the samples."""
        fields = [pa.field(KEY, pa.string(), nullable=False), image_field(IMAGE)]
        if self.label is not None:
            fields.append(pa.field(LABEL, pa.int32(), nullable=None in labels))
        fields += [pa.field(_extra_name(name), self.table.schema.field(name).type) for name in self.extras]
        names = [field.name for field in fields]
        if len(set(names)) < len(names):
            raise ConfigError(f"the columns of {self.location} would be called {names}; rename those that collide")
        return pa.schema(fields)

    def labels(self) -> tuple[list[int | None], tuple[str, ...]]:
        """Return each sample's label, None where it has none, and the class names, sorted.

        Raises:
            ConfigError: labels are neither integers from 0 nor names, or mix them.
        """
        if self.label is None:
            return [None] * self.table.num_rows, ()
        column = self.table.column(self.label)
        values = column.to_pylist()
        if pa.types.is_integer(column.type):
            wrong = next(
                (i for i, value in enumerate(values) if value is not None and not 0 <= value <= _MAX_LABEL), None
            )
            if wrong is not None:
                raise ConfigError(
                    f"{self.line(wrong)} has label {values[wrong]}; expected 0 or more, or nothing without a class"
                )
            return values, ()
        if not is_text(column.type):
            raise ConfigError(
                f"column {self.label!r} of {self.location} is {column.type}; expected class names or integers"
            )
        named = [value or None for value in values]
        if self.is_csv:
            _check_unmixed(named, self)
        classes = sorted({value for value in named if value is not None})
        numbers: dict[str | None, int | None] = {name: number for number, name in enumerate(classes)}
        return [numbers.get(value) for value in named], tuple(classes)

    def values(self, name: str) -> list[Any]:
        """Return the values of a column, from which Arrow makes the same column again."""
        column = self.table.column(name)
        # Nanoseconds fit no Python date; Arrow takes integers for them.
        checks = (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time64)
        is_moment = any(check(column.type) for check in checks)
        values: list[Any] = (column.cast(pa.int64()) if is_moment else column).to_pylist()
        return values


def _check_unmixed(names: Sequence[str | None], table: ManifestTable) -> None:
    """Refuse class names of which some are integers: in a CSV file they are the same column of text."""
    integers = [index for index, name in enumerate(names) if name is not None and name.lstrip("-").isdecimal()]
    others = [index for index, name in enumerate(names) if name is not None and not name.lstrip("-").isdecimal()]
    if integers and others:
        raise ConfigError(
            f"labels mix integers and names: {names[integers[0]]!r} in {table.line(integers[0])}, "
            f"{names[others[0]]!r} in {table.line(others[0])}; use one or the other"
        )


def _extra_name(name: str) -> str:
    return f"source_{name}" if name in _TAKEN else name


def _extension(location: str) -> str:
    base, last = posixpath.splitext(location.lower())
    return posixpath.splitext(base)[1] if last in COMPRESSIONS else last


def _read_columns(url: str, location: str, key: str | None) -> pa.Table:
    """Return a manifest's columns, with the types that they have in samples."""
    extension = _extension(location)
    source: TableSource
    if extension in CSV_EXTENSIONS:
        source = CsvFiles.list(url, texts=[*FILE_COLUMNS, SPLIT_COLUMN, key or KEY])
    elif extension in JSON_EXTENSIONS:
        source = JsonLines.list(url)
    elif extension in PARQUET_EXTENSIONS:
        source = ParquetSource.list(url)
    else:
        raise ConfigError(f"{location} is no manifest by its name; expected .csv, .tsv, .jsonl or .parquet")
    batches = []
    for part in source.parts:
        for raw in source.read_raw(part):
            if isinstance(raw, BadSample):
                raise ConfigError(f"{location}: {raw.key}: {raw.reason}; mend that line")
            batches.append(raw.batch)
    table = pa.Table.from_batches(batches)
    fields = [field.with_type(sample_type(field.type)).remove_metadata() for field in table.schema]
    columns = [
        pa.chunked_array([converted(chunk, field.type) for chunk in column.chunks], field.type)
        for column, field in zip(table.columns, fields, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))
