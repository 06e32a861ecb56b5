"""Correct, add, drop and rename columns of a data set: each commits a version, and no shard is written again.

`set_column` changes values, such as wrong labels; `add_column` adds a column, such as scores or labels of another
annotator; `label` gives a class to the samples that satisfy a condition. `compact` stores the values in shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.repository import Objects, Repository, Resolved
from datasvc.shards.format.digests import encode_array
from datasvc.shards.format.overlaid_shard import read_values
from datasvc.shards.format.overlays import Patch
from datasvc.shards.format.schema import KEY, LABEL, is_blob, measured_columns
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.history.edit_columns import count_labels, rename_values, set_values
from datasvc.shards.lines.commit import check_newest, commit_on_line, find_line, head_of_line
from datasvc.shards.sources.column_source import read_column, to_type
from datasvc.shards.sources.common.column_types import is_text
from datasvc.shards.versions.combine import fold_overlays
from datasvc.shards.versions.dataset import DatasetVersion, choose_split, open_dataset
from datasvc.shards.versions.delete import Condition
from datasvc.shards.versions.keys import SplitKeys, first_keys
from datasvc.shards.versions.version_entry import changed_entry

OnMissing = Literal["fail", "ok"]
"""Rule for keys that the data set does not have: "fail" commits nothing, "ok" ignores them."""


@dataclass(frozen=True)
class ColumnReport:
    """The result of a change of columns.

    Attributes:
        version: the committed version; if nothing changes, the newest version.
        changed: number of samples with another value, or with a value in a new column, by split; of `compact`, the
            samples in the shards that it wrote; empty if nothing changes and nothing was committed.
        nulls: number of samples without a value in the column afterwards, by split, of the splits that have any.
        missing: requested keys that no split has, sorted.
        dry_run: whether nothing was committed, and `changed` is what would change in `version`.
    """

    version: Resolved
    changed: dict[str, int]
    nulls: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    dry_run: bool = False


def set_column(
    repository: Repository,
    ref: str,
    column: str,
    source: str | Path | pa.Table,
    *,
    key: str = "key",
    split: str | None = None,
    missing: OnMissing = "fail",
    dry_run: bool = False,
    message: str = "",
) -> ColumnReport:
    """Commit the next version with other values of a column, such as corrected labels, for the samples of `source`.

    Args:
        repository: the repository that stores the data set.
        ref: the version to continue, which must be the newest of its line: NAME, NAME@BRANCH or NAME@VERSION.
        column: the column. `source` has it under this name, or has one column beside the keys. Text of the column
            "label" is names of classes.
        source: URL of a CSV, JSON lines, Parquet or Arrow file; or an Arrow table. An empty value means none.
        key: column of `source` that has the keys.
        split: the only split to change; None: all splits.
        missing: what to do about keys that the data set does not have: fail, or ignore them ("ok").
        dry_run: only count the samples, and commit nothing.
        message: text stored with the version.

    Raises:
        ConfigError: the column holds keys or blobs; a value does not convert without loss, or is no class; a key
            occurs twice in `source`; `source` cannot be read.
        NotFoundError: there is no such version, split or column; or keys do not exist (the message lists up to ten).
        ConflictError: `ref` is not the newest version of its line; or see `Log.append`.
        CorruptDataError, UnknownOutcomeError, UnavailableError: see `Log.append`, `Objects.read`.
    """
    values = read_column(source, column, key)
    change = _Change(repository, ref, column, "set", split, message)

    def edit(dataset: Mapping[str, ShardTable]) -> dict[str, ShardTable]:
        for name, table in dataset.items():
            if column not in table.sample_schema.names:
                raise NotFoundError(
                    f"split {name!r} has no column {column!r}; it has {', '.join(table.sample_schema.names)}: add it "
                    f"with `datasvc columns {change.base.name} add`"
                )
        return _set(change, dataset, values, missing)

    return change.commit(edit, dry_run=dry_run)


def add_column(
    repository: Repository,
    ref: str,
    column: str,
    source: str | Path | pa.Table,
    *,
    key: str = "key",
    split: str | None = None,
    missing: OnMissing = "fail",
    dry_run: bool = False,
    message: str = "",
) -> ColumnReport:
    """Commit the next version with a further column, such as scores, embeddings, or labels of another annotator.

    Samples that `source` does not have are null. No image is read. Arguments and errors are those of `set_column`.
    """
    values = read_column(source, column, key)
    change = _Change(repository, ref, column, "add", split, message)

    def edit(dataset: Mapping[str, ShardTable]) -> dict[str, ShardTable]:
        for name, table in dataset.items():
            if column in table.sample_schema.names:
                raise ConfigError(f"split {name!r} has the column {column!r} already: change its values with set")
        return _set(change, dataset, values, missing)

    return change.commit(edit, dry_run=dry_run)


def drop_column(
    repository: Repository, ref: str, column: str, *, split: str | None = None, message: str = ""
) -> ColumnReport:
    """Commit the next version without a column; older versions still have it. No shard is written.

    Class names stay: labels that are added later have the same numbers. Raise what `set_column` raises.
    """
    change = _Change(repository, ref, column, "drop", split, message)
    return change.commit(lambda tables: _renamed(change, tables, None))


def rename_column(
    repository: Repository, ref: str, column: str, new_name: str, *, split: str | None = None, message: str = ""
) -> ColumnReport:
    """Commit the next version with another name of a column. No shard is written. Raise what `set_column` raises."""
    change = _Change(repository, ref, column, "rename", split, message)
    return change.commit(lambda tables: _renamed(change, tables, new_name))


def label(
    repository: Repository,
    ref: str,
    where: str,
    to: str,
    *,
    split: str | None = None,
    dry_run: bool = False,
    message: str = "",
) -> ColumnReport:
    """Commit the next version in which the samples that satisfy a condition have another class.

    Args:
        repository: the repository that stores the data set.
        ref: the version to continue, which must be the newest of its line: NAME, NAME@BRANCH or NAME@VERSION.
        where: SQL expression over the columns, see `Condition`.
        to: name of the class; the number of the label if classes have no names.
        split: the only split to change; None: all splits.
        dry_run: only count the samples, and commit nothing.
        message: text stored with the version.

    Raises:
        ConfigError: the expression is not valid, or there is no such class (the message lists those that exist).
        NotFoundError: there is no such version or split, or it has no labels.
        ConflictError, CorruptDataError, UnknownOutcomeError, UnavailableError: see `set_column`.
    """
    change = _Change(repository, ref, LABEL, "set", split, message, more={"where": where, "to": to})

    def edit(dataset: Mapping[str, ShardTable]) -> dict[str, ShardTable]:
        result: dict[str, ShardTable] = {}
        for name, table in dataset.items():
            if LABEL not in table.sample_schema.names:
                raise NotFoundError(f"split {name!r} has no column {LABEL!r}: add it with `datasvc columns`")
            found = Condition(where, table.sample_schema, table.classes).find(repository.objects, table)
            (value,) = _to_labels(pa.array([to]), table)
            patches = {shard: (rows, pa.repeat(value, len(rows))) for shard, rows in found}
            result |= change.write(name, table, table.sample_schema.field(LABEL), patches)
        return result

    return change.commit(edit, dry_run=dry_run)


def compact(repository: Repository, ref: str, *, message: str = "") -> ColumnReport:
    """Commit the next version with the values of changed columns in its shards, which are written again.

    The samples are equal. Reading them needs no more than their shards then. For arguments and errors, see
    `set_column`.
    """
    change = _Change(repository, ref, "", "compact", None, message)

    def edit(dataset: Mapping[str, ShardTable]) -> dict[str, ShardTable]:
        folded = {name: table for name, table in dataset.items() if table.overlays.groups}
        change.changed = {
            name: int(table.samples_per_shard[table.overlay_numbers >= 0].sum()) for name, table in folded.items()
        }
        return {name: fold_overlays(repository.objects, table) for name, table in folded.items()}

    return change.commit(edit)


class _NothingChangesError(Exception):
    """Ends `commit_on_line` without a commit."""


@dataclass(eq=False)
class _Change:
    """One change of columns: the version that it continues, and what it has counted."""

    repository: Repository
    ref: str
    column: str
    operation: str
    split: str | None
    message: str
    more: Mapping[str, Any] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    nulls: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    dry_run: bool = False

    def __post_init__(self) -> None:
        self.base, self.line = find_line(self.repository, self.ref)
        log = self.repository.versions("datasets", self.base.name)
        check_newest(self.base, self.line, head_of_line(self.repository, self.line, log.head()))

    def commit(
        self, edit: Callable[[Mapping[str, ShardTable]], Mapping[str, ShardTable]], *, dry_run: bool = False
    ) -> ColumnReport:
        """Commit the splits that `edit` returns; it is called again if another writer commits a version first."""

        def change(parent: Resolved) -> tuple[DatasetVersion, Mapping[str, ShardTable]]:
            self.base = parent
            self.changed.clear()
            self.nulls.clear()
            dataset = open_dataset(self.repository, str(parent))
            tables = {opened.name: opened.table for opened in choose_split(dataset, self.split)}
            for table in tables.values():
                if self.operation != "compact":
                    _check_editable(table, self.column)
            return dataset, edit(tables)

        def build(parent: Resolved | None) -> Mapping[str, Any]:
            dataset, tables = change(parent or self.base)
            if not tables:
                raise _NothingChangesError
            fields = {"kind": "columns", "operation": self.operation, "samples": sum(self.changed.values())}
            names = {"column": self.column} if self.column else {}
            return changed_entry(dataset, tables, {**fields, **names, **self.more}, message=self.message)

        self.dry_run = dry_run
        if dry_run:
            change(self.base)
        else:
            with suppress(_NothingChangesError):
                number = commit_on_line(self.repository, self.line, build).number
                self.base = Resolved("datasets", self.base.name, number)
        return ColumnReport(self.base, self.changed, self.nulls, self.missing, dry_run)

    def write(
        self, split: str, table: ShardTable, column: pa.Field, patches: Mapping[int, Patch]
    ) -> dict[str, ShardTable]:
        """Return the split with new values, and count them; {} if no value differs from the present one."""
        objects, is_new = self.repository.objects, column.name not in table.sample_schema.names
        differing = patches if is_new else dict(_differing(objects, table, column.name, patches))
        count = sum(len(values) for _, values in differing.values())
        if not count and not is_new:
            return {}
        new_nulls = sum(values.null_count for _, values in differing.values())
        column = column.with_nullable(column.nullable or new_nulls > 0 or (is_new and count < table.num_samples))
        if nulls := new_nulls + (table.num_samples - count if is_new else 0):
            self.nulls[split] = nulls
        self.changed[split] = count
        # Objects that no version has would stay until gc, and a purge could not tell whether they are needed.
        return {split: table if self.dry_run else set_values(objects, table, column, differing)}


def _set(
    change: _Change, tables: Mapping[str, ShardTable], values: pa.Table, missing: OnMissing
) -> dict[str, ShardTable]:
    """Return the splits with the values of a source, by their keys."""
    if missing not in get_args(OnMissing):
        raise ConfigError(f"missing is {missing!r}; expected one of {', '.join(get_args(OnMissing))}")
    objects = change.repository.objects
    numbers = {key: number for number, key in enumerate(values.column(KEY).to_pylist())}
    classes = _classes(tables, change.column, values.column(change.column))
    found: set[int] = set()
    result: dict[str, ShardTable] = {}
    named = {name: replace(table, classes=classes or table.classes) for name, table in tables.items()}
    for name, table in named.items():
        places: dict[int, tuple[Any, list[int]]] = {}
        for keys in SplitKeys(objects, table):
            positions = [numbers.get(key, -1) for key in keys.keys.to_pylist()]
            chosen = np.flatnonzero(np.array(positions, np.int64) >= 0)
            if len(chosen):
                places[keys.shard] = keys.rows[chosen], [positions[each] for each in chosen.tolist()]
                found.update(places[keys.shard][1])
        column, typed = _typed(table, change.column, values.column(change.column))
        patches = {shard: (rows, typed.take(pa.array(chosen))) for shard, (rows, chosen) in places.items()}
        result |= change.write(name, table, column, patches)
    change.missing = sorted(set(numbers) - {values.column(KEY)[number].as_py() for number in found})
    if change.missing and missing == "fail":
        raise NotFoundError(
            f"{count_text(len(change.missing), 'key is', 'keys are')} not in {change.base}: "
            f"{first_keys(change.missing)}; nothing was committed. --missing ok (missing=) ignores them"
        )
    return result


def _classes(tables: Mapping[str, ShardTable], column: str, values: pa.ChunkedArray) -> tuple[str, ...]:
    """Return the class names of new labels that are text, if no split has class names yet."""
    if column != LABEL or not pa.types.is_string(values.type) or any(table.classes for table in tables.values()):
        return ()
    if any(LABEL in table.sample_schema.names for table in tables.values()):
        return ()
    return tuple(sorted({name for name in values.to_pylist() if name}))


def _typed(table: ShardTable, name: str, values: pa.ChunkedArray) -> tuple[pa.Field, pa.Array]:
    """Return the column of a split, and new values of its type. Raise ConfigError if one does not convert."""
    joined = pa.concat_arrays([pa.nulls(0, values.type), *values.chunks])
    if name in table.sample_schema.names:
        column = table.sample_schema.field(name)
        is_class = name == LABEL and pa.types.is_integer(column.type)
        return column, _to_labels(joined, table) if is_class else to_type(joined, column.type, name)
    is_class = name == LABEL and (table.classes or pa.types.is_integer(joined.type))
    typed = _to_labels(joined, table) if is_class else joined
    return pa.field(name, typed.type, nullable=False), typed


def _to_labels(values: pa.Array, table: ShardTable) -> pa.Array:
    """Return labels for names of classes, or for whole numbers."""
    present = table.sample_schema
    data_type = present.field(LABEL).type if LABEL in present.names else pa.int32()
    numbers = {name: number for number, name in enumerate(table.classes)}
    if pa.types.is_string(values.type) and table.classes:
        unknown = sorted({name for name in values.to_pylist() if name} - numbers.keys())
        if unknown:
            raise ConfigError(
                f"{first_keys(unknown)}: no such class; the classes are {first_keys([*table.classes], 50)}. Name new "
                "ones with `datasvc classes` first"
            )
        return pa.array([numbers.get(name) if name else None for name in values.to_pylist()], data_type)
    labels = to_type(values, data_type, LABEL)
    as_numbers = [number for name, number in numbers.items() if name.isdigit() and int(name) != number]
    if as_numbers:
        raise ConfigError(
            f"the classes are numbers, such as {table.classes[as_numbers[0]]!r} for the label {as_numbers[0]}: give "
            "the values as text, in a Parquet file or a table, so that they are names"
        )
    outside = sorted({each for each in labels.to_pylist() if each is not None and each >= len(numbers)})
    if numbers and outside:
        raise ConfigError(f"label {outside[0]} has no class: expected names, or labels from 0 to {len(numbers) - 1}")
    return labels


def _differing(
    objects: Objects, table: ShardTable, name: str, patches: Mapping[int, Patch]
) -> Iterable[tuple[int, Patch]]:
    """Yield the new values that differ from the present ones, by shard."""
    for shard, (rows, values) in patches.items():
        assert rows is not None, "new values have rows"
        old = encode_array(_take(read_values(objects, table, shard, [name]), rows))
        differs = np.array([a != b for a, b in zip(old, encode_array(values), strict=True)], np.bool_)
        if differs.any():
            yield shard, (rows[differs], values.filter(pa.array(differs)))


def _take(values: pa.Table, rows: Integers) -> pa.Array:
    chosen = values.column(0).take(pa.array(rows))
    return pa.concat_arrays([pa.nulls(0, chosen.type), *chosen.chunks])


def _renamed(change: _Change, tables: Mapping[str, ShardTable], new: str | None) -> dict[str, ShardTable]:
    result = {}
    for name, table in tables.items():
        names = table.sample_schema.names
        if change.column not in names:
            raise NotFoundError(f"split {name!r} has no column {change.column!r}; it has {', '.join(names)}")
        if is_blob(table.sample_schema.field(change.column).type):
            raise ConfigError(f"column {change.column!r} holds blobs, which stay as they are: ingest the data again")
        if new is not None:
            _check_editable(table, new, without=change.column)
            if new == LABEL and table.classes and is_text(table.sample_schema.field(change.column).type):
                raise ConfigError(
                    f"column {change.column!r} holds text, and labels are numbers of classes: give them by "
                    f"`datasvc columns {change.base.name} set label --from FILE`, on a branch to keep others"
                )
            if new in names:
                raise ConfigError(f"split {name!r} has a column {new!r} already; drop or rename it first")
        change.changed[name] = table.num_samples
        objects = change.repository.objects
        result[name] = rename_values(objects, table, change.column, new)
        if new == LABEL:
            labels = (
                (keys.shard, (keys.rows, _take(read_values(objects, table, keys.shard, [change.column]), keys.rows)))
                for keys in SplitKeys(objects, table)
            )
            result[name] = replace(result[name], label_counts=count_labels(objects, table, labels, is_new=True) or {})
    return result


def _check_editable(table: ShardTable, column: str, *, without: str | None = None) -> None:
    """Raise ConfigError if a column is fixed by the stored samples, or is a new one whose name SQL cannot use.

    The column `without` may have the new one's name, except for the case of letters: it is renamed.
    """
    fixed: Sequence[str] = (KEY, *measured_columns(table.sample_schema))
    if column in fixed:
        raise ConfigError(f"column {column!r} cannot be changed: {', '.join(fixed)} follow from the stored samples")
    if column in table.sample_schema.names:
        if is_blob(table.sample_schema.field(column).type):
            raise ConfigError(f"column {column!r} holds blobs, which cannot be changed: ingest the data again")
        return  # whatever its name, so that it can be dropped or renamed
    if not column.strip() or not column.isprintable():
        raise ConfigError(f"{column!r} is no name of a column: choose one of printable characters")
    for name in table.sample_schema.names:
        if name.lower() == column.lower() and name != without:
            raise ConfigError(f"there is a column {name!r}, and SQL ignores case: {column!r} cannot be another one")
