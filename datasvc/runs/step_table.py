"""`StepTable`: numbers of a run by step. Old steps are combined to mean, minimum and maximum: a log stays small.

A *bin* is one row of a table: one step, or several consecutive steps that were combined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_DIGITS: Final = 6  # significant digits of a stored number; more would double the size of a log for no use
_MAX_NAMES: Final = 1024


@dataclass(frozen=True)
class StepTable:
    """Numbers by step; all bins of a table have the same names.

    Attributes:
        names: names of the numbers, such as ("loss", "rate").
        first: int64[bin], first step of each bin.
        last: int64[bin], last step of each bin.
        counts: int64[bin], number of steps that were reported in each bin.
        times: float64[bin], when the last step of each bin was reported, in seconds since 1970.
        mean: float64[bin, name].
        low: float64[bin, name], smallest value.
        high: float64[bin, name], largest value.
    """

    names: tuple[str, ...]
    first: Integers
    last: Integers
    counts: Integers
    times: Floats
    mean: Floats
    low: Floats
    high: Floats

    def __len__(self) -> int:
        return len(self.last)

    @classmethod
    def from_rows(cls, names: tuple[str, ...], rows: Sequence[tuple[int, float, tuple[float, ...]]]) -> Self:
        """Return the table of single steps, each given by its number, its time, and the values of `names`."""
        steps = np.array([row[0] for row in rows], np.int64)
        values = np.array([row[2] for row in rows], np.float64).reshape(len(rows), len(names))
        times = np.array([row[1] for row in rows], np.float64)
        return cls(names, steps, steps, np.ones(len(rows), np.int64), times, values, values, values)

    def thin(self, max_bins: int) -> StepTable:
        """Return a table with at most `max_bins` bins: the same number of consecutive bins is combined to each."""
        group = math.ceil(len(self) / max_bins)
        if group <= 1:
            return self
        starts = np.arange(0, len(self), group)
        ends = np.minimum(starts + group, len(self)) - 1
        counts = np.add.reduceat(self.counts, starts)
        with np.errstate(invalid="ignore"):  # infinity times a weight, and sums of both infinities
            sums = np.add.reduceat(self.mean * self.counts[:, None], starts)
        return StepTable(
            self.names,
            np.minimum.reduceat(self.first, starts),
            np.maximum.reduceat(self.last, starts),
            counts,
            self.times[ends],
            sums / counts[:, None],
            # A NaN stays visible: both functions return it if one value of the group is NaN.
            np.minimum.reduceat(self.low, starts),
            np.maximum.reduceat(self.high, starts),
        )

    def select(self, chosen: NDArray[np.bool_]) -> StepTable:
        """Return the table of the bins for which `chosen`, bool[bin], is true."""
        columns = (self.first, self.last, self.counts, self.times, self.mean, self.low, self.high)
        return StepTable(self.names, *(column[chosen] for column in columns))  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values, column by column; columns that follow from others are left out."""
        table: dict[str, Any] = {
            "names": list(self.names),
            "last": self.last.tolist(),
            "times": [round(time_s, 3) for time_s in self.times.tolist()],
            "mean": _encode(self.mean),
        }
        if (self.counts != 1).any():
            table |= {
                "first": self.first.tolist(),
                "counts": self.counts.tolist(),
                "low": _encode(self.low),
                "high": _encode(self.high),
            }
        return table

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Self:
        """Return the table of a `to_json` result. Raises ValueError, TypeError or KeyError: it has another form."""
        names = tuple(table["names"])
        last = np.array(table["last"], np.int64)
        if not all(isinstance(name, str) for name in names) or len(names) > _MAX_NAMES or last.ndim != 1:
            raise ValueError("the names or the steps of a table have another form")
        shape = (len(last), len(names))
        mean = _decode(table["mean"], shape)
        first, counts = (
            np.array(table.get(name, default), np.int64)
            for name, default in (("first", last), ("counts", np.ones_like(last)))
        )
        times = np.array(table["times"], np.float64)
        if not first.shape == counts.shape == times.shape == last.shape:
            raise ValueError("the columns of a table have different lengths")
        low, high = (_decode(table[name], shape) if name in table else mean for name in ("low", "high"))
        return cls(names, first, last, counts, times, mean, low, high)


def concat(tables: Iterable[StepTable]) -> list[StepTable]:
    """Combine tables of the same names, in the order given; return one table for each set of names."""
    groups: dict[tuple[str, ...], list[StepTable]] = {}
    for table in tables:
        groups.setdefault(table.names, []).append(table)
    return [group[0] if len(group) == 1 else _concat(group) for group in groups.values()]


def _concat(tables: Sequence[StepTable]) -> StepTable:
    fields = ("first", "last", "counts", "times", "mean", "low", "high")
    return StepTable(
        tables[0].names, *(np.concatenate([getattr(table, field) for table in tables]) for field in fields)
    )


def _encode(values: Floats) -> list[list[float | str]]:
    """Return the columns of values, rounded. JSON has no NaN and no infinity: they become text."""
    is_finite = bool(np.isfinite(values).all())
    return [[_round(value, is_finite=is_finite) for value in column] for column in values.T.tolist()]


def _round(value: float, *, is_finite: bool) -> float | str:
    if is_finite or math.isfinite(value):
        return float(f"{value:.{_DIGITS}g}")
    return repr(value)


def _decode(columns: Any, shape: tuple[int, int]) -> Floats:
    values = np.array([[float(value) for value in column] for column in columns], np.float64)
    return values.reshape(shape[::-1]).T if values.size == shape[0] * shape[1] else _refuse(columns)


def _refuse(columns: Any) -> Floats:
    raise ValueError(f"a table has {len(columns)} columns of other lengths than its steps")
