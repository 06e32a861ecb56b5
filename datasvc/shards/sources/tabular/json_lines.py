"""JSON lines: one object a line. Types come from the first lines of each split and hold from there on.

A line that does not parse, or does not fit these types, is a bad sample of its own. Strings stay strings, also where
they look like dates.
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
from datasvc.shards.sources.common.columns import ColumnMap
from datasvc.shards.sources.common.files import FileReader, SourceFile
from datasvc.shards.sources.common.line_blocks import LINE_BYTES, LineBlock, read_line_blocks
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, SourcePart
from datasvc.shards.sources.common.tables import (
    UNREADABLE,
    RawBatch,
    TableSource,
    all_empty,
    is_compressed,
    list_tables,
    numbered_keys,
    reason_of,
    table_split,
)
from datasvc.shards.sources.tabular.json_types import infer_json_types, join_json_schemas, parse_json

EXTENSIONS: Final = frozenset({".jsonl", ".ndjson", ".json"})
RANGE_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class JsonLines(TableSource):
    """Listed JSON lines. A sample's key is `FILE#BYTE_OFFSET`, `FILE#LINE` of a compressed file.

    Attributes:
        raw: columns of the objects, as they are parsed.
    """

    kind: ClassVar[str] = "json-lines"

    raw: pa.Schema

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> JsonLines:
        """List the source: the first lines of each split are read.

        Raises:
            NotFoundError: nothing is there, or no samples are.
            ConfigError: a file holds an array, no first line is an object, or a column has several types; and as
                `ColumnMap`.
            UnavailableError: the store does not answer.
        """
        options = options or SourceOptions()
        files, ignored = list_tables(url, EXTENSIONS, compressed=True)
        reader = FileReader(url)
        splits: dict[str, list[SourceFile]] = {}
        for file in files:
            splits.setdefault(table_split(file, options), []).append(file)
        found = [_infer(reader, of_split) for of_split in splits.values()]
        schemas = [each for each in found if each is not None]
        if not schemas:
            raise all_empty(url, files)
        joined = join_json_schemas(schemas)
        raw = pa.schema([field.with_type(sample_type(field.type)) for field in joined])
        columns = ColumnMap(raw, key=options.key)
        parts = [part for file in files for part in _plan_parts(file, table_split(file, options))]
        return cls(url, columns.schema, (), parts, columns, ignored, raw)

    def read_raw(self, part: SourcePart) -> Iterator[RawBatch | BadSample]:
        """Yield the samples of one part with raw columns."""
        reader, where = FileReader(self.url), part.where
        place = None
        try:
            with reader.open(where["path"], start=max(where["start"] - 1, 0)) as stream:
                for block in read_line_blocks(stream, start=where["start"], stop=where["stop"]):
                    place = block
                    yield from self._parse_block(part, block)
        except UNREADABLE as error:
            number = 0 if place is None else _number(part, place)
            yield BadSample(
                part.split, f"{where['name']}#{number}", f"the file cannot be read to its end: {reason_of(error)}"
            )

    def _parse_block(self, part: SourcePart, block: LineBlock) -> Iterator[RawBatch | BadSample]:
        name = part.where["name"]
        if block.content is None:
            key = f"{name}#{_number(part, block)}"
            yield BadSample(part.split, key, f"the line is longer than {LINE_BYTES >> 20} MiB")
            return
        lines = block.content.split(b"\n")
        filled = [index for index, line in enumerate(lines) if line and not line.isspace()]
        if not filled:
            return
        numbers = _numbers(part, block, lines)[filled]
        batch = parse_json(block.content, self.raw, num_lines=len(filled))
        if isinstance(batch, pa.RecordBatch):
            yield RawBatch(batch, numbered_keys(name, numbers))
        else:
            yield from self._parse_lines(part, [lines[index] for index in filled], numbers)

    def _parse_lines(self, part: SourcePart, lines: Sequence[bytes], numbers: Any) -> Iterator[RawBatch | BadSample]:
        """Find the lines that do not parse by halving."""
        name = part.where["name"]
        batch = parse_json(b"\n".join(lines), self.raw, num_lines=len(lines))
        if isinstance(batch, pa.RecordBatch):
            yield RawBatch(batch, numbered_keys(name, numbers))
        elif len(lines) == 1:
            yield BadSample(part.split, f"{name}#{numbers[0]}", self._reason(lines[0], batch))
        else:
            middle = len(lines) // 2
            yield from self._parse_lines(part, lines[:middle], numbers[:middle])
            yield from self._parse_lines(part, lines[middle:], numbers[middle:])

    def _reason(self, line: bytes, found: str) -> str:
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            return f"the line is no JSON object: {found}"
        if not isinstance(parsed, dict):
            return "the line is no JSON object"
        unknown = sorted(parsed.keys() - set(self.raw.names))
        if unknown:
            return f"has unknown columns {unknown[:10]}, which the first lines do not have"
        return f"does not fit the columns of the first lines: {found}"


def _plan_parts(file: SourceFile, split: str) -> list[SourcePart]:
    compressed = is_compressed(file)
    length = file.size_bytes if compressed else RANGE_BYTES
    parts = []
    for start in range(0, file.size_bytes, length):
        stop = start + length
        where = {
            "path": file.path,
            "name": file.name,
            "start": start,
            "stop": stop if stop < file.size_bytes else None,
            "lines": compressed,
        }
        size_bytes = min(length, file.size_bytes - start)
        name = file.name if size_bytes == file.size_bytes else f"{file.name}#{start}"
        parts.append(SourcePart(split, name, size_bytes, stamp=file.stamp, where=where))
    return parts


def _number(part: SourcePart, block: LineBlock) -> int:
    return block.line if part.where["lines"] else block.offset


def _numbers(part: SourcePart, block: LineBlock, lines: Sequence[bytes]) -> Any:
    """Return where each line is, for its key: line number or offset, `int64[lines]`."""
    if part.where["lines"]:
        return block.line + np.arange(len(lines))
    lengths = np.fromiter(map(len, lines), np.int64, len(lines)) + 1
    return block.offset + np.cumsum(lengths) - lengths


def _infer(reader: FileReader, files: Sequence[SourceFile]) -> tuple[str, pa.Schema] | None:
    """Return the name and the columns of the first file that holds a line; None where none does."""
    found = None
    for number, file in enumerate(files):
        if found is not None and file.extension != ".json":
            continue
        try:
            with reader.open(file.path) as stream:
                block = _first_block(stream)
        except UNREADABLE as error:
            if number + 1 < len(files):
                continue  # reading it will say so
            raise ConfigError(f"cannot read {file.name}: {reason_of(error)}") from error
        if block is None:
            continue
        if block.content is not None and block.content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            raise ConfigError(
                f"{file.name} holds one array, not one object a line; write it so, for instance with "
                "`jq -c '.[]' IN.json > OUT.jsonl`"
            )
        if found is None:
            found = file.name, infer_json_types(block.content or b"", file.name)
    return found


def _first_block(stream: BinaryIO) -> LineBlock | None:
    blocks = read_line_blocks(stream)
    return next((block for block in blocks if block.content is None or not block.content.isspace()), None)
