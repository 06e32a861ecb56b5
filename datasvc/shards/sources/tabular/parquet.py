"""Parquet files: runs of row groups, decoded in small batches whatever the size of a row group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.parquet as pq

from datasvc.errors import ConfigError
from datasvc.shards.sources.common.column_types import checked_names, join_schemas
from datasvc.shards.sources.common.columns import ColumnMap
from datasvc.shards.sources.common.files import FileReader, SourceFile
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.seekable import open_seekable
from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES, BadSample, SourcePart
from datasvc.shards.sources.common.tables import (
    EMPTY,
    RawBatch,
    TableSource,
    all_empty,
    list_tables,
    look_at,
    reason_of,
    row_keys,
    table_split,
)
from datasvc.shards.sources.tabular.features import features_of_files, image_columns, label_column
from datasvc.shards.sources.tabular.partitions import Partitions

EXTENSIONS: Final = frozenset({".parquet", ".pq"})
PART_BYTES: Final = 16 << 20
# Each column of an open part is read through a buffer of its own; pages that are larger pass it by.
_BUFFER_BYTES: Final = 64 << 10
_PROBED_SAMPLES: Final = 32


@dataclass(frozen=True)
class ParquetSource(TableSource):
    """Listed Parquet files. A sample's key is `FILE#ROW` where no column holds keys.

    Attributes:
        partitions: columns that stand in folder names.
    """

    kind: ClassVar[str] = "parquet"

    partitions: Partitions = field(default_factory=lambda: Partitions([]))

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> ParquetSource:
        """List the source: every file's footer is read.

        Raises:
            NotFoundError: nothing is there, or no samples are.
            ConfigError: a file is no Parquet file, or files differ in their columns; and as `ColumnMap`.
            UnavailableError: the store does not answer.
        """
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
        """Return a source of listed files; `features`: what Hugging Face says of them, if known. Raises as `list`."""
        reader = FileReader(url)
        footers = look_at(reader, files, lambda file: read_footer(reader, file))
        filled = [(file, footer) for file, footer in zip(files, footers, strict=True) if footer.num_samples]
        if not filled:
            raise all_empty(url, files)
        schemas = [(file.name, footer.schema) for file, footer in filled]
        raw = join_schemas(schemas)
        partitions = Partitions([file.name for file, _ in filled])
        partitions.check_new(raw)
        raw = pa.schema([*raw, *partitions.schema], metadata=raw.metadata)
        features = features or features_of_files(schemas)
        label, classes = label_column(features, raw)
        parts = [part for file, footer in filled for part in plan_parts(file, footer, table_split(file, options))]
        first = next(read_parquet(reader, parts[0]))
        # Where it is not to be read, reading it will report what is wrong.
        seen = partitions.add(first.batch, filled[0][0].name) if isinstance(first, RawBatch) else None
        columns = ColumnMap(raw, seen, key=options.key, images=image_columns(features, raw), label=label)
        left_out = ignored + Counter({EMPTY: len(files) - len(filled)})
        return cls(url, columns.schema, classes or partitions.classes, parts, columns, left_out, partitions)

    def read_raw(self, part: SourcePart) -> Iterator[RawBatch | BadSample]:
        """Yield the samples of one part with raw columns."""
        for raw in read_parquet(FileReader(self.url), part):
            if isinstance(raw, BadSample):
                yield raw
            else:
                yield RawBatch(self.partitions.add(raw.batch, part.where["name"]), raw.keys)


@dataclass(frozen=True)
class RowGroup:
    """What a footer says of a row group.

    Attributes:
        num_samples: rows.
        decoded_bytes: about how much it is once decompressed.
    """

    num_samples: int
    decoded_bytes: int


@dataclass(frozen=True)
class Footer:
    """What is to be known of a Parquet file.

    Attributes:
        schema: raw columns.
        row_groups: in the file's order.
    """

    schema: pa.Schema
    row_groups: tuple[RowGroup, ...]

    @property
    def num_samples(self) -> int:
        """Rows over all row groups."""
        return sum(group.num_samples for group in self.row_groups)


def read_footer(reader: FileReader, file: SourceFile) -> Footer:
    """Return a Parquet file's columns and row groups.

    Raises:
        ConfigError: it is no Parquet file, or cut off.
        NotFoundError, UnavailableError: see `storage.translated`.
    """
    try:
        with open_seekable(reader, file.path) as opened, pq.ParquetFile(opened, pre_buffer=False) as parquet:
            metadata = parquet.metadata
            groups = tuple(_row_group(metadata.row_group(number)) for number in range(metadata.num_row_groups))
            return Footer(checked_names(parquet.schema_arrow), groups)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file.name} is no readable Parquet file: {reason_of(error)}; mend it, or leave it out of the source"
        ) from error


def plan_parts(file: SourceFile, footer: Footer, split: str) -> list[SourcePart]:
    """Cut a file between row groups into parts; small row groups are joined up to `PART_BYTES`."""
    runs: list[list[int]] = []
    room = 0
    for number, group in enumerate(footer.row_groups):
        if not runs or group.decoded_bytes > room:
            runs.append([])
            room = PART_BYTES
        runs[-1].append(number)
        room -= group.decoded_bytes
    total_bytes = sum(group.decoded_bytes for group in footer.row_groups)
    parts, row = [], 0
    for run in runs:
        groups = [footer.row_groups[number] for number in run]
        num_samples = sum(group.num_samples for group in groups)
        where = {"path": file.path, "name": file.name, "row_groups": [run[0], run[-1] + 1], "row": row}
        decoded_bytes = sum(group.decoded_bytes for group in groups)
        size_bytes = file.size_bytes * decoded_bytes // max(1, total_bytes)
        name = file.name if len(runs) == 1 else f"{file.name}#{row}"
        if num_samples:
            parts.append(SourcePart(split, name, size_bytes, num_samples, file.stamp, where))
        row += num_samples
    return parts


def read_parquet(reader: FileReader, part: SourcePart) -> Iterator[RawBatch | BadSample]:
    """Yield the raw samples of a part that `plan_parts` made.

    Raises:
        ConfigError: the file has other row groups than when it was listed.
        NotFoundError, UnavailableError: see `storage.translated`.
    """
    name, row = part.where["name"], part.where["row"]
    stop = row + (part.num_samples or 0)
    try:
        for batch in _batches(reader, part):
            counted = batch.slice(0, max(stop - row, 0))  # a wrong footer must not give two samples one key
            if counted.num_rows:
                yield RawBatch(counted, row_keys(name, row, counted.num_rows))
            row += batch.num_rows
        reason = "" if row == stop else f"its row groups hold other counts of rows than the footer says, at row {row}"
    except (pa.ArrowException, OSError) as error:
        reason = f"its rows {row} to {stop - 1} cannot be read: {reason_of(error)}"
    if reason:
        yield BadSample(part.split, f"{name}#{row}", reason)


def _batches(reader: FileReader, part: SourcePart) -> Iterator[pa.RecordBatch]:
    groups = list(range(*part.where["row_groups"]))
    with open_seekable(reader, part.where["path"]) as opened:
        metadata = pq.read_metadata(opened)
        if groups[-1] >= metadata.num_row_groups:
            raise ConfigError(f"{part.name} has changed since it was listed; list it again")
        listed = [_row_group(metadata.row_group(number)) for number in groups]
        sample_bytes = sum(group.decoded_bytes for group in listed) / max(1, part.num_samples or 0)
        # Footers count values that repeat once: look how large samples are when they are decoded.
        few = min(_PROBED_SAMPLES, _num_samples(sample_bytes))
        probe = next(_open(opened, metadata).iter_batches(few, groups, use_threads=False))
        sample_bytes = max(sample_bytes, probe.nbytes / max(1, probe.num_rows))
        del probe
        yield from _open(opened, metadata).iter_batches(_num_samples(sample_bytes), groups, use_threads=False)


def _num_samples(sample_bytes: float) -> int:
    """Return how many samples of this size a batch may hold."""
    return max(1, min(BATCH_SAMPLES, int(BATCH_BYTES / max(sample_bytes, 1))))


def _open(opened: pa.NativeFile, metadata: Any) -> pq.ParquetFile:
    # Without a buffer size, whole column chunks are read at once.
    return pq.ParquetFile(
        opened, metadata=metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
    )


def _row_group(metadata: Any) -> RowGroup:
    # What it says of single columns is not asked for: pyarrow ends the process where that is damaged.
    return RowGroup(metadata.num_rows, max(metadata.total_byte_size, 0))
