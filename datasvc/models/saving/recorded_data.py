"""Makes the data uses of a version from what the loaders of this process recorded, for saves without `data=`."""

from __future__ import annotations

import secrets

from datasvc.ledger.handed_over import handed_over_since, mark
from datasvc.models.versions.data_use import DataUse, ReadSpan


class RecordedData:
    """The data that a run consumes, from now on.

    Args:
        step: number of optimizer steps that the current weights have had.
    """

    def __init__(self, step: int = 0) -> None:
        self._run = secrets.token_hex(8)
        self._step = step
        self._began = mark()

    def uses(self) -> tuple[DataUse, ...]:
        """Return what was handed over so far, one use for each access order."""
        uses = []
        for order, ranges in handed_over_since(self._began).items():
            # Only the first span has a step: batches between spans may have been looked at without a training step.
            spans = tuple(
                ReadSpan(part.start, part.stop, None if index else self._step, part.global_batch, part.tail)
                for index, part in enumerate(ranges)
            )
            state = order.state_at(ranges[-1].stop)
            uses.append(DataUse(order.dataset, order.split, state, run=self._run, spans=spans))
        return tuple(uses)
