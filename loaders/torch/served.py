"""A sample's number together with the place at which an order serves it."""

from __future__ import annotations

from typing import Any, Self


class ServedIndex(int):
    """A sample's number: an `int` to whoever wants no more, so any map-style data set takes it.

    Args:
        number: of the sample in its split.
        seed: of the order.
        epoch: counted from 0.
        position: in that epoch.
        counts: False where the sample only pads; None where the order does not pad.
    """

    seed: int
    epoch: int
    position: int
    counts: bool | None

    def __new__(cls, number: int, seed: int, epoch: int, position: int, counts: bool | None = None) -> Self:
        """Return a new one: an `int` takes its value here."""
        index = super().__new__(cls, number)
        index.seed, index.epoch, index.position, index.counts = seed, epoch, position, counts
        return index

    def __reduce__(self) -> tuple[Any, ...]:
        return ServedIndex, (int(self), self.seed, self.epoch, self.position, self.counts)
