"""Index of all model versions: a table in one file of the repository, so that a query need not read every entry.

The index is derived from the entries, so it may be lost or outdated at any time. For each model it records the newest
version that it contains. A reader adds the entries after that version, and rewrites the file if it has added many. If
the commits in the index differ from those in the logs, for example after a backup is restored, the index is rebuilt.
Tags and removals are not indexed, because they change without a new version. The index also lists the versions that
cannot be read, and those with fields of a wrong type, which are null in their rows. Each query reads these versions
again: it warns if nothing has changed, and builds the index again if one is correct now.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.models.search.rows import KINDS, MAX_DEPTH, SCHEMA, TREES, VALUES, Field, build_rows
from datasvc.models.versions.entry_fields import has_valid_fields
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Entry, Repository
from datasvc.repository.logs.references import is_name
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.storage import ReadOnlyStorage
from datasvc.shards.format.ipc_reader import PARSE_ERRORS, read_table
from datasvc.threads import map_in_threads

_Result = TypeVar("_Result")

INDEX_FORMAT: Final = 6
# A model name cannot begin with a dot, so no log has this path.
INDEX_PATH: Final = "models/.index"
# An index of millions of versions is far smaller. So a larger file is damaged, and the index is rebuilt.
_MAX_BYTES: Final = 1 << 30
_DIGEST_BYTES: Final = 64
_MODELS_AT_ONCE: Final = 16
# Every query reads the entries that the index lacks. The index is rewritten only if it lacks at least `_MAX_MISSING`
# entries, and at least 1/`_MISSING_PART` as many as it has: rewriting it for every new version would cost more.
_MAX_MISSING: Final = 32
_MISSING_PART: Final = 32
_METADATA_KEY = b"datasvc.models.index"
_MAX_UNPUBLISHED_BYTES: Final = 32 << 20
_INVISIBLE: Final = "queries do not see these fields"


class Head(NamedTuple):
    """Newest indexed version of a model: its number, and the id of its commit."""

    number: int
    commit: str


_NO_HEAD: Final = Head(0, "")


@dataclass(frozen=True)
class VersionIndex:
    """All versions of all models of a repository as rows, removed versions included.

    Attributes:
        table: the rows, of `rows.SCHEMA`.
        fields: fields that the values in the rows refer to.
        heads: newest indexed version of each model, by model name.
        unreadable: versions up to the heads that could not be read when they were to be indexed, by model name.
        invalid: versions in the table whose entries have a field of a wrong type, by model name.
    """

    table: pa.Table
    fields: Sequence[Field]
    heads: Mapping[str, Head]
    unreadable: Mapping[str, Sequence[int]] = field(default_factory=dict)
    invalid: Mapping[str, Sequence[int]] = field(default_factory=dict)


# Of each repository that is opened read-only, the index that cannot be stored.
_unpublished: WeakKeyDictionary[Repository, VersionIndex] = WeakKeyDictionary()


def read_index(repository: Repository, *, progress: Progress = NO_PROGRESS) -> VersionIndex:
    """Return an up-to-date index; rewrite the stored one if it lacks many versions, unless opened read-only.

    Versions that cannot be read are left out with an `UnreadableVersionWarning`. There is also one for each version
    with a field of a wrong type.

    Args:
        repository: repository of the models.
        progress: counts the missing entries that are read.

    Raises:
        UnavailableError: the store does not respond.
    """
    stored = _load(repository)
    names = [name for name in repository.storage.list("models") if is_name(name)]
    missing = None
    # An indexed model without a log means that the logs were replaced.
    if stored is not None and set(stored.heads) <= set(names):
        missing = _find_missing(repository, names, stored.heads)
        if missing is not None and _is_restored(repository, stored):
            missing = None
    if stored is None or missing is None:
        stored = VersionIndex(SCHEMA.empty_table(), (), {})
        missing = _find_missing(repository, names, {})
        assert missing is not None
    entries = _read_entries(repository, missing, progress)
    invalid = {name: list(numbers) for name, numbers in stored.invalid.items()}
    for name, entry in entries:
        if not has_valid_fields(name, entry, _INVISIBLE):
            invalid.setdefault(name, []).append(entry.number)
    if not entries:
        return stored
    fields = {known: position for position, known in enumerate(stored.fields)}  # `build_rows` adds new fields
    table = pa.concat_tables([stored.table, build_rows(entries, fields)]).combine_chunks()
    # Versions of a model are in ascending order, so the head of the newest one overwrites the others.
    heads = {name: Head(entry.number, str(entry.content.get("commit"))) for name, entry in entries}
    found = {(name, entry.number) for name, entry in entries}
    unreadable = {name: list(numbers) for name, numbers in stored.unreadable.items()}
    for name, numbers in missing.items():
        # Versions after the head are not listed: the next query finds them missing, and reads them again.
        skipped = [
            number for number in numbers if (name, number) not in found and number < heads.get(name, _NO_HEAD).number
        ]
        if skipped:
            unreadable.setdefault(name, []).extend(skipped)
    index = VersionIndex(table, tuple(fields), {**stored.heads, **heads}, unreadable, invalid)
    if len(entries) >= max(_MAX_MISSING, stored.table.num_rows // _MISSING_PART):
        _publish(repository, index)
    return index


def map_models(repository: Repository, read: Callable[[str], _Result], names: Collection[str]) -> list[_Result]:
    """Return the result of `read` for each of the model names, in the same order."""
    # Threads hide the latency of a network; a local disk has none.
    if repository.storage.is_local:
        return list(map(read, names))
    return map_in_threads(read, names, _MODELS_AT_ONCE)


def encode_index(index: VersionIndex) -> bytes:
    """Return the index as bytes: a digest, followed by an Arrow IPC file with that digest."""
    metadata = {"format": INDEX_FORMAT, "fields": index.fields, "heads": index.heads}
    metadata |= {"unreadable": index.unreadable} if index.unreadable else {}
    metadata |= {"invalid": index.invalid} if index.invalid else {}
    sink = pa.BufferOutputStream()
    schema = SCHEMA.with_metadata({_METADATA_KEY: json.dumps(metadata, sort_keys=True).encode()})
    with pa.ipc.new_file(sink, schema) as file:
        file.write_table(index.table)
    content = sink.getvalue().to_pybytes()
    return digest_of(content).encode() + bytes(content)


def decode_index(raw: bytes) -> VersionIndex:
    """Decode the bytes of an index.

    Raises:
        CorruptDataError: the index is damaged or has another format.
    """
    content = memoryview(raw)[_DIGEST_BYTES:]
    if digest_of(content).encode() != raw[:_DIGEST_BYTES]:
        raise CorruptDataError("the index does not match its digest")
    # The digest finds damage, but not a file that another program wrote: check every position before it is followed.
    table = read_table(content, "the index").combine_chunks()
    try:
        metadata = json.loads(table.schema.metadata[_METADATA_KEY])
        if metadata["format"] != INDEX_FORMAT or not table.schema.equals(SCHEMA):
            raise CorruptDataError(f"the index has format {metadata['format']}; expected format {INDEX_FORMAT}")
        heads = {str(name): Head(int(number), str(commit)) for name, (number, commit) in metadata["heads"].items()}
        fields = [Field(tuple(path), str(kind), bool(is_list)) for path, kind, is_list in metadata["fields"]]
        unreadable, invalid = (
            {str(name): [int(number) for number in numbers] for name, numbers in metadata.get(part, {}).items()}
            for part in ("unreadable", "invalid")
        )
        _check_rows(table, fields)
    except (*PARSE_ERRORS, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"the index is damaged: {error!r}") from error
    return VersionIndex(table.replace_schema_metadata(), fields, heads, unreadable, invalid)


def _check_rows(table: pa.Table, fields: Sequence[Field]) -> None:
    """Raise ValueError if the rows of an index have no model, version or values, or refer to an unknown field."""
    for indexed in fields:
        is_named = 1 < len(indexed.path) <= MAX_DEPTH and all(isinstance(name, str) for name in indexed.path)
        if not is_named or indexed.path[0] not in TREES or indexed.kind not in KINDS:
            raise ValueError(f"{indexed} is not a field")
    values = table[VALUES].combine_chunks()
    numbers = values.flatten().field("field")
    if any(column.null_count for column in (table["model"], table["version"], values, numbers)):
        raise ValueError("a row lacks a value")
    if len(numbers) and not 0 <= pc.min(numbers).as_py() <= pc.max(numbers).as_py() < len(fields):
        raise ValueError(f"a value refers to a field that is not one of {len(fields)}")


def _load(repository: Repository) -> VersionIndex | None:
    """Return the stored index; None if there is none or it is damaged, so that it is built again from the entries."""
    if (unpublished := _unpublished.get(repository)) is not None:
        return unpublished
    try:
        index = decode_index(repository.storage.read(INDEX_PATH, _MAX_BYTES))
    except (NotFoundError, CorruptDataError):
        return None
    return index if set(pc.unique(index.table["model"]).to_pylist()) <= set(index.heads) else None


def _is_restored(repository: Repository, index: VersionIndex) -> bool:
    """Return whether a version listed as unreadable or invalid is correct now; warn about those that are not."""
    # Lists instead of generators, because every version must be checked.
    readable = [
        bool(repository.readable_entries("models", name, numbers)) for name, numbers in index.unreadable.items()
    ]
    valid = [
        has_valid_fields(name, entry, _INVISIBLE)
        for name, numbers in index.invalid.items()
        for entry in repository.readable_entries("models", name, numbers)
    ]
    return any(readable) or any(valid)


def _publish(repository: Repository, index: VersionIndex) -> None:
    if isinstance(repository.storage, ReadOnlyStorage):
        # A page asks again and again: the next query of this process need not read the same entries.
        if index.table.nbytes <= _MAX_UNPUBLISHED_BYTES:
            _unpublished[repository] = index
        return
    content = encode_index(index)
    if len(content) > _MAX_BYTES:
        return  # `_load` would reject it
    try:
        # No sync is needed, because an index that a power cut damages is rebuilt. No lock is needed, because the last
        # of concurrent writers replaces an index that is as correct as its own.
        repository.storage.put_bytes(INDEX_PATH, content, synced=False)
    except UnavailableError:
        # Ignore a read-only or full store: this query has its result. The next query only takes longer, because it
        # reads the same entries again.
        return


def _find_missing(
    repository: Repository, names: Sequence[str], heads: Mapping[str, Head]
) -> dict[str, Sequence[int]] | None:
    """Return the versions that the index lacks, by model; None if the index has a commit that no log has."""

    def find(name: str) -> Sequence[int] | None:
        log = repository.versions("models", name)
        if name not in heads:
            return log.numbers()
        number, commit = heads[name]
        try:
            is_same_commit = str(log.read(number).content.get("commit")) == commit
        except (NotFoundError, CorruptDataError, ConfigError):
            is_same_commit = False
        return log.numbers_after(number) if is_same_commit else None

    numbers_by_name = dict(zip(names, map_models(repository, find, names), strict=True))
    missing = {name: numbers for name, numbers in numbers_by_name.items() if numbers is not None}
    return missing if len(missing) == len(names) else None


def _read_entries(
    repository: Repository, missing: Mapping[str, Sequence[int]], progress: Progress
) -> list[tuple[str, Entry]]:
    """Return the readable entries that the index lacks, model by model, oldest first."""
    if missing:
        progress.begin(sum(map(len, missing.values())))
    entries: list[tuple[str, Entry]] = []
    for name, numbers in missing.items():
        # In blocks, so that the progress advances during the first query over many versions.
        for start in range(0, len(numbers), _MAX_MISSING):
            block = numbers[start : start + _MAX_MISSING]
            readable = repository.readable_entries("models", name, block)
            entries.extend((name, entry) for entry in readable)
            progress.advance(len(block))
    return entries
