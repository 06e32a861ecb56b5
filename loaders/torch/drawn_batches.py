"""Iterator over the batches of an epoch that one process draws, as lists of sample numbers.

To draw a batch is to compute its sample numbers. A data set reads the samples later. For an `OrderBatchSampler`, the
main process draws all batches of its rank. For an `IterableDataset`, each of n workers draws every n-th batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from datasvc.errors import ConfigError
from datasvc.loaders.torch.rank_order import RankOrder
from datasvc.loaders.torch.states import DrawState


class DrawnBatches(Iterator[list[int]]):
    """One rank's batches of an epoch from a position on, or one worker's part of them.

    torch's loaders take batches from their workers in turn, beginning with worker 0. So worker w of W draws the steps
    w, w + W, ..., counted from the loader's start, and the loader's batches do not depend on the number of workers.

    Args:
        order: the rank's part of the access order.
        epoch: epoch to draw from.
        position: position at which the loader starts.
        worker: index of this worker.
        num_workers: number of workers; 0: one process draws all steps.
    """

    def __init__(self, order: RankOrder, epoch: int, position: int, *, worker: int = 0, num_workers: int = 0) -> None:
        self._order = order
        self._worker, self._num_workers = worker, num_workers
        self._num_batches = 0  # number of batches that this process has drawn
        self._epoch, self._start = epoch, position
        # Position at which the next step of this process starts; the end of the epoch if there is no step.
        self._position = self._clamp_to_epoch(position + self._worker * order.global_batch)

    def __next__(self) -> list[int]:
        step = self._order.step_at(self._position)
        indices = [] if step is None else self._order.indices(self._epoch, step)
        if not indices:  # the last step may be so short that this rank has no sample in it
            self._position = self._order.num_samples
            raise StopIteration
        self._position = self._clamp_to_epoch(self._position + max(self._num_workers, 1) * self._order.global_batch)
        self._num_batches += 1
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process, as JSON values. `order_state` combines the states of all processes."""
        state = DrawState(
            position=self._position,
            worker=self._worker,
            num_workers=self._num_workers,
            num_batches=self._num_batches,
            global_batch=self._order.global_batch,
            num_samples=self._order.num_samples,
            order=self._order.state_at(self._epoch, self._start),
        )
        return asdict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same worker, with the same number of workers.

        Raises:
            ConfigError: `state` is not from `state_dict`, or belongs to another worker or number of workers.
            StateMismatchError: the state belongs to another version or order; the message has both.
        """
        saved = DrawState.from_dict(state)
        if (saved.worker, saved.num_workers) != (self._worker, self._num_workers):
            raise ConfigError(
                f"the state belongs to worker {saved.worker} of {saved.num_workers}, and this is worker "
                f"{self._worker} of {self._num_workers}; load order_state(STATE), with the state of the loader, into "
                "the data set or sampler instead"
            )
        self._epoch, self._start = self._order.parse_state(saved.order)
        self._position, self._num_batches = saved.position, saved.num_batches

    def _clamp_to_epoch(self, position: int) -> int:
        return min(position, self._order.num_samples)
