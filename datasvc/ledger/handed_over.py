"""Records which positions of an access order the loaders of this process have handed over to the training loop.

The loaders of `datasvc.loaders.torch` call `record_batch`. A `CheckpointManager` reads the record, so that its
versions name the data that they consumed. The record belongs to the order and not to the loader: a program may make a
new loader in each epoch. It has one range for each uninterrupted series of batches, and lasts until the process ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from datasvc.ledger.masked import NOTHING_MASKED, Masked, with_masks
from datasvc.order import OrderConfig, OrderState, Tail


@dataclass(frozen=True)
class HandedOrder:
    """The access order of a split.

    Attributes:
        dataset: version of the data set, such as "digits@1".
        split: name of the split.
        table: digest of the split's shard table.
        config: parameters of the order.
        masked: samples that the run masks.
        view: how the samples of a view were chosen; None for a split of a version.
    """

    dataset: str
    split: str
    table: str
    config: OrderConfig
    masked: Masked = NOTHING_MASKED
    view: str | None = None

    def state_at(self, cursor: tuple[int, int]) -> dict[str, Any]:
        """Return the loader state at an epoch and position."""
        return with_masks(OrderState(self.table, *cursor, self.config).to_dict(), self.masked)


@dataclass(frozen=True)
class HandedRange:
    """Batches that were handed over one after the other.

    Attributes:
        start: epoch and position at which the first batch starts.
        stop: epoch and position after the last batch.
        global_batch: samples per step over all ranks.
        tail: treatment of samples that do not fill a global batch.
        is_epoch_end: whether the epoch of `stop` has no further batch.
    """

    start: tuple[int, int]
    stop: tuple[int, int]
    global_batch: int
    tail: Tail
    is_epoch_end: bool

    def continues(self, earlier: HandedRange) -> bool:
        """Return whether this range starts where `earlier` stops, with the same batches."""
        follows = self.start == earlier.stop or (earlier.is_epoch_end and self.start == (earlier.stop[0] + 1, 0))
        return follows and (self.global_batch, self.tail) == (earlier.global_batch, earlier.tail)


Mark = Mapping[HandedOrder, tuple[int, tuple[int, int]]]
"""A moment: of each order, the number of its ranges, and where the last one stopped."""

_ranges: dict[HandedOrder, list[HandedRange]] = {}


def record_batch(order: HandedOrder, batch: HandedRange) -> None:
    """Record that a batch was handed over."""
    ranges = _ranges.setdefault(order, [])
    if ranges and batch.continues(ranges[-1]):
        ranges[-1] = replace(batch, start=ranges[-1].start)
    else:
        ranges.append(batch)


def mark() -> Mark:
    """Return the present moment, for `handed_over_since`."""
    return {order: (len(ranges), ranges[-1].stop) for order, ranges in _ranges.items()}


def handed_over_since(moment: Mark) -> dict[HandedOrder, list[HandedRange]]:
    """Return what was handed over after `moment`, in the order of time; orders without a batch since are left out."""
    found: dict[HandedOrder, list[HandedRange]] = {}
    for order, ranges in _ranges.items():
        num_before, stop = moment.get(order, (0, None))
        since = ranges[num_before:]
        if stop is not None and ranges[num_before - 1].stop != stop:  # the range was extended after the moment
            since.insert(0, replace(ranges[num_before - 1], start=stop))
        if since:
            found[order] = since
    return found
