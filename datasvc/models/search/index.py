"""Index of all model versions: columns in one file of the repository, so that a search need not read every entry.

The index is derived from the entries; it may be lost or outdated at any time. It records the newest version that it
covers of each model. A reader adds the entries after it, and rewrites the file when there are many. Of concurrent
writers the last one wins, which loses no data. Tags and removals change without a new version and are not indexed. An
index whose commits differ from those of the logs, for example after a restored backup, is rebuilt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError
from datasvc.models.search.columns import FieldColumn, build_columns
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Entry, Repository
from datasvc.repository.logs.references import is_name
from datasvc.repository.objects.objects import digest_of

INDEX_FORMAT: Final = 2
# A model name cannot begin with a dot, so no log has this path.
INDEX_PATH: Final = "models/.index"
# Millions of versions need far less. A larger file is damaged, and is rebuilt from the entries.
_MAX_BYTES: Final = 1 << 30
_DIGEST_BYTES: Final = 64
_NAMES_AT_ONCE: Final = 16
# Every search reads the entries that the index lacks. The index is rewritten when it lacks at least `_MAX_BEHIND`
# entries and 1/`_PART_BEHIND` of the versions that it has.
_MAX_BEHIND: Final = 32
_PART_BEHIND: Final = 32
_METADATA_KEY = b"datasvc.models.index"
_SCHEMA = pa.schema(
    [
        pa.field("field", pa.string(), nullable=False),
        pa.field("rows", pa.list_(pa.int32()), nullable=False),
        pa.field("numbers", pa.list_(pa.float64()), nullable=False),
        pa.field("codes", pa.list_(pa.int32()), nullable=False),
        pa.field("texts", pa.list_(pa.string()), nullable=False),
    ]
)


class Head(NamedTuple):
    """Newest indexed version of a model."""

    number: int
    commit: str


@dataclass(frozen=True)
class IndexPart:
    """Versions that were indexed together.

    Attributes:
        num_rows: number of versions.
        heads: newest indexed version of each model, by model name.
        columns: columns by field.
    """

    num_rows: int
    heads: Mapping[str, Head]
    columns: Mapping[str, FieldColumn]


@dataclass(frozen=True)
class VersionIndex:
    """All versions of all models of a repository as rows, removed versions included.

    Attributes:
        parts: parts of the index; the rows of the first part come first.
    """

    parts: tuple[IndexPart, ...]

    @property
    def num_rows(self) -> int:
        """Number of versions."""
        return sum(part.num_rows for part in self.parts)

    @property
    def heads(self) -> dict[str, Head]:
        """Newest version of each model, by model name."""
        return {name: head for part in self.parts for name, head in part.heads.items()}

    @property
    def fields(self) -> frozenset[str]:
        """Fields that at least one version has."""
        return frozenset(field for part in self.parts for field in part.columns)

    def column(self, field: str) -> FieldColumn | None:
        """Return the values of a field over all versions; None if no version has the field."""
        starts = np.cumsum([0, *(part.num_rows for part in self.parts)]).tolist()
        columns = [
            (start, part.columns[field])
            for start, part in zip(starts, self.parts, strict=False)
            if field in part.columns
        ]
        return FieldColumn.join(columns) if columns else None


def read_index(repository: Repository, *, progress: Progress = NO_PROGRESS) -> VersionIndex:
    """Return an up-to-date index; rewrite the stored one if it lacks many versions.

    Args:
        repository: repository of the models.
        progress: counts the missing entries that are read.

    Raises:
        CorruptDataError, UnavailableError: an entry cannot be read, see `Log.read`.
    """
    stored = _load(repository)
    names = [name for name in repository.storage.list("models") if is_name(name)]
    behind = None
    # An indexed model without a log means that the logs were replaced.
    if stored is not None and set(stored.heads) <= set(names):
        behind = _numbers_behind(repository, names, stored.heads)
    if stored is None or behind is None:
        stored = IndexPart(0, {}, {})
        behind = _numbers_behind(repository, names, {})
        assert behind is not None
    entries = _read_entries(repository, behind, progress)
    if not entries:
        return VersionIndex((stored,))
    # Versions of a model are in ascending order, so the newest one overwrites the others.
    heads = {name: Head(entry.number, str(entry.content.get("commit"))) for name, entry in entries}
    index = VersionIndex((stored, IndexPart(len(entries), heads, build_columns(entries))))
    if len(entries) >= max(_MAX_BEHIND, stored.num_rows // _PART_BEHIND):
        _publish(repository, index)
    return index


def encode_index(index: VersionIndex) -> bytes:
    """Return the index as bytes: a digest, followed by an Arrow IPC file with that digest."""
    fields = sorted(index.fields)
    columns = [column for column in map(index.column, fields) if column is not None]
    metadata = {"format": INDEX_FORMAT, "rows": index.num_rows, "heads": index.heads}
    table = pa.table(
        [
            pa.array(fields, pa.string()),
            _lists([column.rows for column in columns], pa.int32()),
            _lists([column.numbers for column in columns], pa.float64()),
            _lists([column.codes for column in columns], pa.int32()),
            _lists([column.texts for column in columns], pa.string()),
        ],
        schema=_SCHEMA.with_metadata({_METADATA_KEY: json.dumps(metadata, sort_keys=True).encode()}),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table.combine_chunks())
    content = sink.getvalue().to_pybytes()
    return digest_of(content).encode() + bytes(content)


def decode_index(raw: bytes) -> IndexPart:
    """Decode the bytes of an index.

    Raises:
        CorruptDataError: the index is damaged or has another format.
    """
    content = memoryview(raw)[_DIGEST_BYTES:]
    if digest_of(content).encode() != raw[:_DIGEST_BYTES]:
        raise CorruptDataError("the index does not match its digest")
    try:
        table = pa.ipc.open_file(pa.py_buffer(content)).read_all().combine_chunks()
        metadata = json.loads(table.schema.metadata[_METADATA_KEY])
        if metadata["format"] != INDEX_FORMAT or not table.schema.equals(_SCHEMA):
            raise CorruptDataError(f"the index has format {metadata['format']}; expected format {INDEX_FORMAT}")
        num_rows, heads = (
            int(metadata["rows"]),
            {str(name): Head(int(number), str(commit)) for name, (number, commit) in metadata["heads"].items()},
        )
        columns = dict(zip(table["field"].to_pylist(), map(_column, *_slices(table)), strict=True))
    except (pa.ArrowException, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptDataError(f"the index is damaged: {error!r}") from error
    if not all(_fits(column, num_rows) for column in columns.values()):
        raise CorruptDataError(f"the index is damaged: a column refers to a row or text outside its {num_rows} rows")
    return IndexPart(num_rows, heads, columns)


def _load(repository: Repository) -> IndexPart | None:
    try:
        return decode_index(repository.storage.read(INDEX_PATH, _MAX_BYTES))
    except (NotFoundError, CorruptDataError):
        return None  # it is rebuilt from the entries


def _publish(repository: Repository, index: VersionIndex) -> None:
    content = encode_index(index)
    if len(content) > _MAX_BYTES:
        return  # `_load` would reject it
    try:
        # Not synced: an index that a power cut damages is rebuilt.
        repository.storage.put_bytes(INDEX_PATH, content, synced=False)
    except UnavailableError:
        # A read-only or full store costs only time: this search has its result, and the next one reads the same
        # entries again.
        return


def _numbers_behind(
    repository: Repository, names: Sequence[str], heads: Mapping[str, Head]
) -> dict[str, Sequence[int]] | None:
    """Return the numbers of versions that the index lacks, by model, ascending.

    Returns:
        None if the index has a commit that is not in the logs.
    """

    def numbers_behind(name: str) -> Sequence[int] | None:
        log = repository.versions("models", name)
        if name not in heads:
            return log.numbers()
        number, commit = heads[name]
        try:
            is_same_commit = str(log.read(number).content.get("commit")) == commit
        except NotFoundError:
            is_same_commit = False
        return log.numbers_after(number) if is_same_commit else None

    if repository.storage.is_local:
        numbers_of = list(map(numbers_behind, names))
    else:
        with ThreadPoolExecutor(_NAMES_AT_ONCE, thread_name_prefix="datasvc-index") as pool:
            numbers_of = list(pool.map(numbers_behind, names))
    behind = {name: numbers for name, numbers in zip(names, numbers_of, strict=True) if numbers is not None}
    return behind if len(behind) == len(names) else None


def _read_entries(
    repository: Repository, behind: Mapping[str, Sequence[int]], progress: Progress
) -> list[tuple[str, Entry]]:
    """Read the entries that the index lacks, model by model, oldest first."""
    if behind:
        progress.begin(sum(map(len, behind.values())))
    entries: list[tuple[str, Entry]] = []
    for name, numbers in behind.items():
        for start in range(0, len(numbers), _MAX_BEHIND):
            block = repository.versions("models", name).entries(numbers[start : start + _MAX_BEHIND])
            entries.extend((name, entry) for entry in block)
            progress.advance(len(block))
    return entries


def _lists(values: Sequence[object], of: pa.DataType) -> pa.Array:
    arrays = [pa.array(items, of) for items in values]
    offsets = np.cumsum([0, *map(len, arrays)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.concat_arrays([pa.array([], of), *arrays]))


def _slices(table: pa.Table) -> list[list[pa.Array]]:
    """Return, for each column except the first, one slice of its values per row."""
    columns = []
    for field in _SCHEMA.names[1:]:
        column = table[field].combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        offsets, values = column.offsets.to_pylist(), column.values
        columns.append([values[start:stop] for start, stop in pairwise(offsets)])
    return columns


def _fits(column: FieldColumn, num_rows: int) -> bool:
    if not len(column.rows):
        return True
    bounds = (column.rows.min(), column.rows.max(), column.codes.min(), column.codes.max())
    return bool(bounds[0] >= 0 and bounds[1] < num_rows and bounds[2] >= -1 and bounds[3] < len(column.texts))


def _column(rows: pa.Array, numbers: pa.Array, codes: pa.Array, texts: pa.Array) -> FieldColumn:
    return FieldColumn(
        rows.to_numpy(zero_copy_only=True),
        numbers.to_numpy(zero_copy_only=True),
        codes.to_numpy(zero_copy_only=True),
        texts,
    )
