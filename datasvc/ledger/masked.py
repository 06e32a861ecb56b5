"""Samples that a run masks: they keep their positions in the batches, but no loss counts them.

A run masks ranges of positions, such as those of `--skip`, or samples, such as those that a model must forget. Order,
positions and augmentation of all other samples stay those of a run without masks. A loader stores its masks in its
state. So a resumed run and all ranks have them, and the data use of a model version names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers

MASKED: Final = "masked"
"""Field of the masks in the state of a loader; states without masks do not have it."""

Cursor = tuple[int, int]
"""Epoch and position."""


@dataclass(frozen=True, order=True)
class MaskedRows:
    """Samples of one shard that a run masks.

    Attributes:
        since: epoch and position from which they are masked; they count at earlier positions.
        table: digest of the shard table, `Split.digest`.
        shard: number of the shard in the table.
        rows: rows of the samples in the shard's file, in which deleted samples have rows too.
    """

    since: Cursor
    table: str
    shard: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Masked:
    """Samples that a loader masks. Values are sorted and joined, so equal masks are equal values.

    Args:
        positions: ranges (epoch, start, stop) of positions.
        samples: rows of shards.

    Raises:
        ConfigError: a number is negative or not an integer, or a range ends before it starts.
    """

    positions: tuple[tuple[int, int, int], ...] = ()
    samples: tuple[MaskedRows, ...] = ()

    def __post_init__(self) -> None:
        numbers = [number for span in self.positions for number in span]
        numbers += [number for item in self.samples for number in (*item.since, item.shard, *item.rows)]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ConfigError(f"masks are integers of at least 0; found {self.positions!r} and {self.samples!r}")
        for epoch, start, stop in self.positions:
            if start > stop:
                raise ConfigError(f"the masked positions {start} to {stop} of epoch {epoch} end before they start")
        object.__setattr__(self, "positions", _join_ranges(self.positions))
        object.__setattr__(self, "samples", _join_rows(self.samples))

    @classmethod
    def rows(cls, table: str, rows: Mapping[int, Iterable[int]], *, since: Cursor = (0, 0)) -> Masked:
        """Return masks of samples of one split: number of a shard -> rows in its file."""
        items = {shard: tuple(int(row) for row in chosen) for shard, chosen in rows.items()}
        return cls(samples=tuple(MaskedRows(since, table, shard, chosen) for shard, chosen in items.items()))

    def __bool__(self) -> bool:
        return bool(self.positions or self.samples)

    def __or__(self, other: Masked) -> Masked:
        """Return the masks of both."""
        return Masked(self.positions + other.positions, self.samples + other.samples)

    def since(self, cursor: Cursor) -> Masked:
        """Return the masks for a run that begins to use them at a cursor: earlier positions count."""
        epoch, position = cursor
        ranges = [(at, max(start, position) if at == epoch else start, stop) for at, start, stop in self.positions]
        return Masked(
            tuple((at, start, stop) for at, start, stop in ranges if at >= epoch and start < stop),
            tuple(MaskedRows(max(item.since, cursor), item.table, item.shard, item.rows) for item in self.samples),
        )

    def at(self, epoch: int, positions: Integers) -> npt.NDArray[np.bool_]:
        """Return which positions of an epoch are masked as positions: `bool[n]`."""
        is_masked = np.zeros(len(positions), np.bool_)
        for masked_epoch, start, stop in self.positions:
            if masked_epoch == epoch:
                is_masked |= (positions >= start) & (positions < stop)
        return is_masked

    def to_dict(self) -> dict[str, Any]:
        """Return the masks as JSON values."""
        fields: dict[str, Any] = {}
        if self.positions:
            fields["positions"] = [list(span) for span in self.positions]
        if self.samples:
            fields["samples"] = [
                {"version": item.table, "shard": item.shard, "rows": list(item.rows)}
                | ({"since": list(item.since)} if item.since != (0, 0) else {})
                for item in self.samples
            ]
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Masked:
        """Return the masks of a `to_dict` result. Raises ConfigError: `fields` has another form."""
        try:
            return cls(
                tuple((epoch, start, stop) for epoch, start, stop in fields.get("positions", ())),
                tuple(_read_rows(item) for item in fields.get("samples", ())),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not the masks of a loader: {error!r}; found {fields!r}") from error


def _read_rows(item: Mapping[str, Any]) -> MaskedRows:
    epoch, position = item.get("since", (0, 0))
    return MaskedRows((epoch, position), str(item["version"]), item["shard"], tuple(item["rows"]))


def _join_ranges(ranges: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return the union of ranges, sorted and disjoint."""
    joined: list[tuple[int, int, int]] = []
    for epoch, start, stop in sorted(tuple(span) for span in ranges):
        if start == stop:
            continue
        if joined and joined[-1][0] == epoch and start <= joined[-1][2]:
            joined[-1] = (epoch, joined[-1][1], max(stop, joined[-1][2]))
        else:
            joined.append((epoch, start, stop))
    return tuple(joined)


def _join_rows(items: Iterable[MaskedRows]) -> tuple[MaskedRows, ...]:
    """Return one item for each shard and start, sorted. A row that is masked twice has the earlier start."""
    since: dict[tuple[str, int, int], Cursor] = {}
    for item in items:
        for row in item.rows:
            place = (item.table, item.shard, row)
            since[place] = min(since.get(place, item.since), item.since)
    joined: dict[tuple[Cursor, str, int], list[int]] = {}
    for (table, shard, row), cursor in sorted(since.items()):
        joined.setdefault((cursor, table, shard), []).append(row)
    return tuple(sorted(MaskedRows(*place, tuple(rows)) for place, rows in joined.items()))


class BatchMasks:
    """Finds the samples of a batch that a loader masks."""

    def __init__(self, masked: Masked) -> None:
        self.masked = masked
        self._by_shard: dict[tuple[str, int], list[tuple[Cursor, Integers]]] = {}
        for item in masked.samples:
            rows = np.array(item.rows, np.int64)
            self._by_shard.setdefault((item.table, item.shard), []).append((item.since, rows))

    def find(
        self, epoch: int, positions: Integers, parts: Iterable[tuple[str, int, Integers, Integers]]
    ) -> npt.NDArray[np.bool_]:
        """Return which samples of a batch are masked: `bool[n]`.

        Args:
            epoch: epoch of the batch.
            positions: `int64[n]`, positions of the samples.
            parts: for each shard: the digest of its table, its number in the table, and `int64[k]` each the indices
                of its samples in the batch and their rows in the file.
        """
        is_masked = self.masked.at(epoch, positions)
        for table, shard, indices, rows in parts:
            for since, masked_rows in self._by_shard.get((table, shard), ()):
                first = since[1] if epoch == since[0] else 0
                if epoch >= since[0]:
                    is_masked[indices] |= np.isin(rows, masked_rows) & (positions[indices] >= first)
        return is_masked


NOTHING_MASKED: Final = Masked()


def masks_of(state: Mapping[str, Any]) -> Masked:
    """Return the masks in the state of a loader. Raises ConfigError: they have another form."""
    return Masked.from_dict(state[MASKED]) if MASKED in state else NOTHING_MASKED


def with_masks(state: Mapping[str, Any], masked: Masked) -> dict[str, Any]:
    """Return the state of a loader with its masks, in place of any that it has."""
    plain = {name: value for name, value in state.items() if name != MASKED}
    return plain | ({MASKED: masked.to_dict()} if masked else {})
