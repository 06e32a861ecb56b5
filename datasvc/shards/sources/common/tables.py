"""What Parquet, Arrow, CSV and JSON lines share: files of the same columns, read batch by batch into samples.

A format yields raw batches with the keys that their samples get where no column holds keys. Here they are checked,
converted and cut to the bounds of a source; a sample that does not fit is found by halving and named.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import zstandard

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.store.storage import redact_url, resolve_url
from datasvc.shards.sources.common.column_types import is_binary, is_text
from datasvc.shards.sources.common.columns import ColumnMap
from datasvc.shards.sources.common.files import COMPRESSIONS, FileReader, SourceFile, list_files
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES, BadSample, SourcePart, StreamedSource
from datasvc.shards.sources.common.splits import split_of

EMPTY: Final = "(empty)"
# What reading, decompressing and decoding a file raise when it is not what it should be.
UNREADABLE: Final = (pa.ArrowException, OSError, EOFError, zlib.error, zstandard.ZstdError)
# What `datasets` writes beside the data; no samples are in them.
_DESCRIPTIONS: Final = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_LISTED_AT_ONCE: Final = 16
_NAMED_FILES: Final = 10
_REASON_CHARACTERS: Final = 500

Listed = TypeVar("Listed")


@dataclass(frozen=True)
class RawBatch:
    """Samples as a format's reader gives them.

    Attributes:
        batch: raw columns.
        keys: `string[samples]`, for sources without a key column, and to name bad samples.
    """

    batch: pa.RecordBatch
    keys: pa.Array


@dataclass(frozen=True)
class TableSource(StreamedSource):
    """Files of the same columns.

    Attributes:
        url: where they lie.
        schema: columns of the samples.
        classes: names of the labels, where the files say them.
        parts: in the order of the files' names.
        columns: from raw to sample columns.
        ignored: how many files of each other extension, or empty, were left out.
    """

    url: str
    schema: pa.Schema
    classes: tuple[str, ...]
    parts: list[SourcePart]
    columns: ColumnMap
    ignored: Counter[str]

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of one part; see `StreamedSource.read`."""
        for raw in self.read_raw(part):
            if isinstance(raw, BadSample):
                yield raw
            else:
                yield from to_samples(self.columns, raw, part)

    @abstractmethod
    def read_raw(self, part: SourcePart) -> Iterator[RawBatch | BadSample]:
        """Yield the samples of one part with raw columns. Raises as `StreamedSource.read`."""


def to_samples(columns: ColumnMap, raw: RawBatch, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
    """Yield raw samples as batches within a source's bounds, and those that do not convert as `BadSample`s.

    Raises:
        ConfigError: the part lacks a column of the source.
    """
    lacking = [name for name in columns.raw_names if name not in raw.batch.schema.names]
    if lacking:
        raise ConfigError(f"{part.name} lacks the columns {lacking} that it had when it was listed; list it again")
    start = 0
    for piece in rough_cuts(raw.batch):
        keys = raw.keys.slice(start, piece.num_rows)
        start += piece.num_rows
        yield from _converted(columns, piece, keys, part.split)


def rough_cuts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield slices of `batch` that hold about `BATCH_BYTES` when decoded, and at most `BATCH_SAMPLES`."""
    if not batch.num_rows:
        return
    sample_bytes = sum(map(_decoded_bytes, batch.columns)) / batch.num_rows
    num_samples = max(1, min(BATCH_SAMPLES, int(BATCH_BYTES / max(sample_bytes, 1))))
    for start in range(0, batch.num_rows, num_samples):
        yield batch.slice(start, num_samples)


def row_keys(name: str, first: int, num_samples: int) -> pa.Array:
    """Return the keys `NAME#ROW` of consecutive rows, `string[num_samples]`."""
    return numbered_keys(name, np.arange(first, first + num_samples))


def numbered_keys(name: str, numbers: Any) -> pa.Array:
    """Return the keys `NAME#NUMBER`, one for each of `numbers`, `int64[samples]`."""
    texts = pc.cast(pa.array(numbers, pa.int64()), pa.string())
    return pc.binary_join_element_wise(pa.scalar(name, pa.string()), texts, "#")


def reason_of(error: BaseException) -> str:
    """Return an error's message, cut to what a report can show."""
    text = " ".join(str(error).split())
    return text if len(text) <= _REASON_CHARACTERS else f"{text[:_REASON_CHARACTERS]} ..."


def list_tables(
    url: str, extensions: Collection[str], *, compressed: bool = False
) -> tuple[list[SourceFile], Counter[str]]:
    """Return a table source's files that hold anything, and what was left out.

    A single file counts whatever its extension.

    Args:
        url: of the source.
        extensions: of its files, with their dots.
        compressed: whether files may be compressed as a whole.

    Raises:
        NotFoundError: no such file is there, or all are empty.
        ConfigError: a file is compressed and may not be, or its name is not UTF-8; and as `list_files`.
        UnavailableError: the store does not answer.
    """
    files = list_files(url)
    alone = len(files) == 1 and files[0].path == resolve_url(url)[1]
    wanted = [file for file in files if alone or _is_table(file, extensions)]
    ignored = Counter(file.extension or "(none)" for file in files if file not in wanted)
    if not wanted:
        raise NotFoundError(
            f"cannot ingest {redact_url(url)}: none of its {len(files)} files is called "
            f"{' or '.join(f'*{extension}' for extension in sorted(extensions))}"
        )
    _check_names(wanted, compressed=compressed)
    filled = [file for file in wanted if file.size_bytes]
    ignored.update({EMPTY: len(wanted) - len(filled)} if len(filled) < len(wanted) else {})
    if not filled:
        raise all_empty(url, wanted)
    return filled, ignored


def all_empty(url: str, files: Sequence[SourceFile]) -> NotFoundError:
    """Return the error for a source without any sample."""
    named = ", ".join(file.name for file in files[:_NAMED_FILES])
    return NotFoundError(f"cannot ingest {redact_url(url)}: no samples in any of its {len(files)} files ({named})")


def look_at(reader: FileReader, files: Sequence[SourceFile], look: Callable[[SourceFile], Listed]) -> list[Listed]:
    """Return `look` of each file, in order; several remote files at once."""
    if reader.is_local or len(files) == 1:
        return [look(file) for file in files]
    with ThreadPoolExecutor(_LISTED_AT_ONCE, thread_name_prefix="datasvc-list") as pool:
        return list(pool.map(look, files))


def table_split(file: SourceFile, options: SourceOptions) -> str:
    """Return the split of a file's samples."""
    return split_of(file.name) if options.split is None else options.split.lower()


def is_compressed(file: SourceFile) -> bool:
    """Return whether a file is compressed as a whole."""
    return file.name.lower().endswith(tuple(COMPRESSIONS))


def _is_table(file: SourceFile, extensions: Collection[str]) -> bool:
    return file.extension in extensions and file.name.rpartition("/")[2] not in _DESCRIPTIONS


def _check_names(files: Sequence[SourceFile], *, compressed: bool) -> None:
    for file in files:
        try:
            file.name.encode()
        except UnicodeEncodeError:
            printable = file.name.encode("utf-8", "backslashreplace").decode()
            raise ConfigError(f"the name of {printable} is not UTF-8; rename it") from None
        if is_compressed(file) and not compressed:
            raise ConfigError(f"{file.name} is compressed as a whole; unpack it, it is read piece by piece")


def _decoded_bytes(column: pa.Array) -> int:
    """Return at most how many bytes a column takes once its dictionary is decoded."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    values = column.dictionary
    longest = 8
    if len(values) and (is_text(values.type) or is_binary(values.type)):
        longest = pc.max(pc.binary_length(values)).as_py() or 0
    return int(column.indices.nbytes) + longest * len(column)


def _converted(
    columns: ColumnMap, batch: pa.RecordBatch, keys: pa.Array, split: str
) -> Iterator[pa.RecordBatch | BadSample]:
    try:
        batch.validate(full=True)  # text that is not UTF-8, offsets that lead astray
        samples = columns.convert(batch, keys)
    except (ConfigError, pa.ArrowException) as error:
        if batch.num_rows == 1:
            yield BadSample(split, keys[0].as_py(), reason_of(error))
            return
        middle = batch.num_rows // 2
        yield from _converted(columns, batch.slice(0, middle), keys.slice(0, middle), split)
        yield from _converted(columns, batch.slice(middle), keys.slice(middle), split)
    else:
        yield from _cut(samples)


def _cut(samples: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if samples.num_rows == 1 or samples.nbytes <= BATCH_BYTES:
        yield samples
        return
    middle = samples.num_rows // 2
    yield from _cut(samples.slice(0, middle))
    yield from _cut(samples.slice(middle))
