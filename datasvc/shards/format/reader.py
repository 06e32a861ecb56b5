"""Reader of one shard: blobs as zero-copy views, other columns as arrays.

The structure of a shard is checked when it is opened, so that no later read accesses memory outside of the file.
Views are slices of Arrow's own buffers, because a slice takes about a thirtieth of the time of an Arrow scalar.

Record batches with compressed columns are decoded at their first use. A loader may have thousands of shards open: if
all of them stayed decoded, they would take the memory of the data set. The process keeps the batches used last, up to
a limit.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError
from datasvc.repository import ObjectInfo, Objects
from datasvc.repository.objects.in_place import built_file
from datasvc.repository.objects.objects import digest_of_file
from datasvc.shards.format.digests import joined_bytes, value_offsets
from datasvc.shards.format.ipc_reader import IpcReader, column_to_numpy
from datasvc.shards.format.mapped_file import Bytes, MappedFile
from datasvc.shards.format.parts import ReadPlan
from datasvc.shards.format.schema import check_shard_schema, has_compression, is_blob, is_compressible, redacted_rows

BlobPart = tuple[Bytes, npt.NDArray[np.int64], npt.NDArray[np.int64]]  # content, starts and stops, see `blob_part`
_NO_BYTES: Bytes = np.empty(0, np.uint8)
_MAX_KEPT_BYTES: Final = 256 << 20  # of decoded columns, in this process


class DecodedBatches(Sequence[pa.RecordBatch]):
    """The record batches of a file with compressed columns. Reading one raises CorruptDataError if it is corrupt.

    Args:
        reader: reads the file; columns that are not compressed are views of it.

    Attributes:
        num_rows: number of rows of each batch.

    Raises:
        CorruptDataError: the header of a batch is not valid.
    """

    def __init__(self, reader: IpcReader) -> None:
        self._reader = reader
        headers = [reader.check(number) for number in range(reader.num_batches)]
        self.num_rows = [header.num_rows for header in headers]
        self._sizes_bytes = [header.decoded_bytes for header in headers]
        self._kept: dict[int, pa.RecordBatch] = {}

    def __len__(self) -> int:
        return len(self.num_rows)

    def __getitem__(self, number: Any) -> Any:
        number = range(len(self))[number]
        batch = self._kept.get(number)
        if batch is None:
            batch = self._kept[number] = self._reader.batch(number)
        _last_used.add(self, number, self._sizes_bytes[number])
        return batch

    def column(self, name: str) -> list[pa.Array]:
        """Return a column of all batches, as views of the file if it is never compressed. No batch is kept."""
        # Arrow decodes what it reads. It reads a column alone into memory of its own, so views need whole batches.
        is_compressible_column = is_compressible(self._reader.schema.field(name).type)
        reader = self._reader.select([name]) if is_compressible_column else self._reader
        return [batch.column(name) for batch in reader.batches()]

    def forget(self, number: int) -> None:
        """Drop a batch; it is decoded again at its next use."""
        self._kept.pop(number, None)


class _LastUsed:
    """The batches that are kept, those that were used last at the end."""

    def __init__(self) -> None:
        self.renew_lock()
        # By address and number: a batch list may be garbage, and is then counted until its entries are the oldest.
        self._entries: OrderedDict[tuple[int, int], tuple[weakref.ref[DecodedBatches], int]] = OrderedDict()
        self._num_bytes = 0

    def renew_lock(self) -> None:
        """Replace the lock, which another thread of the parent process may have held during a fork."""
        self._lock = Lock()

    def add(self, batches: DecodedBatches, number: int, size_bytes: int) -> None:
        """Put a batch at the end, and drop the first ones until all are within the limit."""
        with self._lock:
            place = (id(batches), number)
            self._num_bytes += size_bytes - self._entries.pop(place, (None, 0))[1]
            self._entries[place] = (weakref.ref(batches), size_bytes)
            while self._num_bytes > _MAX_KEPT_BYTES and len(self._entries) > 1:
                (_, oldest), (owner, oldest_bytes) = self._entries.popitem(last=False)
                self._num_bytes -= oldest_bytes
                if (found := owner()) is not None:
                    found.forget(oldest)


_last_used: Final = _LastUsed()
os.register_at_fork(after_in_child=_last_used.renew_lock)


class Shard:
    """A shard open for reading. Its bytes are not verified here: `open_shard` and the cache verify them before.

    Args:
        schema: columns of the shard.
        batches: record batches of the shard; they are read after the schema is checked.
        name: name of the shard for messages.

    Raises:
        ConfigError: the shard has a newer format than this datasvc reads.
        CorruptDataError: the shard has no column of keys, or a record batch is corrupt.
    """

    is_partial = False  # whether some of its samples may not be readable yet

    def __init__(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch], name: str) -> None:
        check_shard_schema(schema, name)
        self.name = name
        self.schema = schema
        self._batches: list[pa.RecordBatch] | DecodedBatches
        if isinstance(batches, DecodedBatches):
            self._batches, num_rows = batches, batches.num_rows
        else:
            self._batches = list(batches)
            num_rows = [batch.num_rows for batch in self._batches]
        # First row of each record batch, followed by the number of all rows.
        self._starts = np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int64)
        self.num_samples = int(self._starts[-1])
        self._file: MappedFile | None = None
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._valid: dict[str, npt.NDArray[np.bool_] | None] = {}  # which rows have a value; None: all rows

    @staticmethod
    def map(path: Path | str) -> Shard:
        """Open a local file by mapping it, so that only accessed pages are read.

        The mapping stays valid if the file is deleted. Raise the errors of `MappedFile` and of this class.
        """
        file = MappedFile(path)
        shard = _open_file(pa.py_buffer(file.mapping), str(path))
        shard._file = file  # noqa: SLF001 - this class
        file.release_pages()  # the check of the record batches has mapped pages, such as those of the keys
        return shard

    @staticmethod
    def from_bytes(content: bytes, name: str) -> Shard:
        """Open a file that is held in memory. Raise CorruptDataError, ConfigError."""
        return _open_file(pa.py_buffer(content), name)

    def read(self, view: Bytes, buffer: Bytes) -> Bytes:
        """Return the bytes of a view from `blobs`, read into the start of `buffer`, which is at least as long.

        An access to a mapped page maps up to 2 MiB around it. Accesses at random positions would soon map complete
        shards, which count against the memory limit of the process. A disk error raises an exception here, but an
        access to a mapped page then kills the process. A shard in memory returns `view` itself.

        Raises:
            CorruptDataError: the file was truncated.
            UnavailableError: the disk cannot be read.
        """
        return view if self._file is None else self._file.read(view, buffer[: len(view)])

    def reader(self, column: str, row: int, plan: ReadPlan) -> Callable[[Bytes, Bytes], Bytes]:  # noqa: ARG002
        """Return a function like `read` for views of one blob, for one thread. May read the ranges of `plan` now."""
        return self.read

    @cached_property
    def redacted(self) -> npt.NDArray[np.int64]:
        """Rows of samples that were purged, `int64[n]`, ascending: they have empty values, and loaders mask them."""
        return redacted_rows(self.schema, self.num_samples, self.name)

    @property
    def batches(self) -> Sequence[pa.RecordBatch]:
        """The record batches in order: views of the file, but for compressed columns, which each use may decode."""
        return self._batches

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column of the shard: a view of the file, or a copy of a compressed column; see `items`."""
        stored = self._batches
        chunks = stored.column(name) if isinstance(stored, DecodedBatches) else [each.column(name) for each in stored]
        return pa.chunked_array(chunks, self.schema.field(name).type)

    def items(self, column: str, rows: npt.NDArray[np.int64]) -> list[Any]:
        """Return the values of a column at `rows`, in that order, as Python values; None without such a column.

        Only their record batches are decoded if the column is compressed, and they are kept for the next call.

        Raises:
            CorruptDataError: a text is not UTF-8, or a compressed batch is corrupt.
        """
        if column not in self.schema.names:
            return [None] * len(rows)
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        chunks = {number: self._batches[number].column(column) for number in np.unique(numbers).tolist()}
        places = zip(numbers.tolist(), (rows - self._starts[numbers]).tolist(), strict=True)
        with text_errors(self.name):
            return [python_value(chunks[number][row]) for number, row in places]

    def blobs(self, column: str, rows: npt.NDArray[np.int64]) -> list[Bytes]:
        """Return the blobs of `rows`, `int64[n]`, in that order: views, `uint8[size]`, empty for null.

        The views keep the mapping open. If the shard does not have the column, all its values are null.
        """
        if column not in self._blob_parts:
            return [_NO_BYTES] * len(rows)
        parts = self._blob_parts[column]
        if len(parts) == 1:  # all rows are in the same record batch
            content, starts, stops = parts[0]
            return [
                content[start:stop] for start, stop in zip(starts[rows].tolist(), stops[rows].tolist(), strict=True)
            ]
        batches = np.searchsorted(self._starts, rows, side="right") - 1
        rows_in_batch = rows - self._starts[batches]
        views = []
        for batch, row in zip(batches.tolist(), rows_in_batch.tolist(), strict=True):
            content, starts, stops = parts[batch]
            views.append(content[starts[row] : stops[row]])
        return views

    def values(self, column: str) -> npt.NDArray[Any]:
        """Return a column of numbers: `dtype[num_samples]`, cached, with 0 for null; see `is_valid`."""
        if column not in self._arrays:
            values = self.column(column)
            filled = values.fill_null(pa.scalar(0).cast(values.type)) if values.null_count else values
            self._arrays[column] = self._detached(column_to_numpy(filled) if filled.num_chunks else np.empty(0))
            self._release_pages()
        return self._arrays[column]

    def is_valid(self, column: str, rows: npt.NDArray[np.int64]) -> bool:
        """Return whether the shard has the column, with a value (not null) for each of `rows`."""
        if column not in self._valid:
            if column not in self.schema.names:
                return False
            values = self.column(column)
            self._valid[column] = values.is_valid().to_numpy() if values.null_count else None
            self._release_pages()
        valid = self._valid[column]
        return valid is None or bool(valid[rows].all())

    def check_texts(self) -> None:
        """Raise CorruptDataError if a text is not UTF-8. Opening a shard checks only its keys and nested texts."""
        for number, batch in enumerate(self._batches):
            try:
                batch.validate(full=True)
            except pa.ArrowInvalid as error:
                raise CorruptDataError(
                    f"record batch {number} of {self.name} is corrupt: {error}; restore it from another copy"
                ) from error

    def sample(self, row: int) -> dict[str, Any]:
        """Return one sample as Python values, with copies of blobs as bytes.

        Raises:
            CorruptDataError: a text is not UTF-8.
        """
        batch = int(np.searchsorted(self._starts, row, side="right")) - 1
        row_in_batch = row - int(self._starts[batch])
        with text_errors(self.name):
            return {
                name: python_value(self._batches[batch].column(index)[row_in_batch])
                for index, name in enumerate(self.schema.names)
            }

    def _drop_cached_columns(self) -> None:
        """Drop the arrays made from the record batches. `PartialShard` calls this after it replaced a batch."""
        self._arrays.clear()
        self._valid.clear()
        self.__dict__.pop("_blob_parts", None)

    @cached_property
    def _blob_parts(self) -> dict[str, list[BlobPart]]:
        """The result of `blob_part` for each record batch, by blob column."""
        parts: dict[str, list[BlobPart]] = {}
        for name in (field.name for field in self.schema if is_blob(field.type)):
            parts[name] = []
            for content, starts, stops in map(blob_part, self.column(name).chunks):
                parts[name].append((content, self._detached(starts), self._detached(stops)))
        self._release_pages()
        return parts

    def _detached(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        # Copy these small arrays: every read uses them, and as views of the file they would keep pages mapped.
        return array if self._file is None else array.copy()

    def _release_pages(self) -> None:
        if self._file is not None:
            self._file.release_pages()


def open_shard(objects: Objects, info: ObjectInfo) -> Shard:
    """Return a verified shard from a repository: mapped if it is local, otherwise read into memory.

    Raises:
        NotFoundError: the repository does not have the shard.
        CorruptDataError: its bytes do not match its digest.
        SourceChangedError: it was attached, and its file has changed.
        UnavailableError: the store did not respond.
    """
    path = objects.local_path(info.digest)
    if path is None:
        return Shard.from_bytes(objects.read(info.digest), objects.location(info.digest))
    try:
        actual = digest_of_file(path)
    except FileNotFoundError as error:
        with built_file(objects, info.digest) as built:
            if built is not None:
                return Shard.map(built)
        raise NotFoundError(f"shard {path} is missing; restore it from another copy") from error
    except OSError as error:
        raise UnavailableError(f"shard {path} cannot be read: {error}; check the disk") from error
    if actual != info.digest:
        raise CorruptDataError(
            f"shard {path} is corrupt: its bytes have the digest {actual[:12]}...; restore it from another copy"
        )
    return Shard.map(path)


def _open_file(content: pa.Buffer, name: str) -> Shard:
    reader = IpcReader(pa.BufferReader(content), name, texts=False, compressed=True)
    batches = DecodedBatches(reader) if has_compression(reader.schema) else reader.batches()
    return Shard(reader.schema, batches, name)


@contextmanager
def text_errors(name: str) -> Iterator[None]:
    """Raise CorruptDataError for a text in the block that is not UTF-8; `name` is the shard's, for the message."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise CorruptDataError(
            f"{name} has a text that is not UTF-8: {error}; restore the shard from another copy"
        ) from error


def python_value(value: pa.Scalar) -> Any:
    """Return an Arrow value as a Python value.

    A date or time that Python lacks, such as one after the year 9999 or in an unknown time zone, becomes a
    `numpy.datetime64` (in UTC) or `numpy.timedelta64`. Raise UnicodeDecodeError for a text that is not UTF-8.
    """
    try:
        return value.as_py()
    except UnicodeDecodeError:
        raise
    except (OverflowError, ValueError):  # an ArrowInvalid is a ValueError
        if pa.types.is_struct(value.type):
            return {name: python_value(value[name]) for name in value.type.names}
        if pa.types.is_nested(value.type):
            return [python_value(item) for item in value]
        if not pa.types.is_temporal(value.type):
            raise
        unit: Any = getattr(value.type, "unit", "D" if pa.types.is_date32(value.type) else "ms")
        is_moment = pa.types.is_timestamp(value.type) or pa.types.is_date(value.type)
        return np.datetime64(value.value, unit) if is_moment else np.timedelta64(value.value, unit)


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return the values of a column as Python values, see `python_value`."""
    try:
        values: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):
        return list(map(python_value, column))
    return values


def blob_part(array: pa.Array) -> BlobPart:
    """Return the bytes of an array of blobs, and start and stop of each blob in them: `int64[num_samples]` each."""
    offsets = value_offsets(array)
    starts, stops = offsets[:-1], offsets[1:]
    if array.null_count:
        # In Arrow, a null value may have bytes. Give it an empty range, so that they do not appear as a blob.
        stops = np.where(array.is_valid().to_numpy(zero_copy_only=False), stops, starts)
    return joined_bytes(array), starts, stops
