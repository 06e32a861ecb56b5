"""Number of steps between two cursors of a run: a pure function of the order's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.loaders.core.split_reader import Cursor
from datasvc.order import Tail, count_steps


@dataclass(frozen=True)
class StepIndex:
    """The steps of a run, counted across epochs.

    Attributes:
        num_samples: samples of an epoch.
        global_batch: samples of a step over all ranks.
        tail: treatment of the last samples that fill no global batch.
    """

    num_samples: int
    global_batch: int
    tail: Tail

    def steps_between(self, first: Cursor, second: Cursor) -> int | None:
        """Return the number of steps from `first` to `second`, both starts of steps; negative if `second` is earlier.

        None if no run through one of them reaches the other. A run that resumed at a position that is no multiple of
        the global batch has the same steps as the others from the next epoch on.
        """
        if (second.epoch, second.position) < (first.epoch, first.position):
            back = self.steps_between(second, first)
            return None if back is None else -back
        if first.epoch == second.epoch:
            steps, remainder = divmod(second.position - first.position, self.global_batch)
            return None if remainder else steps
        # A later epoch starts at position 0, whatever position the first run resumed at.
        steps, remainder = divmod(second.position, self.global_batch)
        if remainder:
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
