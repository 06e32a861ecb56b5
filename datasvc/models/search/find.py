"""`find_versions`: the versions of all models that meet a condition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from datasvc.models.search.columns import FieldColumn
from datasvc.models.search.evaluate import evaluate, find_field
from datasvc.models.search.expression import fields_of, parse_expression
from datasvc.models.search.index import VersionIndex, read_index
from datasvc.repository import Repository, Resolved

_NAMES_AT_ONCE: Final = 16
_LIVE: Final = ("tag", "removed")


def find_versions(
    repository: Repository,
    condition: str,
    *,
    order_by: str | None = None,
    ascending: bool = False,
    report: Callable[[int, int], None] | None = None,
) -> list[Resolved]:
    """Return the versions of all models that meet a condition.

    Args:
        repository: where they lie.
        condition: see `expression`. Fields: name, version, step, created, message, parent, data, code, code.dirty,
            tag, removed, bytes, stored_bytes, num_tensors, num_nonfinite, metrics.*, config.*, environment.*; what is
            in metrics or config needs no prefix. Removed versions are left out unless it names `removed`.
        order_by: a field of numbers or texts, versions without it last; default the name, newest first.
        ascending: lowest first.
        report: called with how many entries were read of how many that the stored index lacks.

    Raises:
        ConfigError: it does not parse, or names a field that no version has.
        CorruptDataError, UnavailableError: an entry cannot be read.
    """
    expression = parse_expression(condition)
    index = read_index(repository, report=report)
    known = index.fields
    # Nothing is there yet: then no field is, and whatever is asked for is not found.
    written = {field: find_field(field, known) if index.num_rows else field for field in fields_of(expression)}
    order_field = find_field(order_by, known) if order_by and index.num_rows else None
    live = _live_columns(repository, index, {*written.values(), order_field, "removed"})

    def column(field: str) -> FieldColumn | None:
        full = written.get(field, field)
        return live[full] if full in _LIVE else index.column(full)

    met = evaluate(expression, column, index.num_rows)
    if "removed" not in written.values():
        met[live["removed"].rows] = False
    rows = np.flatnonzero(met).tolist()
    places = _places(index)
    rows.sort(key=lambda row: (places[row][0], -places[row][1]))
    if order_field is not None:
        rows = _ordered(rows, column(order_field), ascending=ascending)
    return [Resolved("models", *places[row]) for row in rows]


def _places(index: VersionIndex) -> list[tuple[str, int]]:
    """Return name and number of every row."""
    names, numbers = index.column("name"), index.column("version")
    if names is None or numbers is None:
        return []
    texts = names.texts.to_pylist()
    return list(zip([texts[code] for code in names.codes.tolist()], map(int, numbers.numbers.tolist()), strict=True))


def _ordered(rows: list[int], column: FieldColumn | None, *, ascending: bool) -> list[int]:
    """Return rows by their values, those without one last; of several values the first counts."""
    if column is None:
        return rows
    texts, values = column.texts.to_pylist(), {}
    for row, number, code in zip(
        reversed(column.rows.tolist()),
        reversed(column.numbers.tolist()),
        reversed(column.codes.tolist()),
        strict=True,
    ):
        if code >= 0 or number == number:  # noqa: PLR0124 - a NaN is no value to order by
            values[row] = (code >= 0, texts[code] if code >= 0 else number)
    have = sorted((row for row in rows if row in values), key=lambda row: values[row], reverse=not ascending)
    return have + [row for row in rows if row not in values]


def _live_columns(
    repository: Repository, index: VersionIndex, fields: Iterable[str | None]
) -> dict[str, FieldColumn]:
    """Return the columns of what changes without a new version."""
    rows_of: dict[str, dict[int, int]] = {}
    for row, (name, number) in enumerate(_places(index)):
        rows_of.setdefault(name, {})[number] = row
    wanted = set(fields)

    def removed(name: str) -> list[tuple[int, float]]:
        rows = rows_of[name]
        return [(rows[number], 1.0) for number in repository.removals("models", name).removed(rows)]

    def tags(name: str) -> list[tuple[int, str]]:
        rows = rows_of[name]
        standing: Mapping[str, int] = repository.tags("models", name)
        return [(rows[number], tag) for tag, number in standing.items() if number in rows]

    with ThreadPoolExecutor(_NAMES_AT_ONCE, thread_name_prefix="datasvc-find") as pool:
        each_name = map if repository.storage.is_local else pool.map
        found: dict[str, FieldColumn] = {}
        if "removed" in wanted:
            found["removed"] = FieldColumn.build(
                sorted(pair for part in each_name(removed, rows_of) for pair in part)
            )
        if "tag" in wanted:
            found["tag"] = FieldColumn.build(sorted(pair for part in each_name(tags, rows_of) for pair in part))
    return found
