"""Which rows of some columns meet an expression."""

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

_ORDERS: Final[dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]]] = {
    "=": (operator.eq, pc.equal),
    "<": (operator.lt, pc.less),
    "<=": (operator.le, pc.less_equal),
    ">": (operator.gt, pc.greater),
    ">=": (operator.ge, pc.greater_equal),
}
_ALWAYS_THERE: Final = frozenset(
    {"name", "version", "step", "created", "message", "parent", "data", "code", "tag", "removed"}
)
_SHORT_FOR: Final = ("metrics", "config")


def find_field(field: str, fields: Collection[str]) -> str:
    """Return the full name of a field: `top1` is short for `metrics.top1` or `config.top1`.

    Raises:
        ConfigError: no version has it, or both of these are there; says which come close.
    """
    if field in _ALWAYS_THERE or field in fields:
        return field
    found = [full for full in (f"{tree}.{field}" for tree in _SHORT_FOR) if full in fields]
    if len(found) > 1:
        raise ConfigError(f"{field!r} could be {' or '.join(found)}: write which")
    if not found:
        known = sorted({*fields, *_ALWAYS_THERE})
        short = {each.partition(".")[2] or each: each for each in known}
        near = [short[each] for each in difflib.get_close_matches(field.rpartition(".")[2], short, n=5, cutoff=0.5)]
        shown = f"near: {', '.join(near)}" if near else f"there are: {', '.join(known[:20])}"
        raise ConfigError(f"no version has a field {field!r}; {shown}")
    return found[0]


def evaluate(expression: Expression, column: Callable[[str], FieldColumn | None], num_rows: int) -> Mask:
    """Return which rows meet an expression: `bool[num_rows]`.

    What a version says nothing of meets no comparison, `!=` neither; where it has several values, one that meets it
    is enough, but `!=` means that none is equal.

    Args:
        expression: from `parse_expression`.
        column: gives the column of a field as it is written; None where no version has a value.
        num_rows: of all columns.

    Raises:
        ConfigError: a text is compared with a field of numbers, or the other way.
    """
    again = partial(evaluate, column=column, num_rows=num_rows)
    if isinstance(expression, Not):
        return ~again(expression.condition)
    if isinstance(expression, And | Or):
        met: Mask = again(expression.conditions[0])
        for condition in expression.conditions[1:]:
            met = met & again(condition) if isinstance(expression, And) else met | again(condition)
        return met
    found = column(expression.field)
    if isinstance(expression, Is):
        return _evaluate_is(expression, found, num_rows)
    if found is None:
        return np.zeros(num_rows, bool)
    if isinstance(expression, Within):
        return _mask(
            [row for value in expression.values for row in _rows(found, expression.field, "=", value)], num_rows
        )
    if expression.operator == "!=":
        equal = _mask(_rows(found, expression.field, "=", expression.value), num_rows)
        return _mask(found.rows, num_rows) & ~equal
    return _mask(_rows(found, expression.field, expression.operator, expression.value), num_rows)


def _evaluate_is(expression: Is, found: FieldColumn | None, num_rows: int) -> Mask:
    if found is None:
        return np.full(num_rows, expression.what == "null")
    if expression.what == "null":
        return ~_mask(found.rows, num_rows)
    if expression.what == "nan":
        return _mask(found.rows_of_numbers(np.isnan), num_rows)
    return _mask(found.rows_of_numbers(lambda numbers: (numbers != 0) & ~np.isnan(numbers)), num_rows)


def _rows(found: FieldColumn, field: str, order: str, value: Literal) -> Any:
    if isinstance(value, str):
        if not found.has_texts and len(found.rows):
            raise ConfigError(
                f"{field} holds numbers; compare it with a number, without quotes, and not with {value!r}"
            )
        if order == "like":
            return found.rows_of_texts(lambda texts: pc.match_like(texts, value))
        return found.rows_of_texts(lambda texts: _ORDERS[order][1](texts, value))
    if not found.has_numbers and len(found.rows):
        raise ConfigError(f"{field} holds texts; compare it with a text in single quotes, and not with {value:g}")
    return found.rows_of_numbers(lambda numbers: _ORDERS[order][0](numbers, value))


def _mask(rows: Iterable[int], num_rows: int) -> Mask:
    mask = np.zeros(num_rows, bool)
    mask[np.asarray(rows, np.intp)] = True
    return mask
