"""The steps that one process draws: all of them, or a worker's, in the turn in which torch's loaders ask workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from datasvc.errors import ConfigError
from datasvc.loaders.torch.rank_order import RankOrder
from datasvc.loaders.torch.states import ShareState


class DrawnBatches(Iterator[list[int]]):
    """One rank's batches of the rest of an epoch, or those of them that are a worker's.

    Loaders ask their workers in turn, worker 0 first. So worker w of W draws steps w, w + W, ... from where the
    loader begins, and the loader's batches are the same with any number of workers.

    Args:
        order: of the rank.
        epoch: to draw from.
        position: where the loader begins.
        worker: whose turns these are.
        num_workers: that share the steps; 0: one process draws them all.
    """

    def __init__(self, order: RankOrder, epoch: int, position: int, *, worker: int = 0, num_workers: int = 0) -> None:
        self._order = order
        self._worker, self._num_workers = worker, num_workers
        self._num_batches = 0
        self._epoch, self._began = epoch, position
        self._position = self._capped(position + self._worker * order.global_batch)

    def __next__(self) -> list[int]:
        step = self._order.step_at(self._position)
        indices = [] if step is None else self._order.indices(self._epoch, step)
        if not indices:  # the last step may be too short for this rank
            self._position = self._order.num_samples
            raise StopIteration
        self._position = self._capped(self._position + max(self._num_workers, 1) * self._order.global_batch)
        self._num_batches += 1
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Return where this process stands, as JSON values; `order_state` makes one of those of all."""
        return ShareState(
            position=self._position,
            worker=self._worker,
            num_workers=self._num_workers,
            num_batches=self._num_batches,
            global_batch=self._order.global_batch,
            num_samples=self._order.num_samples,
            order=self._order.state_at(self._epoch, self._began),
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same worker of as many.

        Raises:
            ConfigError: it is none, or of another number of workers.
            StateMismatchError: it belongs to another version or order; says both.
        """
        found = ShareState.from_dict(state)
        if (found.worker, found.num_workers) != (self._worker, self._num_workers):
            raise ConfigError(
                f"the state is of worker {found.worker} of {found.num_workers}, this is {self._worker} of "
                f"{self._num_workers}; load order_state(...) of it into the data set or sampler instead"
            )
        self._epoch, self._began = self._order.parse_state(found.order)
        self._position, self._num_batches = found.position, found.num_batches

    def _capped(self, position: int) -> int:
        return min(position, self._order.num_samples)
