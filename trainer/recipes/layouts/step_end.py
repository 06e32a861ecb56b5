"""The end of the last whole step of a run, from which the ranks of an elastic run continue when one is lost.

`update` changes weights only after the ranks have combined their gradients. A rank that loses another one before then
still has the weights of the step before, with all that belongs to them but for what a step changes earlier: the
position of the loader, and buffers such as the statistics of batch normalisation. A replica that averages weights
every few steps keeps what it has learned since the last time, see `catch_up`. Invariant: after `go_back`, the run is
as it was when `note` was called.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import datasvc.trainer as hvd
from datasvc.loaders.core.split_reader import Cursor
from datasvc.trainer.recipes.layouts.shard import to_local


class StepEnd:
    """What a step changes before its weights, and the end of an epoch with them, as it was after the last step.

    Args:
        run: a `Run`, whose `is_updating` is True from the first change of a weight until the step is counted.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        names = run.model.state_dict().keys()
        self._buffers = [to_local(buffer) for name, buffer in run.model.named_buffers() if name in names]
        self._kept_buffers = [buffer.clone() for buffer in self._buffers]
        self._cursor: Cursor | None = None
        self._num_steps = getattr(run.optimizer, "num_steps", 0)
        self._early_stop: dict[str, Any] = {}

    def note(self) -> None:
        """Keep the present state; call this at the end of each step."""
        if self._buffers:
            torch._foreach_copy_(self._kept_buffers, self._buffers)
        self._cursor, self._early_stop = self._run.loader.cursor, self._run.stop.state_dict()
        self._num_steps = getattr(self._run.optimizer, "num_steps", 0)

    def go_back(self) -> bool:
        """Set the run back to the end of its last step; return False if it has none, or is changing its weights.

        With averaged weights, a step is whole once its optimizer has counted it: then only the round has failed.
        """
        run = self._run
        if run.is_updating:
            if not (run.config.averages_weights and run.optimizer.num_steps > self._num_steps):
                return False
        elif self._cursor is None:
            return False
        else:
            run.loader.load_state_dict(run.loader.state_dict() | self._cursor._asdict())
            run.stop.load_state_dict(self._early_stop)
            for buffer, kept in zip(self._buffers, self._kept_buffers, strict=True):
                buffer.copy_(kept)
        run.metrics, run.average_statistics = {}, {}
        return True


def keeps_step_ends(run: Any) -> bool:
    """Return whether a rank of this `Run` can continue from the end of its last step when another rank is lost."""
    config = run.config
    if hvd.size() == 1 or (config.makes_own_steps and not _keeps_rounds(run)):
        return False
    if config.parse_compression().has_memory:
        return False  # the backward pass of the lost step has changed the residuals
    # With NCCL, a rank begins to change its weights before it is known whether the sum of the gradients fails.
    return bool(run.device.type == "cpu") or "nccl" not in dist.get_backend_config()


def _keeps_rounds(run: Any) -> bool:
    """Return whether replicas with steps of their own can end a round without one of them, see `catch_up`."""
    policy = run.config.parse_sync()
    if policy is None or policy.delay or policy.codec is not None:
        return False  # what was sent of a round, or not yet, is that of the ranks that have begun it
    # A batch of positions from all over a round needs more shards at a time than a cache was checked for.
    is_read_in_order = run.cache is not None and run.loader.order.shuffle == "windowed"
    return policy.gives_equal_weights and not is_read_in_order and run.config.decode_group is None
