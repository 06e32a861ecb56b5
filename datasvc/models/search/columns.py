"""Columns of the version index: for each field, the rows (versions) that have it and their values.

A version may have several values in a field, such as its data sets, or none. A search reads only the columns of the
fields that its condition uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.models.search.expression import Literal
from datasvc.repository import Entry

Mask = npt.NDArray[np.bool_]
# The settings of a run are flat or nearly flat; deeper values are not indexed.
_MAX_DEPTH: Final = 8
_PLAIN: Final = ("step", "created", "message", "bytes", "stored_bytes", "num_tensors")
_TREES: Final = ("metrics", "config", "environment")
_NONFINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class FieldColumn:
    """The values of one field.

    Attributes:
        rows: `int32[n]`, row of each value, ascending.
        numbers: `float64[n]`, the values that are numbers; NaN for a text.
        codes: `int32[n]`, index into `texts` for each value that is a text; -1 for a number.
        texts: `string[m]`, the texts; a joined column may have duplicates.
    """

    rows: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.float64]
    codes: npt.NDArray[np.int32]
    texts: pa.Array

    @classmethod
    def build(cls, values: Iterable[tuple[int, Literal]]) -> FieldColumn:
        """Build a column from pairs (row, value), with ascending rows."""
        pairs = list(values)
        texts: dict[str, int] = {}
        codes = [texts.setdefault(value, len(texts)) if isinstance(value, str) else -1 for _, value in pairs]
        return cls(
            np.array([row for row, _ in pairs], np.int32),
            np.array([math.nan if isinstance(value, str) else value for _, value in pairs], np.float64),
            np.array(codes, np.int32),
            pa.array(list(texts), pa.string()),
        )

    @classmethod
    def join(cls, parts: Sequence[tuple[int, FieldColumn]]) -> FieldColumn:
        """Concatenate columns, given as pairs (first row, column)."""
        if len(parts) == 1 and parts[0][0] == 0:
            return parts[0][1]
        first_texts = np.cumsum([0, *(len(part.texts) for _, part in parts)])
        codes = [
            np.where(part.codes >= 0, part.codes + first_text, -1)
            for first_text, (_, part) in zip(first_texts, parts, strict=False)
        ]
        return cls(
            np.concatenate([part.rows + np.int32(start) for start, part in parts]),
            np.concatenate([part.numbers for _, part in parts]),
            np.concatenate(codes).astype(np.int32),
            pa.concat_arrays([part.texts for _, part in parts]),
        )

    @property
    def has_numbers(self) -> bool:
        """Whether the column has at least one number."""
        return bool((self.codes < 0).any())

    @property
    def has_texts(self) -> bool:
        """Whether the column has at least one text."""
        return bool((self.codes >= 0).any())

    def rows_of_numbers(self, test: Callable[[npt.NDArray[np.float64]], Mask]) -> npt.NDArray[np.int32]:
        """Return the rows with a number that passes `test`."""
        return self.rows[(self.codes < 0) & test(self.numbers)]

    def rows_of_texts(self, test: Callable[[pa.Array], pa.Array]) -> npt.NDArray[np.int32]:
        """Return the rows with a text that passes `test`, which is called once with all of `texts`."""
        if not len(self.texts):
            return self.rows[:0]
        passed = np.asarray(test(self.texts).to_numpy(zero_copy_only=False), bool)
        rows: npt.NDArray[np.int32] = self.rows[(self.codes >= 0) & passed[self.codes]]
        return rows


def build_columns(versions: Iterable[tuple[str, Entry]]) -> dict[str, FieldColumn]:
    """Return the columns of versions, given as pairs (model name, entry); the first version is row 0."""
    values: dict[str, list[tuple[int, Literal]]] = {}
    for row, (name, entry) in enumerate(versions):
        for field, value in describe_version(name, entry):
            values.setdefault(field, []).append((row, value))
    return {field: FieldColumn.build(pairs) for field, pairs in values.items()}


def describe_version(name: str, entry: Entry) -> Iterator[tuple[str, Literal]]:
    """Yield the indexed fields of a version as pairs (field, value)."""
    content = entry.content
    yield "name", name
    yield "version", float(entry.number)
    for field in _PLAIN:
        yield from _leaves(content.get(field), field, 0)
    for parent in (content.get("parent"), *_listed(content.get("merged"))):
        yield from _with_name("parent", parent)
    for use in _listed(content.get("data")):
        if isinstance(use, Mapping):
            field = "evaluation" if use.get("purpose") == "evaluation" else "data"
            yield from _with_name(field, use.get("dataset"))
    code = content.get("code")
    for field, value in code.items() if isinstance(code, Mapping) else ():
        yield from _leaves(value, "code" if field == "revision" else f"code.{field}", 0)
    nonfinite = content.get("num_nonfinite")
    yield "num_nonfinite", float(sum(nonfinite.values())) if isinstance(nonfinite, Mapping) else 0.0
    for field in _TREES:
        yield from _leaves(content.get(field), field, 0)


def _with_name(field: str, ref: Any) -> Iterator[tuple[str, Literal]]:
    """Yield a reference and its name without the version, so that 'imagenet' finds every version of it."""
    for part in ref.split(", ") if isinstance(ref, str) and ref else ():  # a mixture has several
        yield field, part
        if "@" in part:
            yield field, part.partition("@")[0]


def _leaves(value: Any, field: str, depth: int) -> Iterator[tuple[str, Literal]]:
    if isinstance(value, str):
        # JSON has no NaN and no infinity; a metric stores them as text.
        is_metric = field.startswith("metrics.")
        yield field, _NONFINITE[value] if is_metric and value in _NONFINITE else value
    elif isinstance(value, int | float):
        yield field, _number(value)
    elif depth < _MAX_DEPTH and isinstance(value, Mapping):
        for key, child in value.items():
            yield from _leaves(child, f"{field}.{key}", depth + 1)
    elif depth < _MAX_DEPTH and isinstance(value, list):
        for child in value:
            yield from _leaves(child, field, depth + 1)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # JSON integers are unbounded
        return math.copysign(math.inf, value)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
