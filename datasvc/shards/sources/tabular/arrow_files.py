"""Arrow IPC files and streams, and Feather files of version 2, which are such files.

Local ones are mapped, so that a record batch of any size is read slice by slice. What was read is given back as the
reader moves on: mapped pages count as memory of the process otherwise.
"""

from __future__ import annotations

import mmap
import os
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
from datasvc.shards.sources.common.files import FileReader, SourceFile
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.seekable import open_seekable
from datasvc.shards.sources.common.source import BadSample, SourcePart
from datasvc.shards.sources.common.tables import (
    RawBatch,
    TableSource,
    all_empty,
    list_tables,
    look_at,
    reason_of,
    rough_cuts,
    row_keys,
    table_split,
)
from datasvc.shards.sources.tabular.features import features_of_files, image_columns, label_column

EXTENSIONS: Final = frozenset({".arrow", ".arrows", ".feather", ".ipc"})
_MAGIC: Final = b"ARROW1"
_FEATHER_1: Final = b"FEA1"
_GIVEN_BACK_BYTES: Final = 16 << 20
_FIRST_SAMPLES: Final = 32


@dataclass(frozen=True)
class ArrowFiles(TableSource):
    """Listed Arrow files. A sample's key is `FILE#ROW` where no column holds keys."""

    kind: ClassVar[str] = "arrow"

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> ArrowFiles:
        """List the source: every file's schema is read.

        Raises:
            NotFoundError: nothing is there, or no samples are.
            ConfigError: a file is no Arrow file, or files differ in their columns; and as `ColumnMap`.
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
    ) -> ArrowFiles:
        """Return a source of listed files; `features`: what Hugging Face says of them, if known. Raises as `list`."""
        reader = FileReader(url)
        schemas = look_at(reader, files, lambda file: (file.name, _read_schema(reader, file)))
        raw = join_schemas(schemas)
        features = features or features_of_files(schemas)
        label, classes = label_column(features, raw)
        parts = [
            SourcePart(
                table_split(file, options),
                file.name,
                file.size_bytes,
                stamp=file.stamp,
                where={"path": file.path, "name": file.name},
            )
            for file in files
        ]
        first = _first_samples(reader, parts)
        if first is None:
            raise all_empty(url, files)
        columns = ColumnMap(raw, first, key=options.key, images=image_columns(features, raw), label=label)
        return cls(url, columns.schema, classes, parts, columns, ignored)

    def read_raw(self, part: SourcePart) -> Iterator[RawBatch | BadSample]:
        """Yield the samples of one part with raw columns."""
        return read_arrow(FileReader(self.url), part)


def read_arrow(reader: FileReader, part: SourcePart) -> Iterator[RawBatch | BadSample]:
    """Yield the raw samples of an Arrow file.

    Raises:
        NotFoundError, UnavailableError: see `storage.translated`.
    """
    name, row = part.where["name"], 0
    try:
        with _opened(reader, part.where["path"]) as (batches, give_back):
            held_bytes = 0
            for batch in batches:
                batch.validate()
                for piece in rough_cuts(batch):
                    yield RawBatch(piece, row_keys(name, row, piece.num_rows))
                    row += piece.num_rows
                    held_bytes += piece.nbytes
                    if held_bytes >= _GIVEN_BACK_BYTES:
                        give_back()
                        held_bytes = 0
    except (pa.ArrowException, OSError) as error:
        yield BadSample(part.split, f"{name}#{row}", f"the file cannot be read from row {row} on: {reason_of(error)}")


def _first_samples(reader: FileReader, parts: Sequence[SourcePart]) -> pa.RecordBatch | None:
    """Return some first samples; None where no part has any."""
    unreadable = None
    for part in parts:
        found = next(read_arrow(reader, part), None)
        if isinstance(found, RawBatch):
            return found.batch.slice(0, _FIRST_SAMPLES)
        unreadable = unreadable or found
    if unreadable is not None:
        raise ConfigError(f"{unreadable.key}: {unreadable.reason}; mend the file, or leave it out of the source")
    return None


def _read_schema(reader: FileReader, file: SourceFile) -> pa.Schema:
    try:
        with _open_ipc(reader, file.path) as (ipc, _):
            return checked_names(ipc.schema)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file.name} is no readable Arrow file or stream: {reason_of(error)}; mend it, or leave it out of the "
            "source"
        ) from error


@contextmanager
def _opened(reader: FileReader, path: str) -> Iterator[tuple[Iterator[pa.RecordBatch], Callable[[], None]]]:
    with _open_ipc(reader, path) as (ipc, give_back):
        if isinstance(ipc, pa.RecordBatchFileReader):
            yield (ipc.get_batch(number) for number in range(ipc.num_record_batches)), give_back
        else:
            yield iter(ipc), give_back


@contextmanager
def _open_ipc(reader: FileReader, path: str) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Open a file or stream; yields pyarrow's reader, and what gives back the pages read so far."""
    if reader.is_local:
        with map_exceptions("open", path), open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise pa.ArrowInvalid("it is empty")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        content = pa.py_buffer(mapped)
        open_reader = _reader_for(content[: len(_MAGIC)].to_pybytes())
        # Pages that somebody still looks at come back from the file.
        yield open_reader(content), lambda: mapped.madvise(mmap.MADV_DONTNEED)
        return
    if _is_file(reader.read_range(path, 0, len(_MAGIC))):
        with open_seekable(reader, path) as opened:
            yield pa.ipc.open_file(opened), _keep
    else:
        with reader.open(path) as stream:
            yield pa.ipc.open_stream(stream), _keep


def _reader_for(start: bytes) -> Callable[[Any], Any]:
    opener: Callable[[Any], Any] = pa.ipc.open_file if _is_file(start) else pa.ipc.open_stream
    return opener


def _is_file(start: bytes) -> bool:
    if start.startswith(_FEATHER_1):
        raise pa.ArrowInvalid("Feather version 1 is not read; write it again with a current pyarrow")
    return start == _MAGIC


def _keep() -> None:
    """Give nothing back: nothing is mapped."""
