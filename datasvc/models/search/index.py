"""The index of all model versions: columns kept in the repository; a search reads one file and not every entry.

It is derived from the entries and may be lost or be old at any time: it says how far it knows each model, and whoever
finds entries behind that reads them, and now and then writes the whole index anew. Of several writers the last one
wins, which loses nothing. Tags and removals change without a new version and are never in it. An index that knows
other commits than the logs have, as after one of the two came back from a backup, is made anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError
from datasvc.models.search.columns import FieldColumn, build_columns
from datasvc.repository import Entry, Repository
from datasvc.repository.logs.references import is_name
from datasvc.repository.objects.objects import digest_of

INDEX_FORMAT: Final = 2
# No model can have that name.
INDEX_PATH: Final = "models/.index"
# Far more than millions of versions take. What claims to be larger is damage, and written anew from the entries.
_MAX_BYTES: Final = 1 << 30
_DIGEST_BYTES: Final = 64
_NAMES_AT_ONCE: Final = 16
# Entries behind the index are read by every search: so many, or that part of all, are a reason to write it anew.
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
    """The newest version of a model that is known."""

    number: int
    commit: str


@dataclass(frozen=True)
class IndexPart:
    """The versions that were indexed at one time.

    Attributes:
        num_rows: number of versions.
        heads: the newest version of each model that is known, and its commit.
        columns: by field.
    """

    num_rows: int
    heads: Mapping[str, Head]
    columns: Mapping[str, FieldColumn]


@dataclass(frozen=True)
class VersionIndex:
    """All versions of all models of a repository, removed ones too, as rows.

    Attributes:
        parts: rows of the first come first.
    """

    parts: tuple[IndexPart, ...]

    @property
    def num_rows(self) -> int:
        """Number of versions."""
        return sum(part.num_rows for part in self.parts)

    @property
    def heads(self) -> dict[str, Head]:
        """The newest version of each model, and its commit."""
        return {name: head for part in self.parts for name, head in part.heads.items()}

    @property
    def fields(self) -> frozenset[str]:
        """Every field that one of the versions has."""
        return frozenset(field for part in self.parts for field in part.columns)

    def column(self, field: str) -> FieldColumn | None:
        """Return the values of a field in all versions, None where none has it."""
        starts = np.cumsum([0, *(part.num_rows for part in self.parts)]).tolist()
        found = [
            (start, part.columns[field])
            for start, part in zip(starts, self.parts, strict=False)
            if field in part.columns
        ]
        return FieldColumn.join(found) if found else None


def read_index(repository: Repository, *, report: Callable[[int, int], None] | None = None) -> VersionIndex:
    """Return the index, as new as the repository; writes it anew when many versions were missing.

    Args:
        repository: whose models.
        report: called with how many entries were read of how many that the stored index lacks.

    Raises:
        CorruptDataError, UnavailableError: an entry cannot be read, see `Log.read`.
    """
    stored = _load(repository)
    names = [name for name in repository.storage.list("models") if is_name(name)]
    behind = None
    if stored is not None and set(stored.heads) <= set(names):
        behind = _numbers_behind(repository, names, stored.heads)
    if stored is None or behind is None:
        stored = IndexPart(0, {}, {})
        behind = _numbers_behind(repository, names, {})
        assert behind is not None
    entries = _read_entries(repository, behind, report or _ignore)
    if not entries:
        return VersionIndex((stored,))
    # Ascending, so that the last one of each stays.
    heads = {name: Head(entry.number, str(entry.content.get("commit"))) for name, entry in entries}
    index = VersionIndex((stored, IndexPart(len(entries), heads, build_columns(entries))))
    if len(entries) >= max(_MAX_BEHIND, stored.num_rows // _PART_BEHIND):
        _publish(repository, index)
    return index


def encode_index(index: VersionIndex) -> bytes:
    """Return the index as an Arrow IPC file behind the digest of its bytes."""
    fields = sorted(index.fields)
    columns = [column for column in map(index.column, fields) if column is not None]
    about = {"format": INDEX_FORMAT, "rows": index.num_rows, "heads": index.heads}
    table = pa.table(
        [
            pa.array(fields, pa.string()),
            _lists([column.rows for column in columns], pa.int32()),
            _lists([column.numbers for column in columns], pa.float64()),
            _lists([column.codes for column in columns], pa.int32()),
            _lists([column.texts for column in columns], pa.string()),
        ],
        schema=_SCHEMA.with_metadata({_METADATA_KEY: json.dumps(about, sort_keys=True).encode()}),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table.combine_chunks())
    content = sink.getvalue().to_pybytes()
    return digest_of(content).encode() + bytes(content)


def decode_index(raw: bytes) -> IndexPart:
    """Return the part in an index's bytes. Raises CorruptDataError: damaged, or of another format."""
    content = memoryview(raw)[_DIGEST_BYTES:]
    if digest_of(content).encode() != raw[:_DIGEST_BYTES]:
        raise CorruptDataError("the index does not match its digest")
    try:
        table = pa.ipc.open_file(pa.py_buffer(content)).read_all().combine_chunks()
        about = json.loads(table.schema.metadata[_METADATA_KEY])
        if about["format"] != INDEX_FORMAT or not table.schema.equals(_SCHEMA):
            raise CorruptDataError(f"an index of format {about['format']}")
        num_rows, heads = (
            int(about["rows"]),
            {str(name): Head(int(number), str(commit)) for name, (number, commit) in about["heads"].items()},
        )
        columns = dict(zip(table["field"].to_pylist(), map(_column, *_slices(table)), strict=True))
    except (pa.ArrowException, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptDataError(f"the index is damaged: {error!r}") from error
    if not all(_fits(column, num_rows) for column in columns.values()):
        raise CorruptDataError("the index names versions that it does not have")
    return IndexPart(num_rows, heads, columns)


def _load(repository: Repository) -> IndexPart | None:
    try:
        return decode_index(repository.storage.read(INDEX_PATH, _MAX_BYTES))
    except (NotFoundError, CorruptDataError):
        return None  # the entries say all that it said


def _publish(repository: Repository, index: VersionIndex) -> None:
    content = encode_index(index)
    if len(content) > _MAX_BYTES:
        return  # it would not be read again
    try:
        repository.storage.put_bytes(INDEX_PATH, content, synced=False)
    except UnavailableError:
        # Not ours to write to, or full: the search has its answer all the same, the next one takes as long again.
        return


def _numbers_behind(
    repository: Repository, names: Sequence[str], heads: Mapping[str, Head]
) -> dict[str, Sequence[int]] | None:
    """Return by name what the index does not know, ascending; None where it knows what the logs do not have."""

    def numbers_behind(name: str) -> Sequence[int] | None:
        log = repository.versions("models", name)
        if name not in heads:
            return log.numbers()
        number, commit = heads[name]
        try:
            is_known = str(log.read(number).content.get("commit")) == commit
        except NotFoundError:
            is_known = False
        return log.numbers_after(number) if is_known else None

    if repository.storage.is_local:
        found = list(map(numbers_behind, names))
    else:
        with ThreadPoolExecutor(_NAMES_AT_ONCE, thread_name_prefix="datasvc-index") as pool:
            found = list(pool.map(numbers_behind, names))
    behind = {name: numbers for name, numbers in zip(names, found, strict=True) if numbers is not None}
    return behind if len(behind) == len(names) else None


def _read_entries(
    repository: Repository, behind: Mapping[str, Sequence[int]], report: Callable[[int, int], None]
) -> list[tuple[str, Entry]]:
    """Return what the index does not know: by name, oldest first."""
    num_behind = sum(map(len, behind.values()))
    found: list[tuple[str, Entry]] = []
    for name, numbers in behind.items():
        for start in range(0, len(numbers), _MAX_BEHIND):
            some = repository.versions("models", name).entries(numbers[start : start + _MAX_BEHIND])
            found.extend((name, entry) for entry in some)
            report(len(found), num_behind)
    return found


def _lists(values: Sequence[object], of: pa.DataType) -> pa.Array:
    arrays = [pa.array(each, of) for each in values]
    offsets = np.cumsum([0, *map(len, arrays)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.concat_arrays([pa.array([], of), *arrays]))


def _slices(table: pa.Table) -> list[list[pa.Array]]:
    """Return the lists of each column but the first, as slices of its values."""
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


def _ignore(_num_read: int, _num_behind: int) -> None:
    """Report to nobody."""
