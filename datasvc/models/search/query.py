"""SQL over the versions of all models: `models find` and `models sql` run DuckDB on the version index.

A query sees only the tables of this module. It has no access to files, network or variables of this program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.models.search.index import VersionIndex, map_models, read_index
from datasvc.models.search.rows import TREES, VALUES, Field
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import choose_metric_mode
from datasvc.sql_sandbox import connected, fetch, lock, only_query

if TYPE_CHECKING:
    import duckdb


_MUTABLE_STATE: Final = pa.schema(
    {"model": pa.string(), "version": pa.int64(), "tags": pa.list_(pa.string()), "removed": pa.bool_()}
)
# The columns of the views: SQL expression by column name.
_COLUMNS: Final = {
    "model": "model",
    "version": "version",
    "created": "try_cast(created AS TIMESTAMP)",
    "tags": "coalesce(tags, [])",
    **{name: name for name in ("step", "epoch", "message", *TREES, "data", "evaluation", "parents")},
    **{name: name for name in ("size_bytes", "stored_bytes", "num_tensors", "num_nonfinite")},
    "removed": "coalesce(removed, false)",
}
_HOW_TO_SORT: Final = "give --ascending or --descending (ascending=True or ascending=False in Python)"
# `names(data)` are the references without their versions, so that 'imagenet' finds every version of it.
_VIEWS: Final = f"""
    CREATE TEMP MACRO names(refs) AS [split_part(ref, '@', 1) FOR ref IN refs];
    CREATE TEMP VIEW all_versions AS SELECT {", ".join(f"{value} AS {name}" for name, value in _COLUMNS.items())}
        FROM version_index LEFT JOIN mutable_state USING (model, version);
    CREATE TEMP VIEW versions AS SELECT * EXCLUDE (removed) FROM all_versions WHERE NOT removed
"""  # noqa: S608 - constants
_TYPES: Final = {"number": pa.float64(), "boolean": pa.bool_(), "text": pa.string()}
# These columns always exist, so that `not code.dirty` is valid in a repository where no version has the field.
_CODE_FIELDS: Final = (Field(("code", "revision"), "text", False), Field(("code", "dirty"), "boolean", False))
# Regular expression of SQL that names one field of a struct: metrics.top1, metrics['top1'].
_NAME_IN_STRUCT: Final = r"""\b{}"?\s*(?:\.|\[\s*'(?:[^']|'')*'\s*\])"""
# SQL with one of these words may read a column without naming it.
WILDCARDS: Final = ("*", "columns", "versions")


def query_versions(repository: Repository, sql: str, *, progress: Progress = NO_PROGRESS) -> pa.Table:
    """Return the result of a SQL query over the versions of all models.

    The table `versions` has a row for each version; `all_versions` has removed versions too, and the column
    `removed`. The function `names` turns a list of references into a list of names.
    docs/how-to/registry.md lists the columns.

    Versions that cannot be read are left out with an `UnreadableVersionWarning`.

    Args:
        repository: repository of the models.
        sql: one query in DuckDB's dialect.
        progress: counts the entries that an update of the index reads.

    Raises:
        ConfigError: DuckDB rejects the query; the message has its reason.
        CorruptDataError, UnavailableError: tags or removals cannot be read, or the store does not respond.
    """
    index = read_index(repository, progress=progress)
    with connected() as connection, _map_errors(f"the query {sql!r}"):
        _prepare(connection, repository, index, sql=None)
        statement = only_query(connection, sql, example="select model, version, metrics.top1 from versions")
        return fetch(connection, lambda: connection.sql(statement).to_arrow_table())


def find_versions(
    repository: Repository,
    condition: str = "true",
    *,
    by: str | None = None,
    ascending: bool | None = None,
    limit: int | None = None,
    removed: bool = False,
    progress: Progress = NO_PROGRESS,
) -> list[Resolved]:
    """Return the versions of all models that meet a condition.

    Versions that cannot be read are left out with an `UnreadableVersionWarning`.

    Args:
        repository: repository of the models.
        condition: SQL expression over the columns of `versions`, see `query_versions`, such as
            `metrics.top1 > 0.75 and 'imagenet@3' in data`. A version for which the condition is null is not returned.
        by: name of a metric, or a SQL expression to sort by; versions for which it is null or NaN come last. Default:
            the model name, newest version first.
        ascending: sort `by` from the lowest value (True) or the highest (False). None: from the best value of a
            metric, which its name defines, and from the highest value of an expression.
        limit: maximum number of versions; None: all.
        removed: search removed versions too; the condition may use the column "removed".
        progress: counts the entries that an update of the index reads.

    Raises:
        ConfigError: the condition or `by` is not valid SQL, or uses a column that does not exist; `limit` is below 0;
            or the name of the metric does not show whether a high or a low value is better.
        CorruptDataError, UnavailableError: tags or removals cannot be read, or the store does not respond.
    """
    if limit is not None and limit < 0:
        raise ConfigError(f"limit={limit} is not a number of versions; give 0 or more, or None for all")
    index = read_index(repository, progress=progress)
    if not index.table.num_rows:
        return []
    order = "model, version DESC"
    if by is not None:
        if _is_metric(by, index):
            if ascending is None:
                ascending = choose_metric_mode(by, advice=_HOW_TO_SORT) == "min"
            by = "metrics['" + by.replace("'", "''") + "']"
        # If the user's expression ends with a SQL comment, the line breaks here and below end the comment.
        key = f"({by}\n)"
        order = f"{key} IS NULL OR {key}::VARCHAR = 'nan', {key} {'ASC' if ascending else 'DESC'}, {order}"
    with connected() as connection, _map_errors(f"the condition {condition!r}"):
        _prepare(connection, repository, index, sql=f"{condition} {order}")
        versions = connection.view("all_versions" if removed else "versions")
        matching = versions.filter(f"({condition}\n)").order(order).project("model, version")
        if limit is not None:
            matching = matching.limit(limit)
        rows = fetch(connection, matching.fetchall)
    return [Resolved("models", model, version) for model, version in rows]


def _is_metric(by: str, index: VersionIndex) -> bool:
    """Return whether `by` is the name of a metric, and not of a column."""
    return by.lower() not in _COLUMNS and Field(("metrics", by), "number", False) in index.fields


def _prepare(
    connection: duckdb.DuckDBPyConnection, repository: Repository, index: VersionIndex, *, sql: str | None
) -> None:
    """Create the tables and views that `sql` needs (None: any SQL), then lock the connection for SQL of the user."""
    connection.register("version_index", build_table(index, sql=sql))
    # Tags cost a request per model, so they are read only for SQL that may use them.
    with_tags = sql is None or any(word in sql.lower() for word in ("tags", *WILDCARDS))
    connection.register("mutable_state", _read_mutable_state(repository, index, with_tags=with_tags))
    connection.execute(_VIEWS)
    lock(connection)


@contextmanager
def _map_errors(what: str) -> Iterator[None]:
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        raise ConfigError(
            f"{what} cannot be evaluated: {error}\nThe columns are {', '.join(_COLUMNS)}. Only all_versions and a "
            "search of removed versions have `removed`; tags, data, evaluation, parents are lists: 'pets@3' in data"
        ) from error


def _read_mutable_state(repository: Repository, index: VersionIndex, *, with_tags: bool) -> pa.Table:
    """Return the tags and removals, which change without a new version and are therefore not in the index."""

    def read(name: str) -> list[dict[str, Any]]:
        removed = repository.removals("models", name).removed()
        tags: dict[int, list[str]] = {number: [] for number in removed}
        for tag, number in sorted(repository.tags("models", name).items()) if with_tags else ():
            tags.setdefault(number, []).append(tag)
        return [
            {"model": name, "version": number, "tags": version_tags, "removed": number in removed}
            for number, version_tags in tags.items()
        ]

    rows = [row for rows_of_model in map_models(repository, read, index.heads) for row in rows_of_model]
    return pa.Table.from_pylist(rows, _MUTABLE_STATE)


def build_table(index: VersionIndex, *, sql: str | None = None) -> pa.Table:
    """Return the rows of an index, with a struct for each tree (such as `metrics`) in place of the lists of values.

    A column has one type. If a name has values of several kinds, the kind that comes first in this order keeps the
    name: numbers, booleans, texts, lists, structs. The others are named like `lr_text`, `lr_number_list` and
    `lr_struct`. SQL ignores case, so names that differ only in case get such names too, or names like `lr_2`.

    Args:
        index: the index.
        sql: SQL that will read the table; fields that this SQL does not use may be null. None: any SQL.
    """
    lists, num_rows = index.table[VALUES].combine_chunks(), index.table.num_rows
    values = lists.flatten()
    # Row and field of each element of `values`.
    row_of, field_of = np.repeat(np.arange(num_rows), lists.value_lengths()), values.field("field").to_numpy()
    is_used = _plan_use(sql)
    is_field_used = np.array([is_used(field) for field in index.fields], bool)
    # Indices into `values`, sorted by field: those of field n are indices[bounds[n] : bounds[n + 1]].
    indices = np.flatnonzero(is_field_used[field_of])
    indices = indices[np.argsort(field_of[indices], kind="stable")]
    bounds = np.searchsorted(field_of[indices], np.arange(len(index.fields) + 1))
    # Unused fields share one null array per kind, so thousands of them cost no memory.
    nulls = {kind: pa.nulls(num_rows, arrow_type) for kind, arrow_type in _TYPES.items()}

    def build_column(number: int, field: Field) -> pa.Array:
        field_indices = indices[bounds[number] : bounds[number + 1]]
        if not len(field_indices):
            return pa.nulls(num_rows, pa.list_(_TYPES[field.kind])) if field.is_list else nulls[field.kind]
        source = values.field("text" if field.kind == "text" else "number")
        if field.is_list:
            counts = np.bincount(row_of[field_indices], minlength=num_rows)
            offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
            items = source.take(pa.array(field_indices)).cast(_TYPES[field.kind])
            return pa.ListArray.from_arrays(offsets, items, mask=pa.array(counts == 0))
        index_of_row = np.full(num_rows, -1)
        index_of_row[row_of[field_indices]] = field_indices
        return source.take(pa.array(index_of_row, mask=index_of_row < 0)).cast(_TYPES[field.kind])

    table = index.table.drop_columns([VALUES])
    for tree in TREES:
        arrays = {field: nulls[field.kind] for field in _CODE_FIELDS if tree == "code"}
        tree_fields = ((number, field) for number, field in enumerate(index.fields) if field.path[0] == tree)
        arrays |= {field: build_column(number, field) for number, field in tree_fields}
        # A struct needs at least one name, so a tree without fields becomes a column of null maps.
        column = _struct(arrays, 1) if arrays else pa.nulls(num_rows, pa.map_(pa.string(), pa.string()))
        table = table.append_column(tree, column)
    return table


def _plan_use(sql: str | None) -> Callable[[Field], bool]:
    """Return a function that returns False only for a field that the SQL certainly does not use."""
    text = "" if sql is None else sql.lower()
    if sql is None or any(word in text for word in WILDCARDS):
        return lambda _field: True
    # A tree that occurs without a name after it, as in `unnest(config)`, needs all its fields.
    whole_trees = {
        tree
        for tree in TREES
        if len(re.findall(rf"\b{tree}\b", text)) != len(re.findall(_NAME_IN_STRUCT.format(tree), text))
    }
    plain_text = _lower_unquoted(text)

    def is_used(field: Field) -> bool:
        return field.path[0] in whole_trees or any(_lower_unquoted(name) in plain_text for name in field.path[1:])

    return is_used


def _lower_unquoted(text: str) -> str:
    return text.lower().replace('"', "").replace("'", "")


def _struct(arrays: Mapping[Field, pa.Array], depth: int) -> pa.StructArray:
    """Return a struct of the fields, which share the first `depth` names of their paths."""
    kinds = [f"{kind}{suffix}" for suffix in ("", "_list") for kind in _TYPES] + ["struct"]
    groups: dict[tuple[str, int], dict[Field, pa.Array]] = {}
    for field, array in arrays.items():
        kind = "struct" if len(field.path) > depth + 1 else f"{field.kind}{'_list' * field.is_list}"
        groups.setdefault((field.path[depth], kinds.index(kind)), {})[field] = array
    children: dict[str, Any] = {}
    taken: set[str] = set()
    # A name that a field has in the index is never used for another field.
    reserved = {name.lower() for name, _ in groups}
    # Sorted by name and kind, so that the same fields always get the same names.
    for (path_name, kind_number), group in sorted(groups.items()):
        # Arrow and DuckDB end a name at a NUL, and DuckDB has no empty names.
        name, kind = path_name.replace("\0", "\N{REPLACEMENT CHARACTER}") or "_", kinds[kind_number]
        candidates = chain([name, f"{name}_{kind}"], (f"{name}_{number}" for number in count(2)))
        free_name = next(
            candidate
            for candidate in candidates
            if candidate.lower() not in taken and (candidate == name or candidate.lower() not in reserved)
        )
        taken.add(free_name.lower())
        children[free_name] = _struct(group, depth + 1) if kind == "struct" else next(iter(group.values()))
    return pa.StructArray.from_arrays(list(children.values()), list(children))
