"""Source of Parquet files. A part is a range of row groups; even large row groups are decoded in small batches.

Partition columns are those that Hive and Spark write as folder names: `label=cat/part-0.parquet`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from datasvc.errors import ConfigError
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.format.schema import LABEL
from datasvc.shards.sources.common.column_types import checked_names, join_schemas
from datasvc.shards.sources.common.columns import ColumnMap, schema_of_text, schema_to_text
from datasvc.shards.sources.common.file_checks import HEAD_BYTES, check_head, check_no_table_log
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile
from datasvc.shards.sources.common.options import SourceOptions, split_of_file
from datasvc.shards.sources.common.source import BadSample, SourcePart, batch_samples
from datasvc.shards.sources.common.tables import (
    EMPTY,
    RawBatch,
    TableSource,
    list_tables,
    map_files,
    no_samples_error,
    reason_of,
    row_keys,
)
from datasvc.shards.sources.tabular.features import columns_of_media, features_of_files, label_column
from datasvc.shards.sources.tabular.parquet_footer import largest_cells
from datasvc.sizes import format_size

EXTENSIONS: Final = frozenset({".parquet", ".pq"})
PART_BYTES: Final = 16 << 20  # size of a part after decompression
# Each column of an open part has a read buffer of this size; larger pages bypass it.
_BUFFER_BYTES: Final = 64 << 10
_MAX_CHECKED_BYTES: Final = 16 << 20  # of a file whose cells are checked; their limit is far above for larger files
_TAIL_BYTES: Final = 8  # after the footer: its length, and "PAR1"
# Spark and Hive write INT96 timestamps. As nanoseconds, Arrow's default, years after 2262 wrap: 9999 is 1816.
_INT96_UNIT: Final = "us"
# Number of samples that are decoded to measure their size.
_PROBED_SAMPLES: Final = 32


_NULL: Final = "__HIVE_DEFAULT_PARTITION__"  # stands for null in a folder name
# Usual names of a column of class names. The first of them that exists becomes the column `label`.
_LABEL_COLUMNS: Final = (LABEL, "class", "cls", "target")


@dataclass(frozen=True, kw_only=True)
class ParquetSource(TableSource):
    """A source of Parquet files. Without a key column, the key of a sample is `FILE#ROW`.

    Attributes:
        partitions: partition columns in the folder names.
    """

    kind: ClassVar[str] = "parquet"

    partitions: Partitions = field(default_factory=lambda: Partitions([]))

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> ParquetSource:
        """List the source from the footers of its files. For errors, see `FileSource.list`."""
        options = options or SourceOptions()
        files, ignored = list_tables(url, EXTENSIONS)
        return cls.of_files(url, files, ignored, options)

    @classmethod
    def of_files(
        cls,
        url: str,
        files: Sequence[SourceFile],
        ignored: Counter[str],
        options: SourceOptions,
        features: Mapping[str, Any] | None = None,
    ) -> ParquetSource:
        """Return the source of listed `files`; for arguments and errors, see `ArrowSource.of_files`."""
        reader = FileReader(url)
        with map_exceptions("list", redact_url(url)):
            check_no_table_log(reader.file_system, reader.root, [file.path for file in files])
        footers = map_files(reader, files, lambda file: read_footer(reader, file))
        filled = [(file, footer) for file, footer in zip(files, footers, strict=True) if footer.num_samples]
        if not filled:
            raise no_samples_error(url, files)
        schemas = [(file.name, footer.schema) for file, footer in filled]
        raw = join_schemas(schemas)
        partitions = Partitions([file.name for file, _ in filled])
        duplicates = sorted(set(partitions.schema.names) & set(raw.names))
        if duplicates:
            raise ConfigError(
                f"the columns {duplicates} are both in the files and in folder names; remove one of them"
            )
        raw = pa.schema([*raw, *partitions.schema], metadata=raw.metadata)
        features = features or features_of_files(schemas)
        label, classes = label_column(features, raw)
        parts = [
            part for file, footer in filled for part in plan_parts(file, footer, split_of_file(file.name, options))
        ]
        # A part has samples, so reading it yields at least one batch or bad sample.
        first = next(read_parquet(reader, parts[0]))
        # If the first samples cannot be read, the listing does not fail: the ingest reports the reason.
        first_samples = partitions.add(first.batch, filled[0][0].name) if isinstance(first, RawBatch) else None
        media = columns_of_media(features, raw)
        columns = ColumnMap(raw, first_samples, key=options.key, **media, label=label)
        return cls(
            url=url,
            schema=columns.schema,
            classes=classes or partitions.classes,
            parts=parts,
            columns=columns,
            ignored=ignored + Counter({EMPTY: len(files) - len(filled)}),
            partitions=partitions,
        )

    def read_raw(self, part: SourcePart) -> Iterator[RawBatch | BadSample]:
        """Yield the samples of one part with raw columns."""
        for raw in read_parquet(FileReader(self.url), part):
            if isinstance(raw, BadSample):
                yield raw
            else:
                yield RawBatch(self.partitions.add(raw.batch, part.where["name"]), raw.keys)

    def read_column(self, part: SourcePart, name: str) -> Iterator[pa.Array]:
        """Yield the values of one raw column; the others are not read."""
        return read_parquet_column(FileReader(self.url), part, name)


class RowGroup(NamedTuple):
    """Number of rows of a row group, and their approximate size after decompression, according to the footer."""

    num_samples: int
    decoded_bytes: int


@dataclass(frozen=True)
class Footer:
    """Raw columns of a Parquet file, and its row groups in the order of the file."""

    schema: pa.Schema
    row_groups: tuple[RowGroup, ...]

    @property
    def num_samples(self) -> int:
        """Number of rows over all row groups."""
        return sum(group.num_samples for group in self.row_groups)


def read_footer(reader: FileReader, file: SourceFile) -> Footer:
    """Read the footer of a Parquet file. Raise ConfigError if it is not a Parquet file, or truncated."""
    try:
        with (
            reader.open_seekable(file.path) as opened,
            pq.ParquetFile(opened, pre_buffer=False, coerce_int96_timestamp_unit=_INT96_UNIT) as parquet,
        ):
            metadata = parquet.metadata
            _check_cells(opened, file, metadata.serialized_size)
            groups = tuple(_row_group(metadata.row_group(number)) for number in range(metadata.num_row_groups))
            return Footer(checked_names(parquet.schema_arrow), groups)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        check_head(file.name, reader.read_range(file.path, 0, HEAD_BYTES))
        raise ConfigError(
            f"{file.name} is not a readable Parquet file: {reason_of(error)}; repair it, or remove it from the source"
        ) from error


def _check_cells(opened: pa.NativeFile, file: SourceFile, footer_bytes: int) -> None:
    """Raise ConfigError if the file is small and its cells are not, see `largest_cells`."""
    if file.size_bytes > _MAX_CHECKED_BYTES:
        return
    opened.seek(file.size_bytes - _TAIL_BYTES - footer_bytes)
    cell_bytes = largest_cells(opened.read(footer_bytes), file.size_bytes)
    if cell_bytes is not None:
        raise ConfigError(
            f"{file.name} has {format_size(file.size_bytes)}, and cells of {format_size(cell_bytes)} in one row "
            "group, which would fill the memory: it is hostile, or its values repeat. Write smaller cells, or row "
            "groups of fewer rows"
        )


def plan_parts(file: SourceFile, footer: Footer, split: str) -> list[SourcePart]:
    """Divide a file at row group boundaries into parts; small row groups share a part of up to `PART_BYTES`."""
    runs: list[list[int]] = []  # consecutive row groups, by part
    free_bytes = 0
    for number, group in enumerate(footer.row_groups):
        if not runs or group.decoded_bytes > free_bytes:
            runs.append([])
            free_bytes = PART_BYTES
        runs[-1].append(number)
        free_bytes -= group.decoded_bytes
    # The size of a part is its share of the file, in proportion to the decoded bytes.
    total_bytes = sum(group.decoded_bytes for group in footer.row_groups)
    parts, row = [], 0
    for run in runs:
        groups = [footer.row_groups[number] for number in run]
        num_samples = sum(group.num_samples for group in groups)
        where = {"path": file.path, "name": file.name, "row_groups": [run[0], run[-1] + 1], "row": row}
        decoded_bytes = sum(group.decoded_bytes for group in groups)
        size_bytes = file.size_bytes * decoded_bytes // max(1, total_bytes)
        name = file.name if len(runs) == 1 else f"{file.name}#{row}"
        # A part without samples would have nothing to read.
        if num_samples:
            parts.append(SourcePart(split, name, size_bytes, num_samples, file.stamp, where))
        row += num_samples
    return parts


def read_parquet(
    reader: FileReader, part: SourcePart, names: Sequence[str] | None = None
) -> Iterator[RawBatch | BadSample]:
    """Yield the raw samples of a part with the columns `names`; None: all. For errors, see `StreamedSource.read`."""
    name, row = part.where["name"], part.where["row"]
    stop = row + (part.num_samples or 0)
    try:
        for batch in _batches(reader, part, names):
            # Rows beyond the count in the footer are dropped, because the keys of the next part start at `stop`.
            within_count = batch.slice(0, max(stop - row, 0))
            if within_count.num_rows:
                yield RawBatch(within_count, row_keys(name, row, within_count.num_rows))
            row += batch.num_rows
        reason = "" if row == stop else f"the row counts in its footer are wrong: its row groups end at row {row}"
    except (pa.ArrowException, OSError) as error:
        reason = f"its rows {row} to {stop - 1} cannot be read: {reason_of(error)}"
    if reason:
        yield BadSample(part.split, f"{name}#{row}", reason)


def read_parquet_column(reader: FileReader, part: SourcePart, name: str) -> Iterator[pa.Array]:
    """Yield the values of one column of a part, piece by piece; the others are not read."""
    for raw in read_parquet(reader, part, [name]):
        if isinstance(raw, RawBatch):
            yield raw.batch.column(name)


def _batches(reader: FileReader, part: SourcePart, names: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part in batches of about `BATCH_BYTES` after decompression."""
    group_numbers = list(range(*part.where["row_groups"]))
    with reader.open_seekable(part.where["path"]) as opened:
        metadata = pq.read_metadata(opened)
        if group_numbers[-1] >= metadata.num_row_groups:
            raise ConfigError(f"{part.name} has changed since it was listed; list the source again")
        groups = [_row_group(metadata.row_group(number)) for number in group_numbers]
        sample_bytes = sum(group.decoded_bytes for group in groups) / max(1, part.num_samples or 0)
        # A footer may count repeated values once, so decoded samples may be larger: measure a few of them.
        num_probed = min(_PROBED_SAMPLES, batch_samples(sample_bytes))
        read = {"row_groups": group_numbers, "columns": names, "use_threads": False}
        probe = next(_open(opened, metadata).iter_batches(num_probed, **read))
        sample_bytes = max(sample_bytes, probe.nbytes / max(1, probe.num_rows))
        del probe  # frees its memory before the part is read
        yield from _open(opened, metadata).iter_batches(batch_samples(sample_bytes), **read)


def _open(opened: pa.NativeFile, metadata: Any) -> pq.ParquetFile:
    # Without a buffer size, Arrow reads whole column chunks at once.
    return pq.ParquetFile(
        opened,
        metadata=metadata,
        buffer_size=_BUFFER_BYTES,
        pre_buffer=False,
        page_checksum_verification=True,
        coerce_int96_timestamp_unit=_INT96_UNIT,
    )


def _row_group(metadata: Any) -> RowGroup:
    # The metadata of single columns is not read: pyarrow aborts the process if it is damaged.
    return RowGroup(metadata.num_rows, max(metadata.total_byte_size, 0))


def partition_of(name: str) -> dict[str, str | None]:
    """Return the value by column from the folder names in a path: {"label": "cat"} for "label=cat/0.parquet"."""
    pairs = [folder.partition("=") for folder in name.split("/")[:-1] if "=" in folder]
    return {unquote(column): None if value == _NULL else unquote(value) for column, _, value in pairs if column}


class Partitions:
    """The partition columns of the files `names`. They hold text, except a label column, which holds class indices.

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

    def to_json(self) -> dict[str, Any]:
        """Return the columns as JSON values, from which `of_json` makes equal ones."""
        label, schema = self._label_column, schema_to_text(self.schema)
        return {"schema": schema, "label": label, "classes": list(self.classes)}

    @classmethod
    def of_json(cls, described: Mapping[str, Any]) -> Partitions:
        """Return the columns that `to_json` described. Raise KeyError or TypeError: it has not."""
        made = cls([])
        made._label_column, made.classes = described["label"], tuple(described["classes"])
        made.schema = schema_of_text(described["schema"])
        return made

    def add(self, batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
        """Return `batch` of the file `name` with its partition columns appended."""
        for column_field, (column, text) in zip(self.schema, partition_of(name).items(), strict=True):
            value = self.classes.index(text) if column == self._label_column and text is not None else text
            batch = batch.append_column(column_field, pa.array([value] * batch.num_rows, column_field.type))
        return batch
