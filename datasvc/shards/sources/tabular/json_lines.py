"""Source of JSON lines: one object per line.

The types come from the first lines of each split and hold for all lines. A line that does not parse or does not fit
the types is a bad sample. Strings stay strings, even if they look like dates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.sources.common.column_types import sample_type
from datasvc.shards.sources.common.columns import ColumnMap, bisect_errors
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile
from datasvc.shards.sources.common.options import SourceOptions, split_of_file
from datasvc.shards.sources.common.source import BadSample, SourcePart
from datasvc.shards.sources.common.streams import LINE_BYTES, LineBlock, read_line_blocks
from datasvc.shards.sources.common.tables import (
    UNREADABLE,
    RawBatch,
    TableSource,
    list_tables,
    no_samples_error,
    numbered_keys,
    reason_of,
)
from datasvc.shards.sources.tabular.json_types import infer_json_types, join_json_schemas, parse_json

EXTENSIONS: Final = frozenset({".jsonl", ".ndjson", ".json"})
RANGE_BYTES: Final = 64 << 20  # size of the parts of a file


@dataclass(frozen=True, kw_only=True)
class JsonLinesSource(TableSource):
    """A source of JSON lines.

    Without a key column, the key of a sample is `FILE#BYTE_OFFSET`, or `FILE#LINE` in a compressed file.

    Attributes:
        raw: columns that the objects are parsed to: all columns of the first lines, with their types.
    """

    kind: ClassVar[str] = "json-lines"

    raw: pa.Schema

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> JsonLinesSource:
        """List the source from the first lines of each split. For errors, see `FileSource.list`."""
        options = options or SourceOptions()
        files, ignored = list_tables(url, EXTENSIONS, compressed=True)
        reader = FileReader(url)
        splits: dict[str, list[SourceFile]] = {}
        for file in files:
            splits.setdefault(split_of_file(file.name, options), []).append(file)
        inferred = [_infer_schema(reader, split_files) for split_files in splits.values()]
        schemas = [name_and_schema for name_and_schema in inferred if name_and_schema is not None]
        if not schemas:
            raise no_samples_error(url, files)
        joined = join_json_schemas(schemas)
        # A column that is null in all first lines becomes text.
        raw = pa.schema([field.with_type(sample_type(field.type)) for field in joined])
        columns = ColumnMap(raw, key=options.key)
        parts = [part for file in files for part in _plan_parts(file, split_of_file(file.name, options))]
        return cls(url=url, schema=columns.schema, parts=parts, columns=columns, ignored=ignored, raw=raw)

    def read_raw(self, part: SourcePart) -> Iterator[RawBatch | BadSample]:
        """Yield the samples of one part with raw columns."""
        reader, where = FileReader(self.url), part.where
        last_block = None
        try:
            # Open the file one byte before the range: if this byte is a newline, a line starts with the range.
            with reader.open(where["path"], start=max(where["start"] - 1, 0)) as stream:
                for block in read_line_blocks(stream, start=where["start"], stop=where["stop"]):
                    last_block = block
                    yield from self._parse_block(part, block)
        except UNREADABLE as error:
            # It is unknown which line cannot be read, so use the key of the last block that was read.
            position = 0 if last_block is None else _block_position(part, last_block)
            yield BadSample(
                part.split, f"{where['name']}#{position}", f"the file cannot be read to its end: {reason_of(error)}"
            )

    def _parse_block(self, part: SourcePart, block: LineBlock) -> Iterator[RawBatch | BadSample]:
        """Yield the lines of a block as raw batches, and a `BadSample` for each line that does not parse."""
        name = part.where["name"]
        if block.content is None:
            key = f"{name}#{_block_position(part, block)}"
            yield BadSample(part.split, key, f"the line is longer than {LINE_BYTES >> 20} MiB")
            return
        lines = block.content.split(b"\n")
        filled = [index for index, line in enumerate(lines) if line and not line.isspace()]
        if not filled:
            return
        positions = _line_positions(part, block, lines)[filled]
        filled_lines = [lines[index] for index in filled]

        def place(index: int) -> str:
            return "the line" if part.where["lines"] else f"the line at byte {positions[index]}"

        def parse(start: int, stop: int) -> pa.RecordBatch:
            return parse_json(b"\n".join(filled_lines[start:stop]), self.raw, num_lines=stop - start)

        for index, batch in bisect_errors(len(filled), parse, (ValueError,)):
            if isinstance(batch, Exception):
                yield BadSample(
                    part.split, f"{name}#{positions[index]}", self._reason(filled_lines[index], batch, place(index))
                )
            else:
                yield RawBatch(batch, numbered_keys(name, positions[index : index + batch.num_rows]))

    def _reason(self, line: bytes, error: Exception, place: str) -> str:
        """Return why a line is a bad sample; `error` is the error of parsing the line, `place` says where it is."""
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            return f"{place} is not a JSON object: {error}"
        if not isinstance(parsed, dict):
            return f"{place} is not a JSON object"
        unknown = sorted(parsed.keys() - set(self.raw.names))
        if unknown:
            return f"{place} has unknown columns {unknown[:10]}, which the first lines do not have"
        return f"{place} does not fit the columns of the first lines: {error}"


def _plan_parts(file: SourceFile, split: str) -> list[SourcePart]:
    """Divide a file into byte ranges of `RANGE_BYTES`; a line belongs to the range that contains its first byte."""
    # A compressed file cannot be read from the middle: it is one part.
    length = file.size_bytes if file.is_compressed else RANGE_BYTES
    parts = []
    for start in range(0, file.size_bytes, length):
        stop = start + length
        where = {
            "path": file.path,
            "name": file.name,
            "start": start,
            "stop": stop if stop < file.size_bytes else None,
            "lines": file.is_compressed,  # whether keys hold line numbers, not byte offsets
        }
        size_bytes = min(length, file.size_bytes - start)
        name = file.name if size_bytes == file.size_bytes else f"{file.name}#{start}"
        parts.append(SourcePart(split, name, size_bytes, stamp=file.stamp, where=where))
    return parts


def _block_position(part: SourcePart, block: LineBlock) -> int:
    """Return the position of a block's first line; see `_line_positions`."""
    return block.line if part.where["lines"] else block.offset


def _line_positions(part: SourcePart, block: LineBlock, lines: Sequence[bytes]) -> Any:
    """Return the position of each line for its key: line number or byte offset, `int64[lines]`."""
    if part.where["lines"]:
        return block.line + np.arange(len(lines))
    lengths = np.fromiter(map(len, lines), np.int64, len(lines)) + 1
    return block.offset + np.cumsum(lengths) - lengths


def _infer_schema(reader: FileReader, files: Sequence[SourceFile]) -> tuple[str, pa.Schema] | None:
    """Return the name and the columns of the first readable file that holds a line; None if all are empty."""
    first = None
    for number, file in enumerate(files):
        # Every .json file is checked, because it may hold an array. Other files are read only until a line is found.
        if first is not None and file.extension != ".json":
            continue
        try:
            with reader.open(file.path) as stream:
                block = _first_block(stream)
        except UNREADABLE as error:
            if first is not None or number + 1 < len(files):
                continue  # another file gives the columns, and the ingest reports this file
            raise ConfigError(f"cannot read {file.name}: {reason_of(error)}") from error
        if block is None:
            continue
        if block.content is not None and block.content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            raise ConfigError(
                f"{file.name} holds one array; expected one object per line; convert it, for instance with "
                "`jq -c '.[]' IN.json > OUT.jsonl`"
            )
        if first is None:
            first = file.name, infer_json_types(block.content or b"", file.name)
    return first


def _first_block(stream: BinaryIO) -> LineBlock | None:
    """Return the first block that is not blank: lines, or one line that is too long; None if there is none."""
    blocks = read_line_blocks(stream)
    return next((block for block in blocks if block.content is None or not block.content.isspace()), None)
