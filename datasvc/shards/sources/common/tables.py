"""Base of the sources of Parquet, Arrow, CSV and JSON lines: files with the same columns, read batch by batch.

The reader of a format yields raw batches, with the columns as the file has them (`RawBatch`). This module validates
and converts the batches, and slices them to the limits of `StreamedSource.read`. If a sample of a batch does not
convert, only this sample is left out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import ConfigError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.storage import resolve_url
from datasvc.shards.format.schema import is_media
from datasvc.shards.sources.common.column_types import cast_column, is_binary, is_text
from datasvc.shards.sources.common.columns import ColumnMap, bisect_errors
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile, list_files
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import (
    BATCH_BYTES,
    BadSample,
    FileSource,
    SourcePart,
    batch_samples,
    printable,
)
from datasvc.shards.sources.common.streams import DECOMPRESSION_ERRORS
from datasvc.threads import map_in_threads

EMPTY: Final = "(empty)"  # name under which `Source.ignored` counts files without a sample
# Errors of reading, decompressing and decoding a damaged file.
UNREADABLE: Final = (pa.ArrowException, OSError, *DECOMPRESSION_ERRORS)
# Files that the `datasets` library writes beside the data; they hold no samples.
_DESCRIPTIONS: Final = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_FILE_THREADS: Final = 16
_MAX_SHOWN_FILES: Final = 10
_REASON_CHARACTERS: Final = 500

Result = TypeVar("Result")


@dataclass(frozen=True)
class RawBatch:
    """Samples as a format's reader yields them: raw columns, and keys as `string[samples]`.

    The keys name bad samples, and are used if no column holds keys.
    """

    batch: pa.RecordBatch
    keys: pa.Array


@dataclass(frozen=True, kw_only=True)
class TableSource(FileSource):
    """Files with the same columns; files without a sample are counted in `ignored` as `EMPTY`.

    Attributes:
        columns: mapping of raw to sample columns.
    """

    columns: ColumnMap

    @property
    def keys_are_places(self) -> bool:
        """Whether keys are made of file and row: true unless a column holds the keys."""
        return self.columns.key is None

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of one part; see `StreamedSource.read`."""
        for raw in self.read_raw(part):
            if isinstance(raw, BadSample):
                yield raw
            else:
                yield from _to_samples(self.columns, raw, part)

    @abstractmethod
    def read_raw(self, part: SourcePart) -> Iterator[RawBatch | BadSample]:
        """Yield the samples of one part with raw columns. For errors, see `StreamedSource.read`."""

    def read_column(self, part: SourcePart, name: str) -> Iterator[pa.Array]:
        """Yield the values of one raw column, piece by piece, without bad samples."""
        for raw in self.read_raw(part):
            if isinstance(raw, RawBatch):
                yield raw.batch.column(name)


def _to_samples(columns: ColumnMap, raw: RawBatch, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
    """Yield raw samples as batches of samples within the limits of a source."""
    # `_convert` would report each sample of the part as bad instead.
    missing = [name for name in columns.raw_names if name not in raw.batch.schema.names]
    if missing:
        raise ConfigError(f"{part.name} has changed: the columns {missing} are missing now; list the source again")
    start = 0
    for piece in split_by_size(raw.batch):
        keys = raw.keys.slice(start, piece.num_rows)
        start += piece.num_rows
        yield from _convert(columns, piece, keys, part.split)


def split_by_size(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield slices of `batch` of at most `BATCH_SAMPLES` samples and about `BATCH_BYTES` when decoded."""
    if not batch.num_rows:
        return
    # Estimate the decoded size, because dictionary columns may be much larger when decoded.
    sample_bytes = sum(map(_decoded_bytes, batch.columns)) / batch.num_rows
    num_samples = batch_samples(sample_bytes)
    for start in range(0, batch.num_rows, num_samples):
        yield batch.slice(start, num_samples)


def row_keys(name: str, first: int, num_samples: int) -> pa.Array:
    """Return the keys `NAME#ROW` of consecutive rows from number `first`, `string[num_samples]`."""
    return numbered_keys(name, np.arange(first, first + num_samples))


def numbered_keys(name: str, numbers: Any) -> pa.Array:
    """Return the keys `NAME#NUMBER`, one for each of `numbers`, `int64[samples]`."""
    texts = pc.cast(pa.array(numbers, pa.int64()), pa.string())
    return pc.binary_join_element_wise(pa.scalar(name, pa.string()), texts, "#")


def reason_of(error: BaseException) -> str:
    """Return an error's message on one line, shortened to `_REASON_CHARACTERS`."""
    text = " ".join(str(error).split())
    return text if len(text) <= _REASON_CHARACTERS else f"{text[:_REASON_CHARACTERS]} ..."


def list_tables(
    url: str, extensions: Collection[str], *, compressed: bool = False
) -> tuple[list[SourceFile], Counter[str]]:
    """Return the files of a table source that are not empty, and the number of other files by extension.

    If `url` names a single file, its extension is not checked. `compressed`: files may be compressed as a whole.

    Raises:
        NotFoundError: no file has one of the extensions, or all such files are empty.
        ConfigError: a file is compressed and `compressed` is false, or a name is not UTF-8; or see `list_files`.
    """
    files = list_files(url)
    is_single_file = len(files) == 1 and files[0].path == resolve_url(url)[1]
    tables = [
        file
        for file in files
        if is_single_file or (file.extension in extensions and file.name.rpartition("/")[2] not in _DESCRIPTIONS)
    ]
    ignored = files.unused(tables)
    if not tables:
        raise NotFoundError(
            f"cannot ingest {redact_url(url)}: none of its {count_text(len(files), 'file')} has a name like "
            f"{' or '.join(f'*{extension}' for extension in sorted(extensions))}"
        )
    _check_names(tables, compressed=compressed)
    nonempty = [file for file in tables if file.size_bytes]
    if not nonempty:
        raise no_samples_error(url, tables)
    return nonempty, ignored + Counter({EMPTY: len(tables) - len(nonempty)})  # `+` drops a count of zero


def no_samples_error(url: str, files: Sequence[SourceFile]) -> NotFoundError:
    """Return the error for a source without any sample."""
    names = ", ".join(file.name for file in files[:_MAX_SHOWN_FILES])
    return NotFoundError(
        f"cannot ingest {redact_url(url)}: no samples in any of its {count_text(len(files), 'file')} ({names})"
    )


def map_files(reader: FileReader, files: Sequence[SourceFile], func: Callable[[SourceFile], Result]) -> list[Result]:
    """Return `func` of each file, in order; for remote files, calls run in parallel threads."""
    if reader.is_local or len(files) == 1:
        return [func(file) for file in files]
    return map_in_threads(func, files, _FILE_THREADS)


def _check_names(files: Sequence[SourceFile], *, compressed: bool) -> None:
    """Raise ConfigError for a name that is not UTF-8, or for a compressed file unless `compressed` allows it."""
    for file in files:
        # Names become keys, which are UTF-8.
        if printable(file.name) != file.name:
            raise ConfigError(f"the file name {printable(file.name)} is not UTF-8; rename the file")
        if file.is_compressed and not compressed:
            raise ConfigError(
                f"{file.name} is compressed as a whole; decompress it, because this format is read at random offsets"
            )


def _decoded_bytes(column: pa.Array) -> int:
    """Return an upper bound of a column's size in bytes after its dictionary is decoded."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    values = column.dictionary
    # A value of fixed size has at most 8 bytes; a text or blob has at most as many bytes as the longest one.
    max_bytes = 8
    if len(values) and (is_text(values.type) or is_binary(values.type)):
        max_bytes = pc.max(pc.binary_length(values)).as_py() or 0
    return int(column.indices.nbytes) + max_bytes * len(column)


def _convert(
    columns: ColumnMap, batch: pa.RecordBatch, keys: pa.Array, split: str
) -> Iterator[pa.RecordBatch | BadSample]:
    """Yield a raw batch as sample batches, and a `BadSample` for each sample that does not convert."""

    def convert(start: int, stop: int) -> pa.RecordBatch:
        piece = batch.slice(start, stop - start)
        piece.validate(full=True)  # finds text that is not UTF-8, and offsets out of range
        return columns.convert(piece, keys.slice(start, stop - start))

    # A batch that does not convert is halved again and again, until only the bad samples fail.
    for first, result in bisect_errors(batch.num_rows, convert, (ConfigError, pa.ArrowException)):
        if isinstance(result, Exception):
            yield BadSample(split, keys[first].as_py(), reason_of(result))
        else:
            yield from _halve(result)


def _halve(samples: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield `samples` in batches of at most `BATCH_BYTES`; only a single sample may be larger."""
    if samples.num_rows == 1 or samples.nbytes <= BATCH_BYTES:
        yield samples
        return
    # `split_by_size` only estimated the size before decoding; the decoded samples may be larger.
    middle = samples.num_rows // 2
    yield from _halve(samples.slice(0, middle))
    yield from _halve(samples.slice(middle))


# `ColumnMap` makes `label` of a column of integers. Here, floats become integers if they are whole, since pandas
# writes integers with missing values as floats; and text becomes classes.


def name_table_labels(source: TableSource, options: SourceOptions) -> TableSource:
    """Return a source whose labels are numbers, with the classes of a column of text; errors: see `name_labels`."""

    # A column of text is read once for its class names, before the ingest reads the samples.
    def read(name: str) -> Iterable[pa.Array]:
        for part in source.parts:
            yield from source.read_column(part, name)

    columns, classes = name_labels(source.columns, options, read, source.classes)
    if columns is source.columns:
        return source
    return replace(source, columns=columns, schema=columns.schema, classes=classes)


def name_labels(
    columns: ColumnMap,
    options: SourceOptions,
    read: Callable[[str], Iterable[pa.Array | pa.ChunkedArray]],
    classes: Sequence[str] | None,
) -> tuple[ColumnMap, tuple[str, ...]]:
    """Return the columns with labels that are numbers, and the class names.

    Args:
        columns: columns of the source.
        options: `label` names the column of labels.
        read: returns the values of a raw column, piece by piece.
        classes: class names that the source defines; None: they cannot be found, since the source is read only once.

    Raises:
        ConfigError: the column that `options` names does not exist, or its type holds no labels.
    """
    name, is_asked = options.label or columns.label, options.label is not None
    known = tuple(classes or ())
    missing = set(options.as_text) - set(columns.raw_names)
    if missing:
        raise ConfigError(f"the columns {sorted(missing)}, to keep as text, do not exist; found {columns.raw_names}")
    if name in options.as_text and not is_asked:
        return columns, known
    field = None if name is None else columns.field(name)
    if name is None or field is None:
        if is_asked:
            raise ConfigError(f"the label column {name!r} does not exist; found {columns.raw_names}")
        return columns, known
    if pa.types.is_integer(field.type):
        return (columns, known) if name == columns.label else (columns.with_labels(name), ())
    has_media = any(is_media(each) for each in columns.schema)
    if pa.types.is_string(field.type) and classes is not None and (is_asked or has_media):
        found = _class_names(read(name))
        return columns.with_labels(name, found), found
    if (pa.types.is_boolean(field.type) and is_asked) or (pa.types.is_floating(field.type) and _is_whole(read(name))):
        return columns.with_labels(name), ()
    if is_asked:
        way = "; ingest files, or pass the index of each class and `classes`" if classes is None else ""
        raise ConfigError(
            f"column {name!r} cannot hold labels: its type is {field.type}; expected whole numbers, booleans or "
            f"text{way}"
        )
    return columns, known


def _class_names(pieces: Iterable[pa.Array | pa.ChunkedArray]) -> tuple[str, ...]:
    """Return the sorted names in a column; null and an empty text stand for no class."""
    names: set[str | None] = set()
    for piece in pieces:
        for chunk in _chunks(piece):
            names.update(pc.unique(cast_column(chunk, pa.string())).to_pylist())
    return tuple(sorted(name for name in names if name))


def _is_whole(pieces: Iterable[pa.Array | pa.ChunkedArray]) -> bool:
    """Return whether all labels that have a value are whole numbers, and one has a value.

    All are read, because a target of a regression may be sorted: 1.0 for the first thousands of samples, then 1.5.
    NaN is no value: pandas writes it for a missing integer, so it becomes null.
    """
    has_value = False
    for piece in pieces:
        for chunk in _chunks(piece):
            values = cast_column(chunk, pa.float64()).drop_null()
            values = values.filter(pc.invert(pc.is_nan(values)))
            if not pc.all(pc.equal(values, pc.trunc(values)), min_count=0).as_py():
                return False
            has_value = has_value or len(values) > 0
    return has_value


def _chunks(piece: pa.Array | pa.ChunkedArray) -> Sequence[pa.Array]:
    return piece.chunks if isinstance(piece, pa.ChunkedArray) else [piece]
