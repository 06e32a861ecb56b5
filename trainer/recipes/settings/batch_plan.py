"""How the global batch of a step is dealt over ranks and backward passes."""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.config import TrainConfig


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of a step.

    Attributes:
        global_batch: samples of all ranks.
        batch_size: samples of one rank.
        num_passes: backward passes of one rank, over whose gradients it sums before the ranks do.
        micro_batch: samples of one pass; the last may have fewer.
    """

    global_batch: int
    batch_size: int
    num_passes: int
    micro_batch: int


def plan_batches(config: TrainConfig, world_size: int) -> BatchPlan:
    """Return the sizes of every step at so many ranks. Raises ConfigError where the ranks do not divide the batch."""
    batch_size = config.batch_size
    if config.global_batch is not None:
        batch_size, rest = divmod(config.global_batch, world_size)
        if rest or not batch_size:
            raise ConfigError(
                f"a global batch of {config.global_batch} samples cannot be dealt evenly to {world_size} ranks; "
                "use a multiple, or --batch-size, the samples of one rank"
            )
    micro_batch = min(config.micro_batch or batch_size, batch_size)
    return BatchPlan(batch_size * world_size, batch_size, -(-batch_size // micro_batch), micro_batch)
