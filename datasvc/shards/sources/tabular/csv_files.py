"""Source of CSV and TSV files with a header line.

The types come from the first block of the first file that has a row, and hold for all files. Arrow reads all values
as bytes, and this module converts them, because Arrow's own conversion stops at the first bad value of a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.sources.common.column_types import check_same_names, check_unique
from datasvc.shards.sources.common.columns import ColumnMap, bisect_errors
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, SourcePart, file_part
from datasvc.shards.sources.common.tables import (
    UNREADABLE,
    RawBatch,
    TableSource,
    list_tables,
    map_files,
    no_samples_error,
    numbered_keys,
    reason_of,
)
from datasvc.shards.sources.tabular.csv_rows import (
    BLOCKS_BYTES,
    CsvRows,
    Skipped,
    convert_values,
    header_of,
    is_too_long,
    open_csv,
    quoted_columns,
    read_rows,
    value_type,
)

EXTENSIONS: Final = frozenset({".csv", ".tsv"})
_HEADER_BYTES: Final = 1 << 18  # the header must end within these first bytes of a file
# A single column whose name has one of these is that of a file with this delimiter.
_DELIMITERS: Final = (";", "\t", "|", ",")


@dataclass(frozen=True, kw_only=True)
class CsvSource(TableSource):
    """A source of CSV files. Without a key column, the key of a sample is `FILE#ROW`; row 0 follows the header.

    Attributes:
        raw: names and types of the columns in the files, which `ColumnMap` maps to those of samples.
    """

    kind: ClassVar[str] = "csv"

    raw: pa.Schema

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None, *, texts: Sequence[str] = ()) -> CsvSource:
        """List the source: read every header, and the first block of each file until one has a row.

        Columns named in `texts` hold text even if all their values look like numbers. For errors, see
        `FileSource.list`.
        """
        options = options or SourceOptions()
        files, ignored = list_tables(url, EXTENSIONS, compressed=True)
        reader = FileReader(url)
        headers = map_files(reader, files, lambda file: _read_header(reader, file))
        # A file without a header line has no samples and no columns.
        filled = [(file, header) for file, header in zip(files, headers, strict=True) if header]
        if filled:
            first_file, first_header = filled[0]
            for file, header in filled[1:]:
                check_same_names(first_file.name, first_header, file.name, header)
        # Keys are text: as numbers they would lose leading zeros.
        texts = [*texts, *options.as_text, options.key or "key"]
        raw = _infer_schema(reader, [file for file, _ in filled], texts)
        if raw is None:
            raise no_samples_error(url, files)
        columns = ColumnMap(raw, key=options.key)
        parts = [
            file_part(file, options, name=file.name, delimiter=_delimiter(file), header=[*header])
            for file, header in filled
        ]
        return cls(url=url, schema=columns.schema, parts=parts, columns=columns, ignored=ignored, raw=raw)

    def read_raw(self, part: SourcePart) -> Iterator[RawBatch | BadSample]:
        """Yield the samples of one part with raw columns."""
        reader, where = FileReader(self.url), part.where
        row = 0  # number of the next row
        try:
            for rows in read_rows(lambda: reader.open(where["path"]), where["header"], where["delimiter"]):
                yield from self._convert_rows(part, rows)
                row = rows.stop
        except UNREADABLE as error:
            reason = f"the file cannot be read from row {row + 2} on (the header is row 1): {reason_of(error)}"
            yield BadSample(part.split, f"{where['name']}#{row}", reason)

    def _convert_rows(self, part: SourcePart, rows: CsvRows) -> Iterator[RawBatch | BadSample]:
        """Yield the bad rows, and then the other rows as one batch with the types of the source."""
        name, reasons = part.where["name"], dict(rows.bad)
        batch = rows.batch.rename_columns(_column_names(part.where["header"]))
        columns = []
        for field in self.raw:
            column, misfits = _convert_column(batch.column(field.name), field.type)
            columns.append(column)
            for index, reason in misfits:
                # A row with several bad values is one bad sample: the first reason is kept.
                reasons.setdefault(int(rows.numbers[index]), f"column {field.name!r}: {reason}")
        for number in sorted(reasons):
            # Rows, not lines: a quoted value may contain line breaks, and Arrow does not count empty lines.
            reason = f"row {number + 2} (the header is row 1): {reasons[number]}"
            yield BadSample(part.split, f"{name}#{number}", reason)
        batch = pa.RecordBatch.from_arrays(columns, schema=self.raw)
        good = ~np.isin(rows.numbers, list(reasons))
        if good.all():
            yield RawBatch(batch, numbered_keys(name, rows.numbers))
        elif good.any():
            yield RawBatch(batch.filter(pa.array(good)), numbered_keys(name, rows.numbers[good]))


def _convert_column(values: pa.Array, data_type: pa.DataType) -> tuple[pa.Array, list[tuple[int, str]]]:
    """Return a column as `data_type`, with null for values that do not convert, and their indices and errors."""
    pieces, misfits = [], []

    def convert(start: int, stop: int) -> pa.Array:
        return convert_values(values[start:stop], data_type)

    for index, piece in bisect_errors(len(values), convert, (pa.ArrowException, UnicodeDecodeError)):
        if isinstance(piece, Exception):
            misfits.append((index, f"{values[index].as_py()!r:.100} is not a valid {data_type}: {piece}"))
            pieces.append(pa.nulls(1, data_type))
        else:
            pieces.append(piece)
    # If all values convert, there is one piece, which needs no copy.
    if len(pieces) == 1:
        return pieces[0], misfits
    # The empty array gives the type of the result if there are no pieces.
    return pa.concat_arrays([pa.nulls(0, data_type), *pieces]), misfits


def _delimiter(file: SourceFile) -> str:
    return "\t" if file.extension == ".tsv" else ","


def _read_header(reader: FileReader, file: SourceFile) -> Sequence[str] | None:
    """Return the names in the header; None without one. Raise ConfigError if it cannot be read or repeats a name."""
    # Only the start of the file is requested. A compressed file has no limit: the size of its start is unknown.
    stop = None if file.is_compressed else min(file.size_bytes, _HEADER_BYTES)
    try:
        with reader.open(file.path, stop=stop) as stream:
            header = header_of(stream.read(_HEADER_BYTES), _delimiter(file))
    except ConfigError as error:  # of `header_of`, which does not have the name of the file
        raise ConfigError(f"{file.name} {error}") from error
    except UNREADABLE as error:
        raise ConfigError(
            f"{file.name} is not a readable CSV file: {reason_of(error)}; repair it, or remove it from the source"
        ) from error
    if header is not None:
        check_unique(_column_names(header), file.name)
        others = [other for other in _DELIMITERS if other in header[0] and other != _delimiter(file)]
        if others and len(header) == 1:
            raise ConfigError(
                f"{file.name} has one column, {header[0]!r}: its values seem to be separated by {others[0]!r}, not "
                f"by {_delimiter(file)!r}; write it with this delimiter (.tsv for tabs), or rename the column"
            )
    return header


def _column_names(header: Sequence[str]) -> list[str]:
    """Return a name for each column; an empty name, as pandas writes for its index, becomes `column_N`."""
    return [name or f"column_{number}" for number, name in enumerate(header)]


def _infer_schema(reader: FileReader, files: Sequence[SourceFile], texts: Sequence[str]) -> pa.Schema | None:
    """Return the schema of the first file that has a row; None if no file has one. Columns in `texts` are text."""
    for file in files:
        try:
            inferred = _infer_from_first_block(reader, file)
            if inferred is None:
                continue
            schema, block_bytes = inferred
            # The same rows as bytes: the text of a number may say more than the number.
            values = _first_block(reader, file, block_bytes, dict.fromkeys(schema.names, pa.binary()), [])
            with reader.open(file.path) as stream:
                quoted = quoted_columns(stream.read(block_bytes), _delimiter(file))
        except UNREADABLE as error:
            raise ConfigError(f"cannot read {file.name}: {reason_of(error)}") from error
        assert values is not None, "this block gave the schema"
        return pa.schema(
            (
                name,
                pa.string()
                if name in texts
                else value_type(field.type, values.column(number), is_quoted=number in quoted),
            )
            for number, (name, field) in enumerate(zip(_column_names(schema.names), schema, strict=True))
        )
    return None


def _infer_from_first_block(reader: FileReader, file: SourceFile) -> tuple[pa.Schema, int] | None:
    """Return the schema that Arrow infers from the first block of a file, and the size of this block in bytes.

    Return None if the file has no row. Raise ConfigError if Arrow skips all rows of the block.
    """
    for block_bytes in BLOCKS_BYTES:
        skipped: Skipped = []
        try:
            block = _first_block(reader, file, block_bytes, None, skipped)
        except pa.ArrowInvalid as error:
            # If a row is longer than the block, the next larger block is tried.
            if not is_too_long(error) or block_bytes == BLOCKS_BYTES[-1]:
                raise
            continue
        if block is not None:
            return block.schema, block_bytes
        break  # the block was long enough, but has no row
    if skipped:
        raise ConfigError(f"no line at the start of {file.name} has the columns of its header: {skipped[0][1]}")
    return None


def _first_block(
    reader: FileReader, file: SourceFile, block_bytes: int, types: dict[str, pa.DataType] | None, skipped: Skipped
) -> pa.RecordBatch | None:
    """Return the rows of the first block; None if it has none. For the arguments and errors, see `open_csv`."""
    with reader.open(file.path) as stream:
        blocks = open_csv(stream, _delimiter(file), block_bytes=block_bytes, types=types, skipped=skipped)
        block = None if blocks is None else next(iter(blocks), None)
        return block if block is not None and block.num_rows else None
