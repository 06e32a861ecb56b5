"""Makes the data uses of a version from what the loaders of this process recorded, for saves without `data=`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import replace

from datasvc.ledger.handed_over import handed_over_since, mark
from datasvc.models.versions.data_use import DataUse, ReadSpan


class RecordedData:
    """The data that a run consumes, from now on.

    Args:
        step: number of optimizer steps that the current weights have had.
        earlier: data uses of these weights since the version that they continue, if that is not their own version.
    """

    def __init__(self, step: int = 0, *, earlier: Sequence[DataUse] = ()) -> None:
        training = [use for use in earlier if use.purpose == "training"]
        self._earlier = {_order_of(use): use for use in training}
        self._run = next((use.run for use in training if use.run is not None), secrets.token_hex(8))
        self._step = step
        self._began = mark()

    def uses(self) -> tuple[DataUse, ...]:
        """Return what was handed over so far, one use for each access order."""
        uses = dict(self._earlier)
        for order, ranges in handed_over_since(self._began).items():
            # Only the first span has a step: batches between spans may have been looked at without a training step.
            spans = tuple(
                ReadSpan(part.start, part.stop, None if index else self._step, part.global_batch, part.tail)
                for index, part in enumerate(ranges)
            )
            state = order.state_at(ranges[-1].stop)
            use = DataUse(order.dataset, order.split, state, run=self._run, spans=spans)
            key = _order_of(use)
            uses[key] = replace(use, spans=_join(uses[key].spans, spans)) if key in uses else use
        return tuple(uses.values())


def _order_of(use: DataUse) -> tuple[object, ...]:
    """Return what the uses of one order have in common."""
    state = {name: value for name, value in use.state.items() if name not in {"epoch", "position"}}
    return use.dataset, use.split, json.dumps(state, sort_keys=True)


def _join(earlier: Sequence[ReadSpan], later: Sequence[ReadSpan]) -> tuple[ReadSpan, ...]:
    """Return all spans; the first of `later` is joined to the last of `earlier` if it continues it."""
    if not earlier or not later:
        return (*earlier, *later)
    last, first = earlier[-1], later[0]
    if last.stop != first.start or (last.global_batch, last.tail) != (first.global_batch, first.tail):
        return (*earlier, *later)
    return (*earlier[:-1], replace(last, stop=first.stop), *later[1:])
