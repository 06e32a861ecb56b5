"""Builds the optimizer of a run from its settings, and sets its learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.trainer.recipes.optimizers.lamb import LAMB
from datasvc.trainer.recipes.optimizers.lars import LARS
from datasvc.trainer.recipes.optimizers.parameter_groups import group_parameters
from datasvc.trainer.recipes.optimizers.rmsprop_sgd import RMSpropSGD
from datasvc.trainer.recipes.optimizers.schedules import sgd_share
from datasvc.trainer.recipes.settings.config import TrainConfig


def build_distributed_optimizer(config: TrainConfig, model: nn.Module, *, num_passes: int) -> Any:
    """Return the run's optimizer, which sums gradients over the ranks and over `num_passes` backward passes.

    With Adasum, it sums over the passes, makes a step, and combines the steps of the ranks. Every rank must call
    this, in the same order among its collectives.

    Raises:
        ConfigError: Adasum does not work with this number of ranks.
    """
    size = hvd.size()
    if config.combines_steps and size & (size - 1):
        smaller = 1 << (size.bit_length() - 1)
        raise ConfigError(
            f"op is 'adasum', which combines ranks in pairs, and the job has {size} ranks; start {smaller} or "
            f"{2 * smaller} ranks, or give --op average"
        )
    return hvd.DistributedOptimizer(
        build_optimizer(config, model),
        named_parameters=model.named_parameters(),
        compression=build_compression(config),
        backward_passes_per_step=num_passes,
        bucket_bytes=config.parse_bucket(),
        # Each rank divides its loss by the number of targets of all ranks, so the sum of the ranks' gradients is the
        # gradient of the global batch. With Adasum it divides by the number of its own targets; see `update`.
        op=hvd.Adasum if config.combines_steps else hvd.Sum,
    )


def build_compression(config: TrainConfig) -> Any:
    """Return the compression as `DistributedOptimizer` takes it."""
    choice = config.parse_compression()
    compression = getattr(hvd.Compression, choice.name)
    return compression(**choice.arguments) if choice.has_memory else compression


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return the configured optimizer without communication, over the groups of `group_parameters`.

    The momentum of these optimizers accumulates gradients that are not multiplied by the learning rate. Therefore a
    change of the rate does not need the momentum correction of Goyal et al. 2017, remark 2.
    """
    groups = group_parameters(model, weight_decay=config.weight_decay, decayed=config.decayed)
    rate, momentum = config.learning_rate, config.momentum
    match config.optimizer:
        case "lars":
            return LARS(
                groups, rate, momentum=momentum, trust_coefficient=config.trust_coefficient, nesterov=config.nesterov
            )
        case "lamb":
            return LAMB(groups, rate, betas=config.betas)
        case "adamw":
            return torch.optim.AdamW(groups, rate, betas=config.betas)
        case "rmsprop-sgd":
            return RMSpropSGD(groups, rate, rmsprop_rate=config.rmsprop_rate, momentum=momentum)
    # Only "sgd" is left: `TrainConfig` accepts no other name.
    return torch.optim.SGD(groups, rate, momentum=momentum, nesterov=config.nesterov)


def set_rate(optimizer: torch.optim.Optimizer, rate: float, progress: float) -> None:
    """Set the learning rate of the next step in every group. `progress` is the number of epochs served before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        # Only the groups of `RMSpropSGD` have this setting.
        if "sgd_share" in group:
            group["sgd_share"] = sgd_share(progress)
