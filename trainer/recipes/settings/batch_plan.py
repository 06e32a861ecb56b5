"""Divides the global batch of a step over ranks and backward passes."""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.config import TrainConfig


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes of a step.

    Attributes:
        global_batch: samples of all data ranks.
        batch_size: samples of one data rank.
        num_passes: backward passes of one rank; the rank sums their gradients before the all-reduce.
        micro_batch: samples of one pass; the last pass may have fewer.
    """

    global_batch: int
    batch_size: int
    num_passes: int
    micro_batch: int


def plan_batches(config: TrainConfig, world_size: int) -> BatchPlan:
    """Return the batch sizes of every step for `world_size` data ranks: ranks that read different batches.

    Raises:
        ConfigError: the number of data ranks does not divide the global batch.
    """
    batch_size = config.batch_size
    if config.global_batch is not None:
        batch_size, remainder = divmod(config.global_batch, world_size)
        if remainder or not batch_size:
            raise ConfigError(
                f"a global batch of {config.global_batch} samples cannot be divided evenly among {world_size} data "
                "ranks; use a multiple, or set --batch-size, the samples of one data rank"
            )
    micro_batch = min(config.micro_batch or batch_size, batch_size)
    # Rounded up, because the last pass takes the remaining samples.
    num_passes = -(-batch_size // micro_batch)
    return BatchPlan(batch_size * world_size, batch_size, num_passes, micro_batch)
