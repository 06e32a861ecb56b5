"""Convert Python values to Arrow arrays without loss.

`pyarrow.array` alone stores 1.5 in an integer column as 1, a datetime in a date column as its date, and drops struct
fields that the type lacks. Here each of these values is an error, so that its sample becomes a bad sample.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa

# Errors that Arrow and this module raise for Python values that do not have the type of the array.
MISFITS: Final = (pa.ArrowException, OverflowError, TypeError, ValueError)
# Arrow recurses once per level of nested values; it ends the process at a few thousand levels.
MAX_DEPTH: Final = 64

_Classes = tuple[type, ...]
_INTEGERS: Final[_Classes] = (int, np.integer)
# For each kind of type, the classes of its values. bool is a subclass of int, and datetime of date: see `_REFUSED`.
_KINDS: Final[tuple[tuple[Callable[[pa.DataType], bool], _Classes], ...]] = (
    (pa.types.is_boolean, (bool, np.bool_)),
    (pa.types.is_integer, _INTEGERS),
    (pa.types.is_floating, (float, np.floating, *_INTEGERS)),
    (pa.types.is_decimal, (Decimal, *_INTEGERS)),
    (pa.types.is_string, (str,)),
    (pa.types.is_large_string, (str,)),
    (pa.types.is_binary, (bytes, bytearray, memoryview)),
    (pa.types.is_large_binary, (bytes, bytearray, memoryview)),
    (pa.types.is_fixed_size_binary, (bytes, bytearray, memoryview)),
    (pa.types.is_date, (dt.date, np.datetime64)),
    (pa.types.is_timestamp, (dt.datetime, np.datetime64)),
    (pa.types.is_time, (dt.time,)),
    (pa.types.is_duration, (dt.timedelta, np.timedelta64)),
    (pa.types.is_struct, (Mapping,)),
    (pa.types.is_list, (list, tuple, np.ndarray)),
    (pa.types.is_large_list, (list, tuple, np.ndarray)),
    (pa.types.is_fixed_size_list, (list, tuple, np.ndarray)),
)
# Subclasses that a kind does not hold. A masked array would lose its mask; timedelta64 is an integer for NumPy.
_REFUSED: Final[Mapping[type, _Classes]] = {
    int: (bool, np.timedelta64),
    dt.date: (dt.datetime,),
    np.ndarray: (np.ma.MaskedArray,),
}
_NESTED: Final[_Classes] = (list, tuple, Mapping, np.ndarray)
_EXACT: Final[tuple[tuple[Callable[[pa.DataType], bool], type], ...]] = (
    (pa.types.is_float64, float),
    (pa.types.is_integer, int),
    (pa.types.is_string, str),
)
_TIMES: Final[_Classes] = (dt.datetime, dt.time, dt.timedelta)


def infer_array(values: Iterable[Any]) -> pa.Array:
    """Return the values of a column as an array of the type that holds them all. Raise one of `MISFITS`."""
    listed = list(map(_plain, values))
    try:
        array = pa.array(listed)
    except OverflowError:
        # Arrow infers int64 for Python integers, and does not try uint64.
        array = pa.array(listed, pa.uint64())
    _check(listed, array.type)
    return array


def to_array(values: Iterable[Any], data_type: pa.DataType) -> pa.Array:
    """Return the values of a column as an array of `data_type`. Raise one of `MISFITS` if one does not fit."""
    listed = list(map(_plain, values))
    _check(listed, data_type)
    return pa.array(listed, data_type)


def check_nesting(values: Iterable[Any]) -> None:
    """Raise ValueError if one of the values is nested more than `MAX_DEPTH` levels deep, or contains itself."""
    level = [value for value in values if _is_nested(value)]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        # By identity: lists that share their items, or contain themselves, would take exponential time.
        inner: dict[int, Any] = {}
        for items in map(_items, level):
            # The set of classes first: a list of a thousand numbers has one.
            if any(issubclass(cls, _NESTED) for cls in set(map(type, items))):
                inner.update((id(item), item) for item in items if _is_nested(item))
        level = list(inner.values())
    raise ValueError(f"a value is nested more than {MAX_DEPTH} levels deep, or contains itself")


def _is_nested(value: Any) -> bool:
    return isinstance(value, _NESTED) and not (isinstance(value, np.ndarray) and value.dtype != object)


def _items(value: Any) -> Collection[Any]:
    if isinstance(value, np.ndarray):
        return list(value.ravel().tolist())
    return list(value.values()) if isinstance(value, Mapping) else value


def _plain(value: Any) -> Any:
    """Return a value that Arrow takes: an array of several dimensions as lists of arrays, in native byte order."""
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        return value
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if value.ndim == 1:
        return value
    return list(map(_plain, value)) if value.ndim else value[()]


def _check(values: Iterable[Any], data_type: pa.DataType) -> None:
    """Raise ValueError for a value that would be changed by storing it as `data_type`."""
    filled = [value for value in values if value is not None]
    classes = set(map(type, filled))  # compared as a set, in C
    accepted = next((classes for is_kind, classes in _KINDS if is_kind(data_type)), None)
    if accepted is None or not filled:
        return  # Arrow checks the values of the other types, such as null
    refused = tuple(cls for base in accepted for cls in _REFUSED.get(base, ()))
    for cls in classes:
        if not issubclass(cls, accepted) or issubclass(cls, refused):
            value = next(value for value in filled if type(value) is cls)
            raise TypeError(f"{_shown(value)} has the type {cls.__name__}, but the column holds {data_type}")
    if pa.types.is_floating(data_type):
        _check_floats(filled, classes, data_type)
    elif pa.types.is_struct(data_type):
        _check_structs(filled, data_type)
    elif issubclass(next(iter(accepted)), list):
        _check_lists(filled, data_type)
    elif any(issubclass(cls, _TIMES) for cls in classes) or np.datetime64 in classes:
        _check_times(filled, data_type)


def _check_floats(values: Sequence[Any], classes: set[type], data_type: pa.DataType) -> None:
    """Raise ValueError for a number that `data_type` does not hold exactly."""
    dtype = np.dtype(data_type.to_pandas_dtype())
    if all(issubclass(cls, (float, np.floating)) and np.dtype(cls).itemsize <= dtype.itemsize for cls in classes):
        return
    for value in values:
        # A Python comparison of an integer with a float is exact. Only NaN differs from itself.
        stored = float(dtype.type(value))
        if stored != value and value == value:  # noqa: PLR0124
            raise ValueError(f"{_shown(value)} has more digits than a {data_type}")


def _check_structs(values: Sequence[Mapping[str, Any]], data_type: pa.StructType) -> None:
    names = {field.name for field in data_type}
    unknown = {name for value in values for name in value} - names
    if unknown:
        raise ValueError(f"the fields {sorted(unknown, key=str)} are unknown; the first samples have {sorted(names)}")
    for field in data_type:
        _check([value.get(field.name) for value in values], field.type)


def _check_lists(values: Sequence[Any], data_type: Any) -> None:
    inner: list[Any] = []
    # The class of values that Arrow stores in the list without loss, or refuses: they need no further check.
    exact = next((cls for is_kind, cls in _EXACT if is_kind(data_type.value_type)), None)
    for value in values:
        if not isinstance(value, np.ndarray):
            if exact is None or set(map(type, value)) != {exact}:
                inner += value
        elif value.ndim != 1:
            raise ValueError(
                f"an array of {value.ndim} dimensions is inside of another value; pass it as nested lists"
            )
        elif value.dtype == object or pa.from_numpy_dtype(value.dtype) != data_type.value_type:
            inner += value.tolist()  # values of another type are checked one by one
    _check(inner, data_type.value_type)


def _check_times(values: Sequence[Any], data_type: pa.DataType) -> None:
    """Raise ValueError for a time zone or for nanoseconds that Arrow would drop."""
    zone = data_type.tz if pa.types.is_timestamp(data_type) else None
    for value in values:
        has_zone = getattr(value, "tzinfo", None) is not None
        if has_zone != (zone is not None) and not isinstance(value, dt.timedelta):
            raise ValueError(f"{_shown(value)} has {'a' if has_zone else 'no'} time zone, unlike {data_type}")
        if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):  # of pandas
            raise ValueError(f"{_shown(value)} has nanoseconds; pass it as numpy.datetime64 or timedelta64")


def _shown(value: Any) -> str:
    return f"{value!r:.100}"
