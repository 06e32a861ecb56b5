"""Builds the table that `query` reads by SQL: `metrics`, `config` and other trees become typed structs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain, count
from typing import Any, Final

import numpy as np
import pyarrow as pa

from datasvc.models.search.index import VersionIndex
from datasvc.models.search.rows import TREES, VALUES, Field

_TYPES: Final = {"number": pa.float64(), "boolean": pa.bool_(), "text": pa.string()}
# These columns always exist, so that `not code.dirty` is valid in a repository where no version has the field.
_CODE_FIELDS: Final = (Field(("code", "revision"), "text", False), Field(("code", "dirty"), "boolean", False))
# Regular expression of SQL that names one field of a struct: metrics.top1, metrics['top1'].
_NAME_IN_STRUCT: Final = r"""\b{}"?\s*(?:\.|\[\s*'(?:[^']|'')*'\s*\])"""
# SQL with one of these words may read a column without naming it.
WILDCARDS: Final = ("*", "columns", "versions")


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
