"""How many steps lie between two places of a run: a pure function of the order's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.loaders.core.split_reader import Cursor
from datasvc.order import Tail, count_steps


@dataclass(frozen=True)
class StepIndex:
    """The steps of a run, one after the other over the epochs.

    Attributes:
        num_samples: of an epoch.
        global_batch: samples of a step over all ranks.
        tail: what becomes of the samples that fill no global batch.
    """

    num_samples: int
    global_batch: int
    tail: Tail

    def steps_between(self, first: Cursor, second: Cursor) -> int | None:
        """Return how many steps a run at `first` takes to `second`, below 0 where it is behind; None: never there.

        Both are starts of steps. A run that resumed at an odd position meets the others when the epoch ends.
        """
        if (second.epoch, second.position) < (first.epoch, first.position):
            back = self.steps_between(second, first)
            return None if back is None else -back
        if first.epoch == second.epoch:
            steps, rest = divmod(second.position - first.position, self.global_batch)
            return None if rest else steps
        steps, rest = divmod(second.position, self.global_batch)
        if rest:
            return None
        whole_epochs = (second.epoch - first.epoch - 1) * self._steps_from(0)
        return self._steps_from(first.position) + whole_epochs + steps

    def _steps_from(self, position: int) -> int:
        return count_steps(position, self.num_samples, self.global_batch, self.tail)

    def after(self, cursor: Cursor) -> Cursor:
        """Return the start of the step that follows the one at `cursor`."""
        position = cursor.position + self.global_batch
        if self._steps_from(min(position, self.num_samples)) > 0:
            return Cursor(cursor.epoch, position)
        return Cursor(cursor.epoch + 1, 0)
