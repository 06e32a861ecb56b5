"""The steps of a run without their samples, for a loader whose batches another process decodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from datasvc.loaders.core.batches import SampleBatch
from datasvc.loaders.core.data_ranks import DataRanks
from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.decode_sharing.step_index import StepIndex
from datasvc.order import plan_step, slice_step


class PlannedBatches:
    """A `BatchSource` of one rank's steps, epoch after epoch, that opens no shards.

    Args:
        step_index: the steps of a run.
        ranks: data rank of this process.
        lanes: number of lanes of the access order.
    """

    def __init__(self, step_index: StepIndex, ranks: DataRanks, lanes: int) -> None:
        self._step_index = step_index
        self._ranks = ranks
        self._lanes = lanes

    def stream(self, cursor: Cursor) -> Iterator[SampleBatch]:
        """Yield batches from `cursor` on without end, with positions and mask and no data from shards."""
        step_index, ranks = self._step_index, self._ranks
        nothing = np.empty(0, np.int64)
        while True:
            step = plan_step(cursor.position, step_index.num_samples, step_index.global_batch, step_index.tail)
            if step is None:
                cursor = Cursor(cursor.epoch + 1, 0)
                continue
            positions, mask = slice_step(step, rank=ranks.rank, world_size=ranks.world_size, lanes=self._lanes)
            batch = SampleBatch(cursor.epoch, step, positions, mask, nothing, nothing, [], {}, [], nothing)
            yield batch
            cursor = batch.after

    def retire(self, batch: SampleBatch) -> None:
        """Do nothing: no shard is open."""

    def close(self) -> None:
        """Do nothing: no shard is open."""
