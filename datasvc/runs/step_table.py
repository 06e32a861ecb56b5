"""`StepTable` and `Series`: numbers of a run by step. Old steps are combined to mean, minimum and maximum.

A *bin* is one row of a table: one step, or several consecutive steps that were combined.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_INT64: Final = "<i8"
_FLOAT64: Final = "<f8"
_FLOAT32: Final = "<f4"  # of values: seven digits are enough for a curve
MAX_NAMES: Final = 1024
"""Most names of a stored table."""
MAX_SHIFT: Final = 63
"""With bins of 2^63 steps, each table has one bin."""


@dataclass(frozen=True)
class Series:
    """Values by step, ascending. A point is one step, or the mean over several that the log has combined.

    Attributes:
        steps: int64[point], last step of each point.
        values: float64[point], mean.
        low: float64[point], minimum.
        high: float64[point], maximum.
        times: float64[point], when the last step was reported, in seconds since 1970.
        counts: int64[point], number of steps that were reported in each point.
    """

    steps: Integers
    values: Floats
    low: Floats
    high: Floats
    times: Floats
    counts: Integers

    def __len__(self) -> int:
        return len(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the points as lists; a value that is not finite is None."""
        floats = {name: [value if math.isfinite(value) else None for value in getattr(self, name).tolist()]
                  for name in ("values", "low", "high")}  # fmt: skip
        return {"steps": self.steps.tolist(), **floats, "times": self.times.tolist(), "counts": self.counts.tolist()}


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

    @property
    def names_bytes(self) -> int:
        """Bytes that a table without bins takes as JSON, or some more."""
        return len(json.dumps(self.names)) + 128

    @property
    def bin_bytes(self) -> int:
        """Bytes that a bin takes as JSON, or some more."""
        # Two columns of eight bytes, and for each name a value of four bytes, as base64.
        return self.combined_bin_bytes if self.is_combined else 22 + 6 * len(self.names)

    @property
    def combined_bin_bytes(self) -> int:
        """Bytes that a bin of several steps takes as JSON, or some more."""
        # Four columns of eight bytes, and for each name three values of four bytes, as base64.
        return 43 + 16 * len(self.names)

    @property
    def is_combined(self) -> bool:
        """Whether any bin has several steps."""
        return bool((self.counts != 1).any())

    @classmethod
    def from_rows(cls, names: tuple[str, ...], rows: Sequence[tuple[int, float, tuple[float, ...]]]) -> Self:
        """Return the table of single steps, each given by its number, its time, and the values of `names`."""
        steps = np.array([row[0] for row in rows], np.int64)
        values = np.array([row[2] for row in rows], np.float64).reshape(len(rows), len(names))
        times = np.array([row[1] for row in rows], np.float64)
        return cls(names, steps, steps, np.ones(len(rows), np.int64), times, values, values, values)

    def count_bins(self, shift: int) -> int:
        """Return how many bins `thin` leaves."""
        return len(self._find_starts(shift))

    def thin(self, shift: int) -> StepTable:
        """Return a table with bins of 2^shift steps: consecutive bins whose steps differ only below are combined."""
        starts = self._find_starts(shift)
        if len(starts) == len(self):
            return self
        ends = np.append(starts[1:], len(self)) - 1
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

    def _find_starts(self, shift: int) -> Integers:
        places = self.last >> shift
        return np.flatnonzero(np.append(True, places[1:] != places[:-1]))

    def select(self, chosen: NDArray[np.bool_]) -> StepTable:
        """Return the table of the bins for which `chosen`, bool[bin], is true."""
        columns = (self.first, self.last, self.counts, self.times, self.mean, self.low, self.high)
        return StepTable(self.names, *(column[chosen] for column in columns))  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values; columns that follow from others are left out."""
        table = {
            "names": list(self.names),
            "last": _pack(self.last, _INT64),
            "times": _pack(self.times, _FLOAT64),
            "mean": _pack(self.mean, _FLOAT32),
        }
        if self.is_combined:
            table |= {
                "first": _pack(self.first, _INT64),
                "counts": _pack(self.counts, _INT64),
                "low": _pack(self.low, _FLOAT32),
                "high": _pack(self.high, _FLOAT32),
            }
        return table

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Self:
        """Return the table of a `to_json` result. Raises ValueError, TypeError or KeyError: it has another form."""
        names = tuple(table["names"])
        if not all(isinstance(name, str) for name in names) or len(names) > MAX_NAMES:
            raise ValueError("the names of a table have another form")
        last = _unpack(table["last"], _INT64)
        first = _unpack(table["first"], _INT64) if "first" in table else last
        counts = _unpack(table["counts"], _INT64) if "counts" in table else np.ones_like(last)
        times = _unpack(table["times"], _FLOAT64)
        if not first.shape == counts.shape == times.shape == last.shape:
            raise ValueError("the columns of a table have different lengths")
        mean, low, high = (
            _unpack(table.get(name, table["mean"]), _FLOAT32).reshape(len(last), len(names)).astype(np.float64)
            for name in ("mean", "low", "high")
        )
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


def _pack(values: NDArray[Any], dtype: str) -> str:
    # Base64 and not decimal numbers: these take the writer a hundred times as long, and more bytes.
    with np.errstate(over="ignore"):  # a value that is too large for a float32 is infinite
        return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def _unpack(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)
