"""A job with parameter servers, as one of its processes sees it, and what all of them derive from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import Store

from datasvc.errors import ConfigError
from datasvc.loaders.core.batch import check_gpu
from datasvc.threads import count_processors
from datasvc.trainer.env.environment import RankPlacement
from datasvc.trainer.recipes.build import build_optimizer
from datasvc.trainer.recipes.rank_check import describe_difference, facts_of_settings
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.task import DataPlacement
from datasvc.trainer.servers.parameter_shard import MakeOptimizer


@dataclass(frozen=True)
class ServerJob:
    """A job with parameter servers, as one of its processes has joined it.

    Attributes:
        store: store of the job.
        placement: placement of this process among all.
        num_servers: number of servers, which are the first ranks.
        timeout_s: how long to wait for other processes to connect.
    """

    store: Store
    placement: RankPlacement
    num_servers: int
    timeout_s: float

    @property
    def num_workers(self) -> int:
        """Number of workers at the start of the job."""
        return self.placement.size - self.num_servers

    def place_worker(self, config: TrainConfig) -> DataPlacement:
        """Return data rank, device and decoding threads of this worker. Workers of a node share its GPUs in turns."""
        placement = self.placement
        device = torch.device("cpu")
        if config.device == "cuda":
            device = torch.device(f"cuda:{placement.local_rank % max(torch.cuda.device_count(), 1)}")
        check_gpu(device)
        return DataPlacement(
            rank=placement.rank - self.num_servers,
            world_size=self.num_workers,
            device=device,
            num_threads=config.decode_threads or max(1, count_processors() // placement.local_size),
        )


def make_server_optimizer(config: TrainConfig) -> MakeOptimizer:
    """Return the function that makes the configured optimizer of the weights of a server."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return build_optimizer(config, nn.Module(), groups=groups)

    return make


def check_settings(config: TrainConfig, first: Mapping[str, Any], rank: int) -> None:
    """Check that a process has the settings of rank 0, `first`. Raises ConfigError: they differ."""
    of_rank_0 = facts_of_settings(first)
    own = facts_of_settings(config.to_dict())
    message = describe_difference([of_rank_0, *({} for _ in range(rank - 1)), own])
    if message is not None:
        raise ConfigError(message)
