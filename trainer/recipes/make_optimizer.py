"""Builds the optimizer of a run from its settings, and sets its learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import datasvc.trainer as hvd
from datasvc.planning.layout import Layout, plan_layout
from datasvc.trainer.recipes.layouts.divided_model import DividedModel, new_group
from datasvc.trainer.recipes.layouts.optimizer import LayoutOptimizer, ZeroOptimizer
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
    """
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


def build_layout_optimizer(config: TrainConfig, divided: DividedModel) -> LayoutOptimizer:
    """Return the run's optimizer of the parameters that this rank has. Gradients are summed in the backward pass."""
    parameters = dict(divided.model.named_parameters())
    groups = [
        {**group, "params": [parameters[name] for name in group["params"] if name in parameters]}
        for group in divided.parameter_groups
    ]
    # A foreach kernel needs tensors of one mesh; the layers that `tensor` divides have another one than the rest.
    foreach = False if divided.layout.tensor > 1 else None
    optimizer = build_optimizer(config, divided.model, groups=groups, foreach=foreach)
    return LayoutOptimizer(optimizer, divided.model, [list(group["params"]) for group in divided.parameter_groups])


def build_zero_optimizer(config: TrainConfig, model: nn.Module, layout: Layout, *, num_passes: int) -> ZeroOptimizer:
    """Return the run's optimizer with its state divided over the axis `shard`. Every rank must call this."""
    groups = group_parameters(model, weight_decay=config.weight_decay, decayed=config.decayed)
    names = {parameter: name for name, parameter in model.named_parameters()}
    group_names = [[names[parameter] for parameter in group["params"]] for group in groups]
    peers = {rank.peers["shard"] for rank in plan_layout(layout).ranks}
    return ZeroOptimizer(
        lambda own_groups, **_: build_optimizer(config, model, groups=own_groups),
        model,
        group_names,
        groups=groups,
        rate=config.learning_rate,
        process_group=new_group(peers, hvd.rank()),
        wrap=lambda optimizer: hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=build_compression(config),
            backward_passes_per_step=num_passes,
            bucket_bytes=config.parse_bucket(),
            op=hvd.Sum,
        ),
    )


def build_optimizer(
    config: TrainConfig,
    model: nn.Module,
    *,
    groups: list[dict[str, Any]] | None = None,
    foreach: bool | None = None,
) -> torch.optim.Optimizer:
    """Return the configured optimizer without communication.

    The momentum of these optimizers accumulates gradients that are not multiplied by the learning rate. Therefore a
    change of the rate does not need the momentum correction of Goyal et al. 2017, remark 2.

    Args:
        config: settings of the optimizer.
        model: model to train.
        groups: parameter groups; None: those of `group_parameters`.
        foreach: whether SGD and AdamW update all tensors in one call; None: torch chooses.
    """
    if groups is None:
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
            return torch.optim.AdamW(groups, rate, betas=config.betas, foreach=foreach)
        case "rmsprop-sgd":
            return RMSpropSGD(groups, rate, rmsprop_rate=config.rmsprop_rate, momentum=momentum)
    # Only "sgd" is left: `TrainConfig` accepts no other name.
    return torch.optim.SGD(groups, rate, momentum=momentum, nesterov=config.nesterov, foreach=foreach)


def set_rate(optimizer: torch.optim.Optimizer, rate: float, progress: float) -> None:
    """Set the learning rate of the next step in every group. `progress` is the number of epochs served before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        # Only the groups of `RMSpropSGD` have this setting.
        if "sgd_share" in group:
            group["sgd_share"] = sgd_share(progress)
