"""Rows of the version index: one for each model version, with the fields of its entry that SQL can use.

Metrics, settings, environment, execution, code, modules and operators (`TREES`) have fields that differ from model to
model. In a row they form one list of values, because a table with a column for each field would be nearly empty.
`query` makes the columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from datasvc.repository import Entry

_TEXTS: Final = ("created", "message")
_COUNTS: Final = ("step", "epoch", "size_bytes", "stored_bytes", "num_tensors", "num_nonfinite")
_LISTS: Final = ("data", "evaluation", "parents")
TREES: Final = ("metrics", "config", "environment", "execution", "code", "modules", "ops")
VALUES: Final = "values"
KINDS: Final = ("number", "boolean", "text")
SCHEMA: Final = pa.schema(
    {
        "model": pa.string(),
        "version": pa.int64(),
        **dict.fromkeys(_TEXTS, pa.string()),
        **dict.fromkeys(_COUNTS, pa.int64()),
        **dict.fromkeys(_LISTS, pa.list_(pa.string())),
        # `field` is the position in the list of all fields; a boolean is stored as a number.
        VALUES: pa.list_(pa.struct({"field": pa.int32(), "number": pa.float64(), "text": pa.string()})),
    }
)
# Longest path. Values below this depth are not indexed; the settings of a run are flat or nearly flat.
MAX_DEPTH: Final = 9


class Field(NamedTuple):
    """A field in one of the trees. If a path has values of several kinds, each kind is a field of its own.

    Attributes:
        path: names from the tree down, such as ("config", "optimizer", "lr").
        kind: one of `KINDS`.
        is_list: whether a version may have several values.
    """

    path: tuple[str, ...]
    kind: str
    is_list: bool


def build_rows(versions: Iterable[tuple[str, Entry]], fields: dict[Field, int]) -> pa.Table:
    """Return a table of `SCHEMA` with the rows of versions, given as pairs (model name, entry).

    Args:
        versions: the versions.
        fields: position of each field in the list of all fields; this function adds the missing ones.
    """
    rows = []
    offsets, positions, numbers, texts = [0], list[int](), list[float | None](), list[str | None]()
    for name, entry in versions:
        row = {"model": name, "version": entry.number, **_describe(entry.content)}
        for field, value in _leaves({tree: row.pop(tree) for tree in TREES}, ()):
            positions.append(fields.setdefault(field, len(fields)))
            numbers.append(None if isinstance(value, str) else _number(value))
            texts.append(value if isinstance(value, str) else None)
        offsets.append(len(positions))
        rows.append(row)
    values = pa.StructArray.from_arrays(
        [pa.array(positions, pa.int32()), pa.array(numbers, pa.float64()), pa.array(texts, pa.string())],
        fields=list(SCHEMA.field(VALUES).type.value_type),
    )
    table = pa.Table.from_pylist(rows, SCHEMA.remove(SCHEMA.get_field_index(VALUES)))
    return table.append_column(SCHEMA.field(VALUES), pa.ListArray.from_arrays(np.array(offsets, np.int32), values))


def _describe(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns and the trees of an entry; a field of an unexpected type is None or empty."""
    uses = [use for use in _list_or_empty(content.get("data")) if isinstance(use, Mapping)]
    training = [use for use in uses if use.get("purpose") != "evaluation"]
    states = [use["state"] for use in training if isinstance(use.get("state"), Mapping)]
    trees = {tree: value if isinstance(value := content.get(tree), Mapping) else {} for tree in TREES}
    nonfinite = content.get("num_nonfinite")
    counts = dict(content) | {
        "epoch": max((state["epoch"] for state in states if isinstance(state.get("epoch"), int)), default=None),
        "size_bytes": content.get("bytes"),
        "num_nonfinite": sum(filter(_is_int64, nonfinite.values())) if isinstance(nonfinite, Mapping) else 0,
    }
    return {
        **{name: text if isinstance(text := content.get(name), str) else None for name in _TEXTS},
        **{name: count if _is_int64(count := counts.get(name)) else None for name in _COUNTS},
        "data": _refs(use.get("dataset") for use in training),
        "evaluation": _refs(use.get("dataset") for use in uses if use not in training),
        "parents": _refs([content.get("parent"), *_list_or_empty(content.get("merged"))]),
        **trees,
        "metrics": {name: _metric(value) for name, value in trees["metrics"].items()},
    }


def _is_int64(value: Any) -> bool:
    # `isinstance` would accept a boolean, which Arrow does not convert.
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _refs(values: Iterable[Any]) -> list[str]:
    # For a mixture, `dataset` is several versions separated by ', '.
    return [ref for value in values if isinstance(value, str) and value for ref in value.split(", ")]


def _metric(value: Any) -> Any:
    # JSON has no NaN and no infinity; a metric stores them as text.
    return float(value) if isinstance(value, str) and value in {"nan", "inf", "-inf"} else value


def _leaves(value: Any, path: tuple[str, ...], *, is_list: bool = False) -> Iterator[tuple[Field, str | float]]:
    """Yield each text, boolean and number in a tree, with its field."""
    if isinstance(value, str):
        yield Field(path, "text", is_list), value
    elif isinstance(value, bool | int | float):
        yield Field(path, "boolean" if isinstance(value, bool) else "number", is_list), value
    elif len(path) < MAX_DEPTH and isinstance(value, Mapping):
        for key, child in value.items():
            yield from _leaves(child, (*path, key), is_list=is_list)
    elif len(path) < MAX_DEPTH and isinstance(value, list):
        for child in value:
            yield from _leaves(child, path, is_list=True)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # JSON integers are unbounded
        return float("inf") if value > 0 else float("-inf")


def _list_or_empty(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
