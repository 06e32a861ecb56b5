"""Builds the model and the optimizer of a run from its settings, and sets its learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.ledger.broken_rounds import RoundPart
from datasvc.models import Architecture, describe_architecture
from datasvc.models.provenance.forgetting import RepeatedSteps
from datasvc.planning.layout import Layout, check_layout, plan_layout
from datasvc.trainer.recipes import random_state
from datasvc.trainer.recipes.choose_layout import check_model_options
from datasvc.trainer.recipes.layouts.divided_model import (
    DividedModel,
    LayoutOptions,
    apply_layout,
    new_group,
    read_sizes,
    sizes_of,
)
from datasvc.trainer.recipes.layouts.optimizer import AveragingLayoutOptimizer, LayoutOptimizer, ZeroOptimizer
from datasvc.trainer.recipes.layouts.shard import offload_activations, recompute_activations
from datasvc.trainer.recipes.optimizers.catch_up import CatchUp, begin_catch_up
from datasvc.trainer.recipes.optimizers.foreach_optimizer import LAMB, LARS, RMSpropSGD
from datasvc.trainer.recipes.optimizers.leased_rounds import LeasedRounds
from datasvc.trainer.recipes.optimizers.parameter_groups import group_parameters
from datasvc.trainer.recipes.optimizers.precision import make_loss_scale
from datasvc.trainer.recipes.optimizers.schedules import sgd_share
from datasvc.trainer.recipes.run import Run
from datasvc.trainer.recipes.settings.config import BatchPlan, TrainConfig
from datasvc.trainer.recipes.tasks.batch_statistics import batch_statistics
from datasvc.trainer.recipes.tasks.held_out import make_judge
from datasvc.trainer.recipes.tasks.task import DataPlacement, Examples, Task
from datasvc.trainer.recipes.update import Learner, WeightAverage


def build_learner(
    config: TrainConfig,
    task: Task,
    batches: BatchPlan,
    place: DataPlacement,
    layout: Layout,
    *,
    block: int | None = None,
    held_out: Sequence[Examples] = (),
) -> Learner:
    """Build model and optimizer, and seed this rank's generators. Every rank must call this.

    Args:
        config: settings of the run.
        task: task of the run.
        batches: batch sizes of a step.
        place: data rank and device of this rank.
        layout: layout of the ranks; with a data-only one, model and optimizer are equal on all ranks.
        block: tokens of a sample; None for images.
        held_out: samples on which a tournament judges replicas, see `read_held_out`.

    Raises:
        ConfigError: the layout does not divide the blocks.
    """
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        torch.backends.cudnn.benchmark = config.cudnn_benchmark
    model = build_model(config, task)
    # On every rank, because a model of the user may communicate in its forward pass; before a rank has only a part.
    architecture = describe_architecture(model, task.make_example(block))
    if not layout.is_data_only and config.zero != 1:
        return _build_divided_learner(config, task, batches, place, layout, model, block, architecture)
    model = model.to(place.device)
    # Broadcast before `WeightAverage` copies the weights, so that the averages are equal on all ranks too.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # Seed after the model is built, so that each rank draws its own random numbers from here on, for dropout.
    random_state.seed_all(random_state.seed_of_rank(config.seed, hvd.rank()))
    if config.recompute:
        recompute_activations(model)
    if config.offload_activations:
        offload_activations(model, pin_memory=place.device.type == "cuda")
    judge = make_judge(config, task, model, held_out) if held_out else None
    optimizer = (
        build_combining_optimizer(config, model, num_passes=batches.num_passes, judge=judge)
        if layout.is_data_only
        else build_zero_optimizer(config, model, layout, num_passes=batches.num_passes)
    )
    return Learner(
        config=config,
        task=task,
        batches=batches,
        layout=layout,
        model=model,
        optimizer=optimizer,
        loss_scale=make_loss_scale(config.precision, place.device),
        average=None if config.ema_decay is None else WeightAverage(model, config.ema_decay),
        device=place.device,
        num_parameters=_count_parameters(model),
        model_sizes=sizes_of(model),
        architecture=architecture,
    )


def _build_divided_learner(
    config: TrainConfig,
    task: Task,
    batches: BatchPlan,
    place: DataPlacement,
    layout: Layout,
    model: torch.nn.Module,
    block: int | None,
    architecture: Architecture,
) -> Learner:
    """Divide a model over the ranks, and build the optimizer of this rank's part. Every rank must call this."""
    check_layout(
        layout,
        world_size=hvd.size(),
        global_batch=batches.global_batch,
        micro_batch=batches.micro_batch,
        sizes=read_sizes(model, block=block),
        pipeline_schedule=config.pipeline_schedule,
    )
    # Broadcast before the model is divided, in host memory.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # A rank of a pipeline has only a part of the model later.
    num_parameters, model_sizes = _count_parameters(model), sizes_of(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = group_parameters(model, weight_decay=config.weight_decay, decayed=config.decayed)
    divided = apply_layout(
        model,
        layout,
        LayoutOptions(config.pipeline_schedule, config.zero or 3, config.recompute, config.offload),
        rank=hvd.rank(),
        device=place.device,
        num_micro_batches=batches.num_passes,
        block=block,
        averages_weights=config.averages_weights,
    )
    divided.parameter_groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in groups
    ]
    # Ranks of the axis `tensor` compute the same activations, so they must drop the same ones. Inside the attention,
    # where each has other heads, the same masks thus occur for a head of every rank; each mask is still random.
    random_state.seed_all(random_state.seed_of_rank(config.seed, hvd.rank() // layout.tensor))
    return Learner(
        config=config,
        task=task,
        batches=batches,
        layout=layout,
        model=divided.model,
        optimizer=build_layout_optimizer(config, divided),
        loss_scale=make_loss_scale(config.precision, place.device),
        average=None if config.ema_decay is None else WeightAverage(divided.model, config.ema_decay),
        device=place.device,
        divided=divided,
        num_parameters=num_parameters,
        model_sizes=model_sizes,
        architecture=architecture,
    )


def _count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def build_model(config: TrainConfig, task: Task) -> torch.nn.Module:
    """Return the configured model, freshly initialised, on the CPU. Every rank must call this.

    Raises:
        ConfigError: the settings have no such model, or are for batch normalisation or blocks, which the model lacks.
    """
    assert config.model is not None
    model = task.build_model(config.model, config.parse_model_options())
    check_model_options(config, model)
    return hvd.SyncBatchNorm.convert_sync_batchnorm(model) if config.sync_batch_norm else model


def compile_model(model: torch.nn.Module, backend: str | None) -> None:
    """Compile the model's forward pass in place, unless `backend` is None. The names of parameters do not change.

    Raises:
        ConfigError: torch has no such backend.
    """
    if backend is None:
        return
    for module in model.modules():
        if isinstance(module, hvd.SyncBatchNorm):
            # It communicates with the other ranks, which no compiled graph can contain.
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign, no-untyped-call]
    try:
        model.compile(backend=backend)
    except RuntimeError as error:
        raise ConfigError(f"compile is {backend!r}: {error}") from error


def build_combining_optimizer(
    config: TrainConfig, model: nn.Module, *, num_passes: int, judge: Callable[[], float] | None = None
) -> Any:
    """Return the run's optimizer, with which the ranks combine gradients or steps, or average weights.

    Every rank must call this, in the same order among its collectives. `judge` is that of a tournament.

    Raises:
        ConfigError: the nodes have unequal numbers of ranks, with a setting `sync` that needs equal ones; or `sync`
            has more fragments than the model has trainable parameters.
    """
    if not config.averages_weights:
        return build_distributed_optimizer(config, model, num_passes=num_passes)
    buffers = batch_statistics(model).values()
    return _average(build_optimizer(config, model), config, judge=judge, buffers=buffers, seed=config.seed)


def _average(optimizer: torch.optim.Optimizer, config: TrainConfig, **options: Any) -> torch.optim.Optimizer:
    try:
        return hvd.Averaging(optimizer, config.sync, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from error


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
    if compression is hvd.Compression.dgc:
        return compression(momentum=config.momentum, **choice.arguments)
    return compression(**choice.arguments) if choice.has_memory else compression


def build_layout_optimizer(config: TrainConfig, divided: DividedModel) -> LayoutOptimizer:
    """Return the run's optimizer of the parameters that this rank has. Gradients are summed in the backward pass.

    Every rank must call this. Raises ConfigError: see `build_combining_optimizer`.
    """
    parameters = dict(divided.model.named_parameters())
    groups = [
        {**group, "params": [parameters[name] for name in group["params"] if name in parameters]}
        for group in divided.parameter_groups
    ]
    # A foreach kernel needs tensors of one mesh; the layers that `tensor` divides have another one than the rest.
    foreach = False if divided.layout.tensor > 1 else None
    optimizer = build_optimizer(config, divided.model, groups=groups, foreach=foreach)
    names = [list(group["params"]) for group in divided.parameter_groups]
    if divided.place_set is None:
        return LayoutOptimizer(optimizer, divided.model, names)
    optimizer = _average(optimizer, config, process_set=divided.place_set)
    return AveragingLayoutOptimizer(optimizer, divided.model, names)


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
    rate, momentum, weight_decay = config.learning_rate, config.momentum, config.weight_decay
    if config.moves_momentum:
        # The compression applies the momentum to gradients only. In the long run momentum increases the weight decay
        # by this factor.
        momentum, weight_decay = 0.0, weight_decay / (1 - momentum)
    if groups is None:
        groups = group_parameters(model, weight_decay=weight_decay, decayed=config.decayed)
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


def build_rounds(
    run: Run, repeated: Sequence[RepeatedSteps], part: RoundPart | None = None
) -> LeasedRounds | CatchUp | None:
    """Return the rounds of a run with the setting `leases`, which has loaded its state, or the rest of a broken one.

    Every rank must call this, at the same position. Without either the result is None.

    Args:
        run: the run.
        repeated: steps to take again, with their leases.
        part: what the replica of this rank has applied of a round in which another was lost; None: there is no such.
    """
    policy = run.config.parse_sync()
    if policy is None:
        return None
    steps = policy.round_at(run.optimizer.num_steps)
    run.first_round_step = steps.start if run.optimizer.num_steps == steps.start else steps.stop
    if run.config.leases is None:
        return None if part is None else begin_catch_up(run, part)
    return LeasedRounds(
        run.optimizer,
        run.loader,
        run.reading,
        layout=run.layout,
        policy=policy,
        is_measured=run.config.leases == "measured",
        step=run.step,
        max_steps=run.config.max_steps,
        device=run.device,
        saved=run.saved_leases,
        recorded=repeated,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float, progress: float) -> None:
    """Set the learning rate of the next step in every group. `progress` is the number of epochs served before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        # Only the groups of `RMSpropSGD` have this setting.
        if "sgd_share" in group:
            group["sgd_share"] = sgd_share(progress)
