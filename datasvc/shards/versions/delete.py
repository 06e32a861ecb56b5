"""Delete samples: commit the next version of a data set with new deletion bitmaps; shards are not changed.

A SQL condition is evaluated by DuckDB on one shard at a time. It has no access to files or other tables, and may name
a class where it compares a label.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.repository import Objects, Repository, Resolved
from datasvc.repository.logs.references import refuse_text
from datasvc.shards.format.overlaid_shard import open_table_shard
from datasvc.shards.format.reader import Shard
from datasvc.shards.format.schema import LABEL, is_blob
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.lines.commit import check_newest, commit_on_line, find_line, head_of_line
from datasvc.shards.versions.dataset import DatasetVersion, choose_split, open_dataset
from datasvc.shards.versions.deletions import delete_samples
from datasvc.shards.versions.keys import SplitKeys, first_keys
from datasvc.shards.versions.labels import CLASS, class_of_labels, with_class
from datasvc.shards.versions.version_entry import changed_entry
from datasvc.sql_sandbox import connect, fetch, lock

_COMPARISONS: Final = frozenset({"COMPARISON", "BETWEEN"})  # of DuckDB's syntax tree


@dataclass(frozen=True)
class DeleteReport:
    """The result of `delete`.

    Attributes:
        version: the committed version; if there was nothing to delete, the newest version, which is unchanged.
        deleted: number of deleted samples by split; empty if nothing was committed.
        missing: requested keys that no split has, sorted.
        dry_run: whether nothing was committed, and `deleted` is what would be deleted from `version`.
    """

    version: Resolved
    deleted: dict[str, int]
    missing: list[str] = field(default_factory=list)
    dry_run: bool = False

    @property
    def num_deleted(self) -> int:
        """Number of deleted samples; 0 if there was nothing to delete."""
        return sum(self.deleted.values())


def delete(
    repository: Repository,
    ref: str,
    *,
    keys: Iterable[str] | None = None,
    where: str | None = None,
    split: str | None = None,
    ignore_missing: bool = False,
    dry_run: bool = False,
    message: str = "",
) -> DeleteReport:
    """Commit the next version of a data set without the samples that `keys` or `where` selects.

    If another writer commits a version first, the samples to delete are selected again from that version.

    Args:
        repository: the repository that stores the data set.
        ref: the version to continue, which must be the newest of its line: NAME, NAME@BRANCH or NAME@VERSION.
        keys: keys of the samples to delete, in every split that has them.
        where: SQL expression over the columns, see `Condition`. Give either this or `keys`.
        split: the only split to delete from; None: all splits.
        ignore_missing: continue if a key does not exist.
        dry_run: only count the samples, and commit nothing.
        message: text stored with the version.

    Raises:
        ConfigError: both or neither of `keys` and `where` are given; the expression is invalid; all samples of a
            split would be deleted.
        NotFoundError: there is no such version or split; or keys do not exist (the message lists up to ten).
        ConflictError: `ref` is not the newest version of its line; or see `Log.append`.
        CorruptDataError, UnknownOutcomeError, UnavailableError: see `Log.append`, `Objects.read`.
    """
    if (keys is None) == (where is None):
        raise ConfigError(
            "expected either keys or a condition that selects the samples to delete, not both or neither"
        )
    refuse_text(keys, "keys", "keys")
    base, line = find_line(repository, ref)
    log = repository.versions("datasets", base.name)
    check_newest(base, line, head_of_line(repository, line, log.head()))
    build = _DeleteBuild(
        repository, base, None if keys is None else frozenset(keys), where, split, ignore_missing, message
    )
    if dry_run:
        build.select(base)
        return DeleteReport(base, build.deleted, build.missing, dry_run=True)
    try:
        committed = commit_on_line(repository, line, build)
    except _NothingToDeleteError:
        return DeleteReport(build.parent, {}, build.missing)
    return DeleteReport(Resolved("datasets", base.name, committed.number), build.deleted, build.missing)


class _NothingToDeleteError(Exception):
    """Ends `Log.append` without a commit: no sample is selected."""


@dataclass(eq=False)
class _DeleteBuild:
    """Builds the log entry from the newest version. `commit_on_line` calls it again if that is another one by then.

    Attributes:
        repository, keys, where, split, ignore_missing, message: as in `delete`.
        parent: the version that the last call built on; before the first call, the newest version.
        deleted: number of samples that the last call deleted, by split.
        missing: keys that the first call did not find, sorted.
    """

    repository: Repository
    parent: Resolved
    keys: frozenset[str] | None
    where: str | None
    split: str | None
    ignore_missing: bool
    message: str
    deleted: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    _attempts: int = 0

    def select(
        self, parent: Resolved
    ) -> tuple[DatasetVersion, dict[str, ShardTable], dict[str, dict[int, Integers]]]:
        """Select the samples to delete from version `parent`, and set `parent`, `deleted` and `missing`.

        Returns:
            The version to continue, its searched tables by split, and the result of `_select_rows`.
        """
        self._attempts += 1
        self.parent = parent
        dataset = open_dataset(self.repository, str(self.parent))
        tables = {opened.name: opened.table for opened in choose_split(dataset, self.split)}
        rows_by_split = self._select_rows(tables)
        self.deleted = {split: sum(map(len, rows.values())) for split, rows in rows_by_split.items()}
        for split, count in self.deleted.items():
            if count == tables[split].num_samples:
                raise ConfigError(
                    f"all samples of split {split!r} of {self.parent} would be deleted: nothing was committed"
                )
        return dataset, tables, rows_by_split

    def __call__(self, parent: Resolved | None) -> Mapping[str, Any]:
        dataset, tables, rows_by_split = self.select(parent or self.parent)
        if not rows_by_split:
            raise _NothingToDeleteError
        objects = self.repository.objects
        changed = {split: delete_samples(objects, tables[split], rows) for split, rows in rows_by_split.items()}
        change: dict[str, Any] = {"kind": "delete", "deleted": sum(self.deleted.values())}
        if self.where is not None:
            change["where"] = self.where
        if self.split is not None:
            change["split"] = self.split
        return changed_entry(dataset, changed, change, message=self.message)

    def _select_rows(self, tables: Mapping[str, ShardTable]) -> dict[str, dict[int, Integers]]:
        """Return the rows to delete in each shard's file, by split and shard; splits without any are left out."""
        objects = self.repository.objects
        if self.where is None:
            rows_by_split = self._select_rows_by_key(objects, tables)
        else:
            rows_by_split = {
                split: dict(Condition(self.where, table.sample_schema, table.classes).find(objects, table))
                for split, table in tables.items()
            }
        return {split: rows for split, rows in rows_by_split.items() if rows}

    def _select_rows_by_key(
        self, objects: Objects, tables: Mapping[str, ShardTable]
    ) -> dict[str, dict[int, Integers]]:
        """Return the rows of the keys, as `_select_rows`; splits without any are included."""
        assert self.keys is not None, "`delete` requires either keys or a condition"
        rows_by_split: dict[str, dict[int, Integers]] = {}
        existing: set[str] = set()
        for split, table in tables.items():
            rows_by_split[split] = {}
            for shard_keys in SplitKeys(objects, table):
                keys = shard_keys.keys.to_pylist()
                positions = [position for position, key in enumerate(keys) if key in self.keys]
                if positions:
                    existing.update(keys[position] for position in positions)
                    rows_by_split[split][shard_keys.shard] = shard_keys.rows[np.array(positions)]
        self._check_missing(self.keys - existing)
        return rows_by_split

    def _check_missing(self, missing: frozenset[str]) -> None:
        """Record the keys that do not exist, and raise NotFoundError unless they are ignored."""
        # Only the first call checks: a key that a later call does not find was deleted by another writer.
        if self._attempts > 1:
            return
        self.missing = sorted(missing)
        if missing and not self.ignore_missing:
            searched = f"{self.parent}/{self.split}" if self.split else self.parent
            listed = first_keys(self.missing)
            raise NotFoundError(
                f"{count_text(len(missing), 'key is', 'keys are')} not in {searched}: {listed}; nothing was committed"
            )


class Condition:
    """A boolean SQL expression over the columns of a split, such as `label = 'cat' and width < 100`.

    The expression is first tried without the blob columns, so that a selection by label copies no images. Only an
    expression that needs a blob, such as `octet_length(image) > 1000000`, is evaluated on all columns.

    Args:
        expression: SQL over the column names, see `parse_condition`; a sample for which it is null is not selected.
        schema: the columns of the split.
        classes: its class names, which the column `class` has.

    Raises:
        ConfigError: the expression does not parse, uses a column or class that does not exist, or is not boolean.
    """

    def __init__(self, expression: str, schema: pa.Schema, classes: Sequence[str] = ()) -> None:
        self._expression = expression
        self._filter = f"({parse_condition(expression, schema, classes, 'the data set').sql})"
        num_stored = len(schema.names)
        schema = with_class(schema, classes)
        self._classes = pa.array(classes, pa.string()) if len(schema.names) > num_stored else None
        self._columns = schema.names
        if len({name.lower() for name in schema.names}) != len(schema.names):
            raise ConfigError(
                f"column names differ in case only, and SQL ignores case: {schema.names}; select the samples by keys"
            )
        self._connection = connect()
        lock(self._connection)
        without_blobs = pa.schema([field for field in schema if not is_blob(field.type)])
        needs_blobs = not self._runs_on(without_blobs) and self._runs_on(schema)
        # If the expression is valid for neither schema, `project` below raises the error.
        self._schema = schema if needs_blobs else without_blobs
        with self._map_errors():
            types = self._connection.from_arrow(self._schema.empty_table()).project(self._filter).types
        if [str(column_type) for column_type in types] != ["BOOLEAN"]:
            actual = ", ".join(map(str, types))
            raise ConfigError(
                f"the condition {expression!r} has the type {actual}, expected BOOLEAN: use a comparison, such as "
                "label = 3"
            )

    def find(self, objects: Objects, table: ShardTable) -> Iterator[tuple[int, Integers]]:
        """Yield (shard number, ascending rows) of the live (not deleted) samples that satisfy the condition.

        Purged samples are left out: their values are empty, such as the label 0.

        Raises:
            ConfigError: the evaluation fails for a sample, for instance a cast of text that is not a number.
            CorruptDataError, NotFoundError, UnavailableError: a shard cannot be read.
        """
        live = SplitKeys(objects, table)
        for shard in range(table.num_shards):
            rows = live.present_rows(shard)
            opened = open_table_shard(objects, table, shard)
            opened.check_texts()  # DuckDB expects UTF-8
            samples = self._samples(opened)
            # Without deleted or purged samples in the shard, no copy of the others is needed.
            selected = self._evaluate(samples if len(rows) == samples.num_rows else samples.take(pa.array(rows)))
            if len(selected):
                yield shard, rows[selected]

    def _evaluate(self, samples: pa.Table) -> Integers:
        """Return the positions of the samples that satisfy the condition: `int64[n]`, ascending."""
        column = "datasvc_row"
        while column in samples.schema.names:
            column += "_"
        numbered = samples.append_column(column, pa.array(np.arange(samples.num_rows)))
        relation = self._connection.from_arrow(numbered)
        with self._map_errors():
            selected = fetch(
                self._connection, lambda: relation.filter(self._filter).project(f'"{column}"').fetchnumpy()
            )
        # DuckDB evaluates in parallel and does not guarantee an order of rows.
        return np.sort(np.asarray(selected[column], np.int64))

    def _samples(self, shard: Shard) -> pa.Table:
        """Return all stored samples of a shard, with null in columns that were added to the split after the shard."""

        def column(name: str, data_type: pa.DataType) -> pa.ChunkedArray | pa.Array:
            if name == CLASS and self._classes is not None:
                return class_of_labels(column(LABEL, pa.int32()), self._classes)
            return shard.column(name) if name in shard.schema.names else pa.nulls(shard.num_samples, data_type)

        columns = [column(field.name, field.type) for field in self._schema]
        return pa.table(columns, schema=pa.schema([field.with_nullable(True) for field in self._schema]))

    def _runs_on(self, schema: pa.Schema) -> bool:
        """Return whether the expression is valid for a table with these columns."""
        import duckdb

        try:
            self._connection.from_arrow(schema.empty_table()).filter(self._filter)
        except duckdb.Error:
            return False
        return True

    @contextmanager
    def _map_errors(self) -> Iterator[None]:
        import duckdb

        try:
            yield
        except duckdb.Error as error:
            reason, columns = str(error).partition("\n")[0], ", ".join(self._columns)
            raise ConfigError(
                f"the condition {self._expression!r} cannot be evaluated: {reason}; the columns are {columns}"
            ) from error


class ParsedCondition(NamedTuple):
    """A parsed condition.

    Attributes:
        canonical: the condition as DuckDB writes it, so that spaces, comments and the case of keywords do not matter.
        sql: the condition to evaluate: names of classes that are compared with `label` are replaced by labels.
    """

    canonical: str
    sql: str


def parse_condition(text: str, schema: pa.Schema, classes: Sequence[str], name: str) -> ParsedCondition:
    """Parse a condition on the samples of a split.

    Args:
        text: a Boolean expression in DuckDB's dialect over the columns, and `class`, the name of the label's class. A
            name of a class may also be compared with `label`: `label != 'cat'`.
        schema: the columns of the split, without `class`.
        classes: its class names.
        name: its name, for messages.

    Raises:
        ConfigError: it cannot be parsed, has a query of its own, or names a class that does not exist.
        MissingPackageError: DuckDB is not installed.
    """
    connection = connect()
    lock(connection)

    def parse(expression: str) -> dict[str, Any]:
        # A new line before the bracket, because the expression may end in a comment.
        query = "SELECT json_serialize_sql(?::VARCHAR)"
        (serialized,) = connection.execute(query, [f"SELECT ({expression}\n)"]).fetchall()[0]
        parsed: dict[str, Any] = json.loads(serialized)
        if parsed["error"]:
            raise ConfigError(f"the condition {text!r} cannot be parsed: {parsed['error_message']}")
        return parsed

    def written(tree: dict[str, Any]) -> str:
        query = "SELECT json_deserialize_sql(?::JSON)"
        (sql,) = connection.execute(query, [json.dumps(tree)]).fetchall()[0]
        return str(sql).removeprefix("SELECT ")

    with connection:
        tree, plain = parse(text), parse("true")
        # The text may close the bracket and go on with other parts of a query.
        expressions = [_take_expression(each) for each in (tree, plain)]
        if tree != plain or len(expressions[0]) != 1:
            raise ConfigError(f"the condition {text!r} is not one expression; expected one, such as label = 3")
        _put_expression(tree, expressions[0])
        canonical = written(tree)
        for node in _nodes(expressions[0]):
            if node.get("class") == "SUBQUERY":
                raise ConfigError(f"the condition {text!r} has a query of its own; expected one of the columns only")
            _replace_classes(node, schema, classes, name)
        return ParsedCondition(canonical, written(tree))


def _take_expression(tree: dict[str, Any]) -> list[Any]:
    """Return the expressions that a query selects, and take them out of the query."""
    assert len(tree["statements"]) == 1, tree
    expressions: list[Any] = tree["statements"][0]["node"].pop("select_list", [])
    return expressions


def _put_expression(tree: dict[str, Any], expressions: list[Any]) -> None:
    tree["statements"][0]["node"]["select_list"] = expressions


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all nodes of a syntax tree."""
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _nodes(child)


def _replace_classes(node: dict[str, Any], stored: pa.Schema, classes: Sequence[str], split: str) -> None:
    """Replace the names of classes that a comparison compares with `label`; check those compared with `class`."""
    if node.get("class") not in _COMPARISONS and node.get("type") not in {"COMPARE_IN", "COMPARE_NOT_IN"}:
        return
    operands = [value for part in node.values() for value in (part if isinstance(part, list) else [part])]
    operands = [operand for operand in operands if isinstance(operand, dict)]
    references = [operand["column_names"] for operand in operands if operand.get("class") == "COLUMN_REF"]
    columns = {names[0].lower() for names in references if len(names) == 1}  # `meta.label` is a field of a struct
    # A column `class` that the samples have themselves has other values than the names of classes.
    is_derived = len(with_class(stored, classes).names) > len(stored.names)
    has_names = bool(classes) and LABEL in stored.names and pa.types.is_integer(stored.field(LABEL).type)
    for operand in operands:
        literal = operand.get("literal")
        if not isinstance(literal, dict) or literal.get("kind") != "STRING":
            continue
        name = literal["text"]
        if CLASS in columns and is_derived:
            _label_of(name, classes, split)
        elif LABEL in columns and has_names and not (name.isdecimal() and name not in classes):
            operand["literal"] = {"kind": "INTEGER", "text": str(_label_of(name, classes, split))}


def _label_of(name: str, classes: Sequence[str], split: str) -> int:
    if name not in classes:
        raise ConfigError(f"{split} has no class {name!r}; its classes are {first_keys(list(classes))}")
    return list(classes).index(name)
