"""Reads the manifest of an image folder, a table of its files, for `ManifestSource`.

The columns of files, keys, labels and splits are found by their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.format.schema import HEIGHT, IMAGE, KEY, LABEL, WIDTH, image_field
from datasvc.shards.sources.common.column_types import cast_column, is_text, sample_type
from datasvc.shards.sources.common.listing import extension_of
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample
from datasvc.shards.sources.common.tables import TableSource
from datasvc.shards.sources.tabular.csv_files import EXTENSIONS as CSV_EXTENSIONS
from datasvc.shards.sources.tabular.csv_files import CsvSource
from datasvc.shards.sources.tabular.json_lines import EXTENSIONS as JSON_EXTENSIONS
from datasvc.shards.sources.tabular.json_lines import JsonLinesSource
from datasvc.shards.sources.tabular.parquet import EXTENSIONS as PARQUET_EXTENSIONS
from datasvc.shards.sources.tabular.parquet import ParquetSource

FILE_COLUMNS: Final = ("file", "path", "filename", "file_name", "image")
LABEL_COLUMNS: Final = ("label", "class")
SPLIT_COLUMN: Final = "split"
# Columns that the source or the ingest makes; an extra column of such a name gets the prefix `source_`.
_RESERVED_NAMES: Final = frozenset({KEY, IMAGE, LABEL, WIDTH, HEIGHT})
_MAX_LABEL: Final = (1 << 31) - 1


@dataclass(frozen=True)
class ManifestTable:
    """The columns of a manifest.

    Attributes:
        table: all columns, converted to the types that samples have.
        location: URL of the manifest for messages.
        file: column of the file names.
        key: column of the keys, if any.
        label: column of class names or integers, if any.
        split: column of the splits, if any.
        extras: all other columns.
        is_csv: whether it is a CSV file, which has a header line and no types.
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
    def read(cls, options: SourceOptions) -> ManifestTable:
        """Read a CSV, JSON lines or Parquet file.

        Args:
            options: `manifest` is its URL; `key` and `label` name columns, None: found by their usual names.

        Raises:
            NotFoundError: the manifest does not exist or is empty.
            ConfigError: a line cannot be parsed, no column has file names, or the column `key` or `label` is missing.
            UnavailableError: the store does not respond.
        """
        assert options.manifest is not None
        location, key, label = redact_url(options.manifest), options.key, options.label
        table = _read_columns(options.manifest, location, options)
        names = table.column_names
        file = next((name for name in FILE_COLUMNS if name in names), None)
        if file is None:
            raise ConfigError(f"{location} has no column of files: expected one of {FILE_COLUMNS}; found {names}")
        key = key or (KEY if KEY in names else None)
        if key is not None and key not in names:
            raise ConfigError(f"{location} has no key column {key!r}; found {names}")
        if label is not None and label not in names:
            raise ConfigError(f"{location} has no label column {label!r}; found {names}")
        label = label or next((name for name in LABEL_COLUMNS if name in names and name != key), None)
        split = SPLIT_COLUMN if SPLIT_COLUMN in names else None
        extras = [name for name in names if name not in (file, key, label, split)]
        return cls(table, location, file, key, label, split, extras, extension_of(location) in CSV_EXTENSIONS)

    def line(self, index: int) -> str:
        """Return the position of a sample in the manifest, for messages."""
        return f"line {index + 1 + self.is_csv} of {self.location}"

    def texts(self, name: str) -> list[str]:
        """Return the values of a column of text or integers, as text.

        Raises:
            ConfigError: the column has another type, or a value is empty.
        """
        column = self.table.column(name)
        if not (is_text(column.type) or pa.types.is_integer(column.type)):
            raise ConfigError(
                f"column {name!r} of {self.location} has the type {column.type}; expected text or integers"
            )
        values: list[Any] = column.cast(pa.string()).to_pylist()
        for index, value in enumerate(values):
            if not value:
                raise ConfigError(f"column {name!r} is empty in {self.line(index)}; fill it, or remove the line")
        return values

    def schema(self, labels: Sequence[int | None]) -> pa.Schema:
        """Return the columns of the samples; the column `label` is nullable if `labels` has None."""
        fields = [pa.field(KEY, pa.string(), nullable=False), image_field(IMAGE)]
        if self.label is not None:
            fields.append(pa.field(LABEL, pa.int32(), nullable=None in labels))
        fields += [pa.field(_extra_name(name), self.table.schema.field(name).type) for name in self.extras]
        names = [field.name for field in fields]
        if len(set(names)) < len(names):
            raise ConfigError(f"the columns of {self.location} would be called {names}; rename the duplicates")
        return pa.schema(fields)

    def labels(self) -> tuple[list[int | None], tuple[str, ...]]:
        """Return the label of each sample (None without one), and the sorted class names (none for integers).

        Raises:
            ConfigError: labels are neither class names nor integers from 0, or a CSV file mixes the two.
        """
        if self.label is None:
            return [None] * self.table.num_rows, ()
        column = self.table.column(self.label)
        if pa.types.is_floating(column.type):
            try:
                column = column.cast(pa.int64())  # pandas writes integers with missing values as floats
            except pa.ArrowInvalid as error:
                raise ConfigError(f"column {self.label!r} of {self.location} holds no labels: {error}") from error
        values = column.to_pylist()
        if pa.types.is_integer(column.type):
            for index, value in enumerate(values):
                if value is not None and not 0 <= value <= _MAX_LABEL:
                    raise ConfigError(
                        f"{self.line(index)} has the label {value}; expected 0 to {_MAX_LABEL}, or an empty value "
                        "for a sample that has no class"
                    )
            return values, ()
        if not is_text(column.type):
            raise ConfigError(
                f"column {self.label!r} of {self.location} has the type {column.type}; expected class names "
                "or integers"
            )
        class_names = [value or None for value in values]  # an empty text means no class
        # A CSV file has no types, so a column that mixes integers and names is read as text, without an error.
        if self.is_csv:
            _check_unmixed(class_names, self)
        classes = sorted({name for name in class_names if name is not None})
        label_of_class: dict[str | None, int | None] = {name: label for label, name in enumerate(classes)}
        return [label_of_class.get(name) for name in class_names], tuple(classes)

    def values(self, name: str) -> list[Any]:
        """Return the values of a column as Python values from which Arrow can build the same column again."""
        column = self.table.column(name)
        # Python's types of these values cannot hold nanoseconds. Return integers, which Arrow can convert back.
        checks = (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time64)
        if any(check(column.type) for check in checks):
            column = column.cast(pa.int64())
        values: list[Any] = column.to_pylist()
        return values


def _check_unmixed(names: Sequence[str | None], table: ManifestTable) -> None:
    """Raise ConfigError if some labels look like integers and others do not."""
    filled = [(index, name) for index, name in enumerate(names) if name is not None]
    integers = [(index, name) for index, name in filled if name.lstrip("-").isdecimal()]
    others = [(index, name) for index, name in filled if not name.lstrip("-").isdecimal()]
    if integers and others:
        (integer_index, integer), (other_index, other) = integers[0], others[0]
        raise ConfigError(
            f"labels mix integers and names: {integer!r} in {table.line(integer_index)}, "
            f"{other!r} in {table.line(other_index)}; use one or the other"
        )


def _extra_name(name: str) -> str:
    """Return the name of the sample column for the extra column `name`."""
    return f"source_{name}" if name in _RESERVED_NAMES else name


def _read_columns(url: str, location: str, options: SourceOptions) -> pa.Table:
    """Return the columns of a manifest, with the types that samples have. For errors, see `ManifestTable.read`."""
    extension = extension_of(location)
    source: TableSource
    if extension in CSV_EXTENSIONS:
        # The columns of files, splits and keys are read as text, even if all of their values look like numbers.
        source = CsvSource.list(url, texts=[*FILE_COLUMNS, SPLIT_COLUMN, options.key or KEY, *options.as_text])
    elif extension in JSON_EXTENSIONS:
        source = JsonLinesSource.list(url)
    elif extension in PARQUET_EXTENSIONS:
        source = ParquetSource.list(url)
    else:
        raise ConfigError(f"{location} is not a manifest by its name; expected .csv, .tsv, .jsonl or .parquet")
    batches = []
    for part in source.parts:
        for raw in source.read_raw(part):
            if isinstance(raw, BadSample):
                raise ConfigError(f"{location}: {raw.key}: {raw.reason}; repair this line")
            batches.append(raw.batch)
    table = pa.Table.from_batches(batches)
    fields = [field.with_type(sample_type(field.type)).remove_metadata() for field in table.schema]
    columns = [
        pa.chunked_array([cast_column(chunk, field.type) for chunk in column.chunks], field.type)
        for column, field in zip(table.columns, fields, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))
