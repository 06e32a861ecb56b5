"""Reader of Arrow IPC files that are not trusted: shards, and objects that hold one table (indexes, deletions).

`ObjectFiles` opens stored objects for it: local ones are mapped, remote ones are read by byte range. SQL queries and
scans use these to read only some columns of a shard, and `verify` to read only metadata.

A digest proves that bytes are those that were stored, not that datasvc wrote them. Therefore, every position, length
and offset is checked before it is used. An invalid file is refused: it cannot crash the process, or make the process
use much more memory than the file has bytes, or of a shard 64 times as much. Equal tables are encoded as equal bytes,
so they have one digest.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.arrow_messages import (
    MAX_VALUES_PER_BYTE,
    BatchHeader,
    Block,
    check_block,
    checked_messages,
    parse_footer,
)
from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError
from datasvc.repository import Digest, Objects, Storage
from datasvc.repository.objects.in_place import built_file
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.format.schema import KEY, has_compression

_TAIL: Final = struct.Struct("<i6s")  # length of the footer and the magic number, at the end of a file
_MAGIC: Final = b"ARROW1"
# One request reads at least this many bytes. Those at the end are kept, and elsewhere those of the last request.
_TAIL_BYTES: Final = 16 << 10
_MAX_DEPTH: Final = 32  # of nested types; without a limit, a hostile type could exceed the limit of recursion
# Errors of pyarrow on invalid files. They include UnicodeDecodeError, a ValueError, for a name that is not UTF-8.
PARSE_ERRORS: Final = (pa.ArrowException, OSError, EOFError, ValueError, TypeError, KeyError, OverflowError)


class IpcReader:
    """Reads the record batches of an Arrow IPC file.

    The metadata of a record batch is checked before Arrow reads the batch, and its values are validated afterwards.

    Args:
        file: the file; it must not change while it is open.
        name: name of the file for messages.
        columns: names of the columns to read; the file may lack some of them. None for all.
        otherwise: column to read if the file has none of `columns`, so that batches still have their number of rows.
        texts: whether to check that all texts are UTF-8, which reads all their bytes. If False, only keys and texts
            in lists and structs are checked.
        compressed: whether the buffers of a file may be compressed, as those of shards.

    Attributes:
        schema: schema of the file, with all its columns.

    Raises:
        CorruptDataError: the file is not an Arrow IPC file, or has a type that datasvc never writes.
    """

    def __init__(
        self,
        file: pa.NativeFile,
        name: str,
        columns: Collection[str] | None = None,
        *,
        otherwise: str = "",
        texts: bool = True,
        compressed: bool = False,
    ) -> None:
        self._file, self._name, self._texts, self._compressed = file, name, texts, compressed
        options = pa.ipc.IpcReadOptions(use_threads=False)
        try:
            self._blocks = _read_blocks(file)
            self._reader = pa.ipc.open_file(file, options=options)
            self.schema = self._reader.schema
            check_schema(self.schema)
            if columns is not None:
                # Open the file again with the numbers of these columns, which only its schema gives.
                selected = [number for number, column in enumerate(self.schema.names) if column in columns]
                selected = selected or [self.schema.names.index(otherwise)]
                options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=selected)
                self._reader = pa.ipc.open_file(file, options=options)
        except PARSE_ERRORS as error:
            raise CorruptDataError(f"{name} is not an Arrow IPC file: {error}") from error
        if self._reader.num_record_batches != len(self._blocks):
            raise CorruptDataError(f"{name} is not an Arrow IPC file: its footer is not valid")

    @property
    def num_batches(self) -> int:
        """Number of record batches."""
        return len(self._blocks)

    def select(self, columns: Collection[str]) -> IpcReader:
        """Return a reader of some columns of the same file, of which the file has at least one."""
        return IpcReader(self._file, self._name, columns, texts=self._texts, compressed=self._compressed)

    def check(self, number: int) -> BatchHeader:
        """Return the header of a record batch, checked, without its values. Raise CorruptDataError."""
        block = self._blocks[number]
        body = block.offset + block.metadata_bytes

        def read(offset: int, length: int) -> bytes:
            return bytes(self._file.read_at(length, body + offset))

        try:
            metadata = self._file.read_at(block.metadata_bytes, block.offset)
            return check_block(metadata, block, read if self._compressed and has_compression(self.schema) else None)
        except PARSE_ERRORS as error:
            raise self._corrupt(number, error) from error

    def batch(self, number: int) -> pa.RecordBatch:
        """Return a record batch, of a file in memory as a view but for compressed columns. Raise CorruptDataError."""
        self.check(number)
        try:
            batch = self._reader.get_batch(number)
            _validate(batch, self._blocks[number].body_bytes, texts=self._texts)
        except PARSE_ERRORS as error:
            raise self._corrupt(number, error) from error
        return batch

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all record batches. Raise CorruptDataError."""
        return (self.batch(number) for number in range(len(self._blocks)))

    def _corrupt(self, number: int, error: Exception) -> CorruptDataError:
        return CorruptDataError(
            f"record batch {number} of {self._name} is corrupt: {error}; restore it from another copy"
        )


def read_table(content: bytes | memoryview, name: str) -> pa.Table:
    """Return the validated table of an Arrow IPC file. Raise CorruptDataError."""
    reader = IpcReader(pa.BufferReader(content), name)
    return pa.Table.from_batches(reader.batches(), reader.schema)


def read_stream(content: bytes) -> pa.Table:
    """Return the validated table of an Arrow IPC stream. Raise one of `PARSE_ERRORS`."""
    messages = checked_messages(pa.py_buffer(content))
    schema = pa.ipc.read_schema(next(messages, b""))  # raises if there is no message
    check_schema(schema)
    return pa.Table.from_batches((read_batch(message, schema) for message in messages), schema)


def read_batch(message: pa.Message, schema: pa.Schema) -> pa.RecordBatch:
    """Return the validated batch of a message of `checked_messages`, as a view. Raise one of `PARSE_ERRORS`."""
    batch = pa.ipc.read_record_batch(message, schema)
    _validate(batch, message.body.size if message.body is not None else 0, texts=True)
    return batch


def _validate(batch: pa.RecordBatch, body_bytes: int, *, texts: bool) -> None:
    """Raise ArrowInvalid or ValueError if a value lies outside of the batch's bytes; see `IpcReader` for `texts`."""
    batch.validate()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        # Validate all offsets here, because Arrow later follows them without a check: one outside of its buffer would
        # end the process. An array of bytes has only offsets to validate, so the texts are not read.
        validated = column if texts or name == KEY else _as_bytes(column)
        validated.validate(full=True)
        if _num_viewed(column) > MAX_VALUES_PER_BYTE * body_bytes:
            raise ValueError(f"column {name!r} has more values in its list views than its bytes can hold")


def _as_bytes(column: pa.Array) -> pa.Array:
    """Return an array of text as one of bytes, without a copy; other arrays unchanged."""
    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    return column.view(pa.large_binary()) if pa.types.is_large_string(column.type) else column


def _num_viewed(array: pa.Array) -> int:
    """Return the number of values in the list views of a valid array; the views may overlap."""
    data_type = array.type
    if pa.types.is_list_view(data_type) or pa.types.is_large_list_view(data_type):
        return int(array.sizes.to_numpy().sum(dtype=np.int64, initial=0))
    if pa.types.is_struct(data_type):
        return sum(_num_viewed(array.field(number)) for number in range(data_type.num_fields))
    if pa.types.is_map(data_type):
        return _num_viewed(array.keys) + _num_viewed(array.items)
    if pa.types.is_nested(data_type) and hasattr(array, "values"):  # a list; a union has no `values`
        return _num_viewed(array.values)
    return 0


def check_schema(schema: pa.Schema) -> None:
    """Raise ValueError if a type is one that datasvc never writes, or two columns have the same name."""
    if len(set(schema.names)) != len(schema.names):
        raise ValueError(f"two columns have the same name: {schema.names}")
    for field in schema:
        _check_type(field)


def _read_blocks(file: pa.NativeFile) -> list[Block]:
    """Return the positions of the record batches, from the footer at the end of the file. Raise ValueError."""
    size_bytes = file.size()
    if size_bytes < _TAIL.size:
        raise ValueError(f"it has {size_bytes} bytes")
    length, magic = _TAIL.unpack(file.read_at(_TAIL.size, size_bytes - _TAIL.size))
    offset = size_bytes - _TAIL.size - length
    if magic != _MAGIC or length < 0 or offset < 0:
        raise ValueError("it does not end with a footer; it may be truncated")
    return parse_footer(file.read_at(length, offset), offset)


def _check_type(field: pa.Field, depth: int = 0, *, is_viewed: bool = False) -> None:
    """Raise ValueError for a type whose values may take more memory than their bytes."""
    data_type = field.type
    is_view = pa.types.is_list_view(data_type) or pa.types.is_large_list_view(data_type)
    # Views may overlap, so views in views can have many more values than bytes; `_num_viewed` counts one level.
    is_expanding = (
        (is_view and is_viewed)
        or pa.types.is_dictionary(data_type)
        or pa.types.is_run_end_encoded(data_type)
        or pa.types.is_binary_view(data_type)
        or pa.types.is_string_view(data_type)
    )
    if is_expanding:
        raise ValueError(f"column {field.name!r} has the type {data_type}, which datasvc never writes")
    if depth > _MAX_DEPTH:
        raise ValueError(f"a column nests more than {_MAX_DEPTH} types")
    for number in range(data_type.num_fields):
        _check_type(data_type.field(number), depth + 1, is_viewed=is_viewed or is_view)


def encode_table(table: pa.Table, metadata: Mapping[bytes, bytes] | None = None) -> bytes:
    """Return a table as an Arrow IPC file.

    `metadata` is stored with the record batch. An empty table has no record batch, so its `metadata` is dropped.
    """
    sink = pa.BufferOutputStream()
    # Arrow writes one record batch per chunk, so equal tables with different chunks would give different bytes.
    combined = table.combine_chunks()
    with pa.ipc.new_file(sink, combined.schema) as file:
        for batch in combined.to_batches():
            # Store the metadata with the batch: Arrow stores the metadata of a schema twice, in header and footer.
            file.write_batch(batch, custom_metadata=metadata)
    return bytes(sink.getvalue().to_pybytes())


def decode_metadata(content: bytes) -> dict[bytes, bytes]:
    """Return the `metadata` that `encode_table` wrote. Call `decode_table` first, because it validates `content`."""
    file = pa.ipc.open_file(pa.py_buffer(content))
    metadata = file.get_batch_with_custom_metadata(0).custom_metadata if file.num_record_batches else None
    return dict(metadata or {})


def decode_table(
    content: bytes, name: str, *, what: str, format_key: bytes, latest: int, columns: pa.Schema
) -> pa.Table:
    """Return the table that `encode_table` wrote, validated.

    Args:
        content: bytes of the object.
        name: location of the object, for messages.
        what: type of the object, for messages, such as "sample index".
        format_key: key of the schema metadata that holds the format number.
        latest: the newest format number that this datasvc reads.
        columns: schema of the table in this format and all earlier ones; its metadata is ignored.

    Raises:
        CorruptDataError: `content` is not an object of this type, or has a null in a column that is not nullable.
        ConfigError: its format is newer than `latest`.
    """
    try:
        table = read_table(content, name)
        format_number = int((table.schema.metadata or {}).get(format_key, b""))
    except (CorruptDataError, ValueError) as error:
        raise CorruptDataError(f"{name} is not a {what}: {error}") from error
    if format_number > latest:
        raise ConfigError(
            f"{name} has {what} format {format_number}; this datasvc reads up to {latest}: upgrade datasvc"
        )
    check_columns(table, columns, f"{name} is not a {what}")
    return table


def check_columns(table: pa.Table, columns: pa.Schema, message: str) -> None:
    """Raise CorruptDataError if a table has other columns, or forbidden nulls. Its text starts with `message`."""
    if not table.schema.equals(columns):
        found = [f"{field.name}: {field.type}" for field in table.schema]
        expected = [f"{field.name}: {field.type}" for field in columns]
        raise CorruptDataError(f"{message}: it has the columns {found}; expected {expected}")
    for field in columns:
        if not field.nullable and table.column(field.name).null_count:
            raise CorruptDataError(f"{message}: column {field.name!r} has nulls")


def column_to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column as `dtype[num_rows]`. For one chunk of numbers without nulls, this is a read-only view."""
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if not is_number or column.null_count:
        return np.asarray(column.to_numpy())
    # `to_numpy` imports pandas where it is installed, which takes longer than most commands. The empty array is there
    # because a column may have no chunks.
    chunks = [np.from_dlpack(chunk) for chunk in column.chunks]
    return chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, column.type.to_pandas_dtype()), *chunks])


class ObjectFiles:
    """The objects of a repository as files, opened by digest.

    Sizes are checked. Contents are not checked against the digest, because only requested ranges are read.

    Args:
        storage: storage of the repository.
        sizes: expected size of each object in bytes.
        builds: whether to build attached shards, which reads them whole.

    Attributes:
        failure: the first datasvc error that an open or a read raised. It is kept here because a library that calls
            Arrow, such as DuckDB, passes on only the text of an error.
    """

    def __init__(self, storage: Storage, sizes: Mapping[Digest, int], *, builds: bool = True) -> None:
        self._builds = builds
        self.failure: DatasvcError | None = None
        self._storage = storage
        self._sizes = sizes

    def open(self, digest: Digest) -> pa.NativeFile:
        """Open an object. Raise NotFoundError, CorruptDataError (its size is wrong), those of `build_object`."""
        path = Objects.path(digest)
        location, expected = self._storage.location(path), self._sizes[digest]
        with self._recording_failure():
            size_bytes = self._storage.size(path)
            if size_bytes is None and self._builds:
                with built_file(Objects(self._storage), digest) as built:
                    if built is not None:
                        return pa.memory_map(built)
            if size_bytes is None:
                raise NotFoundError(f"shard {location} is missing; restore it from another copy")
            if size_bytes != expected:
                raise CorruptDataError(
                    f"shard {location} is corrupt: it has {size_bytes} bytes, expected {expected}; "
                    "restore it from another copy"
                )
            local = self._storage.local_path(path)
            if local is None:
                return pa.PythonFile(_RangedFile(self, path, size_bytes), mode="r")
            with map_exceptions("map", location):
                return pa.memory_map(str(local))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return a range of an object's bytes. Raise what `Storage.read_range` raises."""
        with self._recording_failure():
            return self._storage.read_range(path, offset, length)

    @contextmanager
    def _recording_failure(self) -> Iterator[None]:
        try:
            yield
        except DatasvcError as error:
            self.failure = self.failure or error
            raise


class _RangedFile:
    """A remote object with the methods of a file that `pa.PythonFile` calls; for use by one thread at a time."""

    closed = False  # Arrow reads this attribute

    def __init__(self, files: ObjectFiles, path: str, size_bytes: int) -> None:
        self._files = files
        self._path = path
        self._size_bytes = size_bytes
        self._offset = 0
        self._tail: bytes | None = None
        self._last_read = (0, b"")  # offset and bytes of the last read before the tail; no bytes if it was large

    def read(self, length: int = -1) -> bytes:
        remaining = max(self._size_bytes - self._offset, 0)
        length = remaining if length < 0 else min(length, remaining)
        content = self._read(length) if length else b""
        self._offset += len(content)
        return content

    def _read(self, length: int) -> bytes:
        """Return `length` bytes at the present offset, from an earlier request if possible."""
        tail_start = max(self._size_bytes - _TAIL_BYTES, 0)
        if self._offset < tail_start:
            # The metadata of a record batch is read twice in succession: by `IpcReader.check`, which also reads the
            # sizes of compressed buffers, then by Arrow.
            skipped = self._offset - self._last_read[0]
            if 0 <= skipped <= len(self._last_read[1]) - length:
                return self._last_read[1][skipped:][:length]
            requested = max(length, min(_TAIL_BYTES, self._size_bytes - self._offset))
            content = self._files.read_range(self._path, self._offset, requested)
            self._last_read = (self._offset, content if requested <= _TAIL_BYTES else b"")
            return content[:length]
        # Arrow opens an IPC file with several small reads at its end: one request serves all of them.
        if self._tail is None:
            self._tail = self._files.read_range(self._path, tail_start, self._size_bytes - tail_start)
        return self._tail[self._offset - tail_start :][:length]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size_bytes}[whence]
        self._offset = start + offset
        return self._offset

    def tell(self) -> int:
        return self._offset

    def close(self) -> None:
        self.closed = True
