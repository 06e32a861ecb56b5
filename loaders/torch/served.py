"""`ServedIndex`: a sample number, with the position at which an access order serves the sample.

`OrderBatchSampler` passes it to `Dataset`, because the random numbers of a transform depend on the position.
"""

from __future__ import annotations

from typing import Any, Self


class ServedIndex(int):
    """A sample number with its position in the order. It is an `int`, so any map-style data set accepts it.

    Args:
        number: number of the sample in its split.
        seed: seed of the order.
        epoch: epoch, counted from 0.
        position: position in the epoch.
        counts: whether the sample counts: False for padding samples; None if the order does not pad.
    """

    seed: int
    epoch: int
    position: int
    counts: bool | None

    def __new__(cls, number: int, seed: int, epoch: int, position: int, counts: bool | None = None) -> Self:
        """Create the number here, because an `int` cannot get its value in `__init__`."""
        index = super().__new__(cls, number)
        index.seed, index.epoch, index.position, index.counts = seed, epoch, position, counts
        return index

    def __reduce__(self) -> tuple[Any, ...]:
        return ServedIndex, (int(self), self.seed, self.epoch, self.position, self.counts)
