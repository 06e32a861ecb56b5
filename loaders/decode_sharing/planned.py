"""The steps of a run without their samples: what a loader goes through whose batches are decoded elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from datasvc.loaders.core.batches import SampleBatch
from datasvc.loaders.core.data_ranks import DataRanks
from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.decode_sharing.step_index import StepIndex
from datasvc.order import plan_step, slice_step


class PlannedBatches:
    """One rank's endless stream of steps, epoch after epoch, from any cursor. Opens no shard.

    Args:
        path: the steps of a run.
        ranks: which part of each is this process's.
        lanes: of the order.
    """

    def __init__(self, path: StepIndex, ranks: DataRanks, lanes: int) -> None:
        self._path = path
        self._ranks = ranks
        self._lanes = lanes

    def stream(self, cursor: Cursor) -> Iterator[SampleBatch]:
        """Yield batches from `cursor` on, for ever: positions and mask, and nothing that lies in a shard."""
        path, ranks = self._path, self._ranks
        nothing = np.empty(0, np.int64)
        while True:
            step = plan_step(cursor.position, path.num_samples, path.global_batch, path.tail)
            if step is None:
                cursor = Cursor(cursor.epoch + 1, 0)
                continue
            positions, mask = slice_step(step, rank=ranks.rank, world_size=ranks.world_size, lanes=self._lanes)
            batch = SampleBatch(cursor.epoch, step, positions, mask, nothing, nothing, [], {}, [], nothing)
            yield batch
            cursor = batch.after

    def retire(self, batch: SampleBatch) -> None:
        """Nothing to do: nothing is open."""

    def close(self) -> None:
        """Nothing to do: nothing is open."""
