"""Source of Arrow IPC files and streams, and of Feather version 2 files, which are IPC files.

Local files are mapped into memory, so that a record batch of any size is read slice by slice.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.sources.common.column_types import checked_names, join_schemas
from datasvc.shards.sources.common.columns import ColumnMap
from datasvc.shards.sources.common.file_checks import HEAD_BYTES, check_head
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, SourcePart, file_part
from datasvc.shards.sources.common.tables import (
    RawBatch,
    TableSource,
    list_tables,
    map_files,
    no_samples_error,
    reason_of,
    row_keys,
    split_by_size,
)
from datasvc.shards.sources.tabular.features import columns_of_media, features_of_files, label_column
from datasvc.sizes import format_size

EXTENSIONS: Final = frozenset({".arrow", ".arrows", ".feather", ".ipc"})
_MAGIC: Final = b"ARROW1"
_FEATHER_1: Final = b"FEA1"
# Pages of a mapped file count as memory of the process, so release them whenever this many bytes were read.
_RELEASE_BYTES: Final = 16 << 20
# A remote file is read for the check of its batches up to this size.
_MAX_CHECKED_BYTES: Final = 16 << 20
# Image columns are detected in the first samples, up to this number.
_FIRST_SAMPLES: Final = 32
# A batch of 12 kB may hold 2 GiB of compressed zeros. Arrow decompresses a batch as a whole, and allocates what each
# buffer announces in its first 8 bytes. pyarrow does not offer these numbers, so the messages are parsed here: tables
# of FlatBuffers, see Message.fbs and File.fbs of Arrow.
_MAX_BATCH_BYTES: Final = 256 << 20
_MAX_RATIO: Final = 200  # as for Parquet: ordinary data is compressed to a tenth
_DICTIONARY, _BATCH = 2, 3  # types of messages
_TRAILER_BYTES: Final = 10  # of a file: length of the footer, and the magic bytes
_CONTINUATION: Final = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class ArrowSource(TableSource):
    """A source of Arrow files. Without a key column, the key of a sample is `FILE#ROW`."""

    kind: ClassVar[str] = "arrow"

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> ArrowSource:
        """List the source from the schemas of its files. For errors, see `FileSource.list`."""
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
    ) -> ArrowSource:
        """Return the source of listed `files`; `ignored` counts the other files by extension. For errors, see `list`.

        `features` are Hugging Face features by column; None or empty: taken from the files.
        """
        reader = FileReader(url)
        schemas = map_files(reader, files, lambda file: (file.name, _read_schema(reader, file)))
        raw = join_schemas(schemas)
        features = features or features_of_files(schemas)
        label, classes = label_column(features, raw)
        parts = [file_part(file, options, name=file.name) for file in files]
        first_samples = _first_samples(reader, parts)
        if first_samples is None:
            raise no_samples_error(url, files)
        media = columns_of_media(features, raw)
        columns = ColumnMap(raw, first_samples, key=options.key, **media, label=label)
        return cls(url=url, schema=columns.schema, classes=classes, parts=parts, columns=columns, ignored=ignored)

    def read_raw(self, part: SourcePart) -> Iterator[RawBatch | BadSample]:
        """Yield the samples of one part with raw columns."""
        return read_arrow(FileReader(self.url), part)


def read_arrow(reader: FileReader, part: SourcePart) -> Iterator[RawBatch | BadSample]:
    """Yield the raw samples of an Arrow file. For errors, see `StreamedSource.read`."""
    name, row = part.where["name"], 0
    try:
        with _open_batches(reader, part.where["path"]) as (batches, release_pages):
            unreleased_bytes = 0
            for batch in batches:
                batch.validate()  # a damaged batch fails here as a whole, not later in one of its slices
                for piece in split_by_size(batch):
                    yield RawBatch(piece, row_keys(name, row, piece.num_rows))
                    row += piece.num_rows
                    unreleased_bytes += piece.nbytes
                    if unreleased_bytes >= _RELEASE_BYTES:
                        release_pages()
                        unreleased_bytes = 0
    except (pa.ArrowException, OSError) as error:
        yield BadSample(part.split, f"{name}#{row}", f"the file cannot be read from row {row} on: {reason_of(error)}")


def _first_samples(reader: FileReader, parts: Sequence[SourcePart]) -> pa.RecordBatch | None:
    """Return the first samples of the first readable part that has any; None if all parts are empty."""
    first_problem = None
    for part in parts:
        raw = next(read_arrow(reader, part), None)
        if isinstance(raw, RawBatch):
            return raw.batch.slice(0, _FIRST_SAMPLES)
        first_problem = first_problem or raw
    if first_problem is not None:
        raise ConfigError(
            f"{first_problem.key}: {first_problem.reason}; repair the file, or remove it from the source"
        )
    return None


def _read_schema(reader: FileReader, file: SourceFile) -> pa.Schema:
    _check_buffers(reader, file)
    try:
        with _open_ipc(reader, file.path) as (ipc, _):
            return checked_names(ipc.schema)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        check_head(file.name, reader.read_range(file.path, 0, HEAD_BYTES))
        raise ConfigError(
            f"{file.name} is not a readable Arrow file or stream: {reason_of(error)}; repair it, or remove it from "
            "the source"
        ) from error


def _check_buffers(reader: FileReader, file: SourceFile) -> None:
    """Raise ConfigError if a batch takes far more memory than the file, see `largest_batch`."""
    size_bytes = file.size_bytes
    if not size_bytes or (not reader.is_local and size_bytes > _MAX_CHECKED_BYTES):
        return
    with map_exceptions("open", file.path):
        if reader.is_local:
            with open(file.path, "rb") as opened:
                content = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        else:
            content = memoryview(reader.read_range(file.path, 0, size_bytes))
    batch_bytes = largest_batch(content, is_file=bytes(content[: len(_MAGIC)]) == _MAGIC)
    if batch_bytes is not None:
        raise ConfigError(
            f"{file.name} has {format_size(size_bytes)}, and a batch of {format_size(batch_bytes)}, which would fill "
            "the memory: it is hostile, or its values repeat. Write smaller batches, or no compression"
        )


@contextmanager
def _open_batches(reader: FileReader, path: str) -> Iterator[tuple[Iterator[pa.RecordBatch], Callable[[], None]]]:
    """Open a file or stream; yield its record batches and a function that releases the pages read so far."""
    with _open_ipc(reader, path) as (ipc, release_pages):
        # A file has random access to its batches, a stream only an iterator.
        if isinstance(ipc, pa.RecordBatchFileReader):
            yield (ipc.get_batch(number) for number in range(ipc.num_record_batches)), release_pages
        else:
            yield iter(ipc), release_pages


@contextmanager
def _open_ipc(reader: FileReader, path: str) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Open a file or stream; yield pyarrow's reader and a function that releases the pages read so far."""
    if reader.is_local:
        with map_exceptions("open", path), open(path, "rb") as file:
            # An empty file cannot be mapped.
            if not os.fstat(file.fileno()).st_size:
                raise pa.ArrowInvalid("it is empty")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # stays valid after `file` is closed
        content = pa.py_buffer(mapped)
        is_file = _is_ipc_file(content[: len(_MAGIC)].to_pybytes())
        opened: Any = pa.ipc.open_file(content) if is_file else pa.ipc.open_stream(content)
        # Safe while slices are in use: the kernel reads released pages from the file again.
        yield opened, lambda: mapped.madvise(mmap.MADV_DONTNEED)
        return
    if _is_ipc_file(reader.read_range(path, 0, len(_MAGIC))):
        with reader.open_seekable(path) as seekable:
            yield pa.ipc.open_file(seekable), _release_nothing
    else:
        with reader.open(path) as stream:
            yield pa.ipc.open_stream(stream), _release_nothing


def _is_ipc_file(start: bytes) -> bool:
    """Return whether content that starts with `start` is an IPC file, not a stream. Raise an error for Feather 1."""
    if start.startswith(_FEATHER_1):
        raise pa.ArrowInvalid("Feather version 1 is not supported; write the file again with a current pyarrow")
    return start == _MAGIC


def _release_nothing() -> None:
    """Do nothing: a remote file is not mapped."""


# Arrow decompresses a batch as a whole, and allocates what each buffer announces in its first 8 bytes. pyarrow does
# not offer these numbers, so the messages are parsed here: tables of FlatBuffers, see Message.fbs and File.fbs of
# Arrow.


def largest_batch(content: memoryview, *, is_file: bool) -> int | None:
    """Return the bytes of a batch, or of all dictionaries, that are too large for the file; None if there are none.

    `content` is an IPC file with a footer, or a stream. Messages that cannot be parsed end the search: Arrow reports
    them.
    """
    limit, dictionary_bytes = max(_MAX_BATCH_BYTES, _MAX_RATIO * len(content)), 0
    try:
        for offset in _blocks(content) if is_file else _stream(content):
            kind, num_bytes = _announced(content, offset)
            # All dictionaries are in memory together, but one batch at a time.
            dictionary_bytes += num_bytes if kind == _DICTIONARY else 0
            if max(num_bytes, dictionary_bytes) > limit:
                return max(num_bytes, dictionary_bytes)
    except (struct.error, IndexError, ValueError):
        return None
    return None


def _blocks(content: memoryview) -> Iterator[int]:
    """Yield the offset of each dictionary and batch that the footer of a file names."""
    (length,) = struct.unpack_from("<i", content, len(content) - _TRAILER_BYTES)
    footer = content[len(content) - _TRAILER_BYTES - length : len(content) - _TRAILER_BYTES]
    root = _indirect(footer, 0)
    for field in (2, 3):  # dictionaries, record batches
        for start in _vector(footer, _field(footer, root, field), 24):
            yield struct.unpack_from("<q", footer, start)[0]


def _stream(content: memoryview) -> Iterator[int]:
    """Yield the offset of each message of a stream."""
    offset = 0
    while offset + 8 <= len(content):
        yield offset
        message, body = _message(content, offset)
        field = _field(message, _indirect(message, 0), 3)
        body_bytes = struct.unpack_from("<q", message, field)[0] if field else 0  # a default is left out
        if body_bytes < 0:
            raise ValueError(body_bytes)
        offset = body + body_bytes


def _message(content: memoryview, offset: int) -> tuple[memoryview, int]:
    """Return the metadata of the message at `offset`, and the offset of its body."""
    if offset < 0:
        raise ValueError(offset)
    mark, length = struct.unpack_from("<II", content, offset)
    # Before version 0.15 of Arrow, messages began with their length.
    start, length = (offset + 8, length) if mark == _CONTINUATION else (offset + 4, mark)
    if not length:
        raise ValueError("end of the stream")
    return content[start : start + length], start + length


def _announced(content: memoryview, offset: int) -> tuple[int, int]:
    """Return the type of a message, and the bytes that its compressed buffers announce."""
    message, body = _message(content, offset)
    root = _indirect(message, 0)
    kind, header = message[_field(message, root, 1)], _indirect(message, _field(message, root, 2))
    if kind == _DICTIONARY:
        header = _indirect(message, _field(message, header, 1))
    elif kind != _BATCH:
        return kind, 0
    if not _field(message, header, 3):  # no compression
        return kind, 0
    num_bytes = 0
    for start in _vector(message, _field(message, header, 2), 16):
        at, length = struct.unpack_from("<qq", message, start)
        if length >= 8 and at >= 0:
            num_bytes += max(0, struct.unpack_from("<q", content, body + at)[0])  # -1: not compressed
    return kind, num_bytes


def _indirect(table: memoryview, position: int) -> int:
    return position + int(struct.unpack_from("<I", table, position)[0])


def _field(table: memoryview, position: int, number: int) -> int:
    """Return the position of a field of the table at `position`; 0 if it is absent."""
    entries = position - struct.unpack_from("<i", table, position)[0]
    if entries < 0 or 4 + 2 * number >= struct.unpack_from("<H", table, entries)[0]:
        return 0
    (offset,) = struct.unpack_from("<H", table, entries + 4 + 2 * number)
    return position + int(offset) if offset else 0


def _vector(table: memoryview, position: int, item_bytes: int) -> range:
    """Return the positions of the items of a vector; `position` is that of its field, 0 for none."""
    if not position:
        return range(0)
    start = _indirect(table, position)
    (length,) = struct.unpack_from("<I", table, start)
    if length * item_bytes > len(table):
        raise ValueError(length)
    return range(start + 4, start + 4 + length * item_bytes, item_bytes)
