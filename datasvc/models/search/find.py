"""Find the versions of all models that meet a condition, in the index of versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from datasvc.models.search.columns import FieldColumn
from datasvc.models.search.evaluate import evaluate, find_field
from datasvc.models.search.expression import fields_of, parse_expression
from datasvc.models.search.index import VersionIndex, read_index
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository, Resolved

_NAMES_AT_ONCE: Final = 16
# These change without a new version, so the index does not contain them.
_LIVE: Final = ("tag", "removed")


def find_versions(
    repository: Repository,
    condition: str,
    *,
    order_by: str | None = None,
    ascending: bool = False,
    progress: Progress = NO_PROGRESS,
) -> list[Resolved]:
    """Return the versions of all models that meet a condition.

    Args:
        repository: repository of the models.
        condition: condition in the language of `expression`. Fields: name, version, step, created, message, parent,
            data, code, code.dirty, tag, removed, bytes, stored_bytes, num_tensors, num_nonfinite, metrics.*,
            config.*, environment.*. The prefixes `metrics.` and `config.` may be omitted. Removed versions are left
            out unless the condition uses the field `removed`.
        order_by: field to sort by, versions without it last; by default the model name, newest version first.
        ascending: sort `order_by` from the lowest value instead of the highest.
        progress: counts the entries that are read to update the index.

    Raises:
        ConfigError: the condition is not valid, or uses a field that no version has.
        CorruptDataError, UnavailableError: an entry cannot be read.
    """
    expression = parse_expression(condition)
    index = read_index(repository, progress=progress)
    existing = index.fields
    # An empty repository has no fields: the result is empty instead of an error for an unknown field.
    full_names = {field: find_field(field, existing) if index.num_rows else field for field in fields_of(expression)}
    order_field = find_field(order_by, existing) if order_by and index.num_rows else None
    live = _live_columns(repository, index, {*full_names.values(), order_field, "removed"})

    def column(field: str) -> FieldColumn | None:
        full = full_names.get(field, field)
        return live[full] if full in _LIVE else index.column(full)

    met = evaluate(expression, column, index.num_rows)
    if "removed" not in full_names.values():
        met[live["removed"].rows] = False
    rows = np.flatnonzero(met).tolist()
    versions = _versions_of_rows(index)
    rows.sort(key=lambda row: (versions[row][0], -versions[row][1]))
    if order_field is not None:
        rows = _ordered(rows, column(order_field), ascending=ascending)
    return [Resolved("models", *versions[row]) for row in rows]


def _versions_of_rows(index: VersionIndex) -> list[tuple[str, int]]:
    """Return model name and version number of every row."""
    names, numbers = index.column("name"), index.column("version")
    if names is None or numbers is None:
        return []
    texts = names.texts.to_pylist()
    return list(zip([texts[code] for code in names.codes.tolist()], map(int, numbers.numbers.tolist()), strict=True))


def _ordered(rows: list[int], column: FieldColumn | None, *, ascending: bool) -> list[int]:
    """Return rows sorted by their values, rows without a value last; of several values the first one counts."""
    if column is None:
        return rows
    texts, values = column.texts.to_pylist(), {}
    # Reversed, so that the first value of a row overwrites its others.
    for row, number, code in zip(
        reversed(column.rows.tolist()),
        reversed(column.numbers.tolist()),
        reversed(column.codes.tolist()),
        strict=True,
    ):
        if code >= 0 or number == number:  # noqa: PLR0124 - NaN has no place in an order
            values[row] = (code >= 0, texts[code] if code >= 0 else number)
    with_value = sorted((row for row in rows if row in values), key=lambda row: values[row], reverse=not ascending)
    return with_value + [row for row in rows if row not in values]


def _live_columns(
    repository: Repository, index: VersionIndex, fields: Iterable[str | None]
) -> dict[str, FieldColumn]:
    """Read the columns of `fields` that are not in the index: tags and removals."""
    rows_of: dict[str, dict[int, int]] = {}
    for row, (name, number) in enumerate(_versions_of_rows(index)):
        rows_of.setdefault(name, {})[number] = row
    requested = set(fields)

    def removed(name: str) -> list[tuple[int, float]]:
        rows = rows_of[name]
        return [(rows[number], 1.0) for number in repository.removals("models", name).removed(rows)]

    def tags(name: str) -> list[tuple[int, str]]:
        rows = rows_of[name]
        by_tag: Mapping[str, int] = repository.tags("models", name)
        return [(rows[number], tag) for tag, number in by_tag.items() if number in rows]

    with ThreadPoolExecutor(_NAMES_AT_ONCE, thread_name_prefix="datasvc-find") as pool:
        map_names = map if repository.storage.is_local else pool.map
        columns: dict[str, FieldColumn] = {}
        if "removed" in requested:
            columns["removed"] = FieldColumn.build(
                sorted(pair for pairs in map_names(removed, rows_of) for pair in pairs)
            )
        if "tag" in requested:
            columns["tag"] = FieldColumn.build(sorted(pair for pairs in map_names(tags, rows_of) for pair in pairs))
    return columns
