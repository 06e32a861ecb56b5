"""Evaluate an expression over columns: return the rows that meet it."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc

from datasvc.errors import ConfigError
from datasvc.models.search.columns import FieldColumn, Mask
from datasvc.models.search.expression import And, Expression, Is, Literal, Not, Or, Within

# Each comparison for numbers (NumPy) and for texts (Arrow).
_COMPARISONS: Final[dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]]] = {
    "=": (operator.eq, pc.equal),
    "<": (operator.lt, pc.less),
    "<=": (operator.le, pc.less_equal),
    ">": (operator.gt, pc.greater),
    ">=": (operator.ge, pc.greater_equal),
}
_ALWAYS_THERE: Final = frozenset(
    {"name", "version", "step", "created", "message", "parent", "data", "code", "tag", "removed"}
)
_OPTIONAL_PREFIXES: Final = ("metrics", "config")


def find_field(field: str, fields: Collection[str]) -> str:
    """Return the full name of a field: `top1` is short for `metrics.top1` or `config.top1`.

    Raises:
        ConfigError: no version has the field, or the short name is ambiguous. The message lists similar fields.
    """
    if field in _ALWAYS_THERE or field in fields:
        return field
    matches = [full for full in (f"{prefix}.{field}" for prefix in _OPTIONAL_PREFIXES) if full in fields]
    if len(matches) > 1:
        raise ConfigError(f"{field!r} is ambiguous: it could be {' or '.join(matches)}; write the full name")
    if not matches:
        existing = sorted({*fields, *_ALWAYS_THERE})
        full_names = {name.partition(".")[2] or name: name for name in existing}
        similar = difflib.get_close_matches(field.rpartition(".")[2], full_names, n=5, cutoff=0.5)
        near = ", ".join(full_names[name] for name in similar)
        hint = f"similar fields: {near}" if near else f"there are: {', '.join(existing[:20])}"
        raise ConfigError(f"no version has a field {field!r}; {hint}")
    return matches[0]


def evaluate(expression: Expression, column: Callable[[str], FieldColumn | None], num_rows: int) -> Mask:
    """Return a mask of the rows that meet an expression: `bool[num_rows]`.

    A row without a value meets no comparison, not even `!=`. A row with several values meets a comparison if one of
    them does; it meets `!=` if none of them is equal.

    Args:
        expression: result of `parse_expression`.
        column: function that returns the column of a field, by the name in the expression; None if no version has a
            value.
        num_rows: number of rows of the index.

    Raises:
        ConfigError: a text is compared with a field of numbers, or a number with a field of texts.
    """
    again = partial(evaluate, column=column, num_rows=num_rows)
    if isinstance(expression, Not):
        return ~again(expression.condition)
    if isinstance(expression, And | Or):
        met: Mask = again(expression.conditions[0])
        for condition in expression.conditions[1:]:
            met = met & again(condition) if isinstance(expression, And) else met | again(condition)
        return met
    values = column(expression.field)
    if isinstance(expression, Is):
        return _evaluate_is(expression, values, num_rows)
    if values is None:
        return np.zeros(num_rows, bool)
    if isinstance(expression, Within):
        return _mask(
            [row for value in expression.values for row in _rows(values, expression.field, "=", value)], num_rows
        )
    if expression.operator == "!=":
        equal = _mask(_rows(values, expression.field, "=", expression.value), num_rows)
        return _mask(values.rows, num_rows) & ~equal
    return _mask(_rows(values, expression.field, expression.operator, expression.value), num_rows)


def _evaluate_is(expression: Is, values: FieldColumn | None, num_rows: int) -> Mask:
    if values is None:
        return np.full(num_rows, expression.what == "null")
    if expression.what == "null":
        return ~_mask(values.rows, num_rows)
    if expression.what == "nan":
        return _mask(values.rows_of_numbers(np.isnan), num_rows)
    return _mask(values.rows_of_numbers(lambda numbers: (numbers != 0) & ~np.isnan(numbers)), num_rows)


def _rows(values: FieldColumn, field: str, comparison: str, value: Literal) -> Any:
    if isinstance(value, str):
        # A column without values fits numbers and texts.
        if not values.has_texts and len(values.rows):
            raise ConfigError(
                f"{field} holds numbers; compare it with a number, without quotes, and not with {value!r}"
            )
        if comparison == "like":
            return values.rows_of_texts(lambda texts: pc.match_like(texts, value))
        return values.rows_of_texts(lambda texts: _COMPARISONS[comparison][1](texts, value))
    if not values.has_numbers and len(values.rows):
        raise ConfigError(f"{field} holds texts; compare it with a text in single quotes, and not with {value:g}")
    return values.rows_of_numbers(lambda numbers: _COMPARISONS[comparison][0](numbers, value))


def _mask(rows: Iterable[int], num_rows: int) -> Mask:
    mask = np.zeros(num_rows, bool)
    mask[np.asarray(rows, np.intp)] = True
    return mask
