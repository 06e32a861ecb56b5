"""Read documents from text files, for `tokens`: a `.txt` is one document, a `.jsonl` has one document per line.

A piece is a file or a byte range of a file. A line belongs to the piece that contains its first byte, so adjacent
pieces yield each line exactly once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import BadSampleError, ConfigError
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile, extension_of
from datasvc.shards.sources.common.streams import DECOMPRESSION_ERRORS, LINE_BYTES, read_line_blocks, read_up_to

TEXT, LINES = ".txt", (".jsonl", ".ndjson")
# A tokenizer encodes a whole document in memory and needs some hundred bytes per token.
MAX_DOCUMENT_BYTES: Final = LINE_BYTES


@dataclass(frozen=True)
class DocumentRange:
    """A file, or the lines of it that start in a range; `stop` is None at the end of the file."""

    name: str
    path: str
    start: int = 0
    stop: int | None = None


def plan_pieces(files: Sequence[SourceFile], part_bytes: int) -> list[tuple[list[DocumentRange], int, str]]:
    """Divide and group files into parts of about `part_bytes`; return pieces, size and stamp of each part.

    Only uncompressed files of lines are divided; a compressed file and a `.txt` are read from their start.
    """
    groups: list[list[DocumentRange]] = []
    sizes: list[int] = []
    stamps: list[list[str]] = []
    for file in files:
        is_divisible = file.extension in LINES and not file.is_compressed
        # An empty file gives one piece too: the ingest reports an empty `.txt` as a document without tokens.
        num_bytes = max(file.size_bytes, 1)
        step = part_bytes if is_divisible else num_bytes
        for start in range(0, num_bytes, step):
            stop = min(start + step, file.size_bytes)
            # Small files share a part, so that padding and overhead per part stay small.
            if not groups or sizes[-1] + stop - start > part_bytes:
                groups.append([])
                sizes.append(0)
                stamps.append([])
            groups[-1].append(DocumentRange(file.name, file.path, start, stop if stop < file.size_bytes else None))
            sizes[-1] += stop - start
            stamps[-1].append(f"{file.size_bytes} {file.stamp}")
    return list(zip(groups, sizes, map("\n".join, stamps), strict=True))


def check_column(reader: FileReader, piece: DocumentRange, column: str) -> None:
    """Raise ConfigError if the first line is an object without `column`; `read_documents` finds other faults."""
    with map_exceptions("read", reader.location(piece.path)):
        _, line = next(_read_lines(reader, piece), ("", b""))
    try:
        values = json.loads(line) if isinstance(line, bytes) else None
    except (ValueError, RecursionError):
        return
    if isinstance(values, dict) and column not in values:
        raise ConfigError(f"{piece.name} has no column {column!r}; found {sorted(values)}")


def read_documents(
    reader: FileReader, piece: DocumentRange, column: str
) -> Iterator[tuple[str, str | BadSampleError]]:
    """Yield name and text of each document of a piece in order; for one that cannot be read, its name and the error.

    The name is FILE for a text file, and FILE@OFFSET for a line. JSON lines have their text in `column`. Raise
    NotFoundError if the file is missing, UnavailableError if the store fails.
    """
    with map_exceptions("read", reader.location(piece.path)):
        if extension_of(piece.name) == TEXT:
            yield _read_text(reader, piece)
            return
        for name, value in read_values(reader, piece, column):
            yield name, value if isinstance(value, BadSampleError) else _text_of(value, column)


def read_values(reader: FileReader, piece: DocumentRange, column: str) -> Iterator[tuple[str, Any]]:
    """Yield name and value in `column` of each line of a piece; if it cannot be read, its name and the error.

    For names and errors, see `read_documents`.
    """
    with map_exceptions("read", reader.location(piece.path)):
        for name, line in _read_lines(reader, piece):
            yield name, line if isinstance(line, BadSampleError) else _value_of(line, column)


def _read_text(reader: FileReader, piece: DocumentRange) -> tuple[str, str | BadSampleError]:
    try:
        with reader.open(piece.path) as stream:
            content = read_up_to(stream, MAX_DOCUMENT_BYTES + 1)
        if len(content) > MAX_DOCUMENT_BYTES:
            return piece.name, _too_large()
        return piece.name, content.decode()
    except DECOMPRESSION_ERRORS as error:
        return piece.name, BadSampleError(f"does not decompress: {error}")
    except UnicodeDecodeError as error:
        return piece.name, BadSampleError(f"is not UTF-8: {error}")


def _read_lines(reader: FileReader, piece: DocumentRange) -> Iterator[tuple[str, bytes | BadSampleError]]:
    """Yield name and content of the lines that start in a piece, without blank lines, or an error as content."""
    offset = piece.start
    # Opened one byte early: this byte is a newline if a line starts at the first byte of the piece.
    with reader.open(piece.path, start=max(piece.start - 1, 0)) as stream:
        try:
            for block in read_line_blocks(stream, start=piece.start, stop=piece.stop):
                offset = block.offset
                if block.content is None:
                    yield f"{piece.name}@{offset}", _too_large()
                    continue
                for line in block.content.split(b"\n"):
                    if line.strip():
                        yield f"{piece.name}@{offset}", line
                    offset += len(line) + 1
        except DECOMPRESSION_ERRORS as error:
            yield f"{piece.name}@{offset}", BadSampleError(f"the rest of the file does not decompress: {error}")


def _value_of(line: bytes, column: str) -> Any:
    """Return the value of a JSON line, or the error of parsing it."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadSampleError(f"is not JSON: {error}")
    if not isinstance(values, dict):
        return BadSampleError(f"is a JSON {type(values).__name__}; expected an object with {column!r}")
    if column not in values:
        return BadSampleError(f"has no {column!r}: its columns are {sorted(values)[:10]}")
    return values[column]


def _text_of(text: object, column: str) -> str | BadSampleError:
    """Return the text in a column, or its error."""
    if not isinstance(text, str):
        return BadSampleError(f"has no text in {column!r}")
    return find_surrogate(text) or text


def find_surrogate(text: str) -> BadSampleError | None:
    """Return the error of a text that has half of a surrogate pair, which JSON may escape; None if it has none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return BadSampleError(f"is not Unicode text: {error}")
    return None


def _too_large() -> BadSampleError:
    return BadSampleError(
        f"is a document of over {MAX_DOCUMENT_BYTES >> 20} MiB; divide it into documents, one per line of JSON lines"
    )
