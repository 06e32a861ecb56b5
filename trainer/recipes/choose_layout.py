"""Chooses the layout of a run, and refuses what cannot work, here and in other settings, before the ranks connect."""

from __future__ import annotations

import torch
from torch import nn

import datasvc
from datasvc.errors import ConfigError
from datasvc.planning.layout import Layout, check_batch, check_layout, fit_layout, parse_layout, replica_size_of
from datasvc.trainer.job.submit import is_power_of_two
from datasvc.trainer.recipes.layouts.divided_model import read_sizes
from datasvc.trainer.recipes.layouts.shard import find_units
from datasvc.trainer.recipes.models import build_model
from datasvc.trainer.recipes.settings.config import TrainConfig, plan_batches
from datasvc.trainer.recipes.tasks.batch_statistics import batch_norms
from datasvc.trainer.recipes.tasks.language import LanguageModelling
from datasvc.trainer.recipes.training_data import choose_task, open_data, resolve_data


def read_layout(config: TrainConfig, world_size: int) -> Layout:
    """Return the layout of `world_size` ranks, without a check of the model and of other settings.

    It has the axis `replica` only if replicas of several ranks average their weights. Replicas that sum gradients in
    every step are ranks of `data`, and so are replicas of one rank, with or without `sync`.

    In an elastic run, the outermost axis of the layout has as many replicas as the ranks make.

    Raises:
        ConfigError: the sizes of the layout do not multiply to `world_size`; in an elastic run, those of a replica
            do not divide it.
    """
    if config.layout is None:
        return Layout(data=world_size)
    layout = fit_layout(config.layout, world_size) if config.elastic else parse_layout(config.layout, world_size)
    has_replicas = config.averages_weights and layout.replica < layout.size
    return layout if has_replicas else layout.without_replica()


def count_replica_ranks(config: TrainConfig) -> int:
    """Return the number of ranks of which an elastic run needs a multiple."""
    return 1 if config.layout is None else replica_size_of(config.layout)


def read_block_tokens(config: TrainConfig, world_size: int) -> int | None:
    """Return the tokens of a block of the configured data, for `choose_layout`; None if no setting depends on them.

    Reads the schema of the data only. Communicates with no other rank.

    Raises:
        ConfigError: the data are tokens, and the size of their vocabulary is not set.
        NotFoundError, UnavailableError: the data cannot be opened.
    """
    layout = read_layout(config, world_size)
    if not _depends_on_model(config, layout):
        return None
    if config.vocabulary is not None and (layout.context == 1 or config.block_tokens is not None):
        return config.block_tokens
    repo = datasvc.open(config.repo)
    train = open_data(repo, config, resolve_data(repo, config)).train
    task = choose_task(config, train)
    return task.find_block_tokens(train) if isinstance(task, LanguageModelling) else None


def choose_layout(config: TrainConfig, world_size: int, *, block: int | None = None) -> Layout:
    """Return the layout of `world_size` ranks. Communicates with no other rank.

    Args:
        config: settings of the run.
        world_size: number of ranks.
        block: tokens of a sample; None: `config.block_tokens`, else not known, or images.

    Raises:
        ConfigError: the layout does not divide the ranks, the batch or the model, or does not go with a setting; or a
            setting does not go with the model or the number of ranks.
    """
    layout = read_layout(config, world_size)
    if config.combines_steps and not is_power_of_two(world_size):
        smaller = 1 << (world_size.bit_length() - 1)
        raise ConfigError(
            f"op is 'adasum', which combines ranks in pairs, and the job has {world_size} ranks; start {smaller} or "
            f"{2 * smaller} ranks, or give --op average"
        )
    model = _build_on_meta(config, layout) if _depends_on_model(config, layout) else None
    if model is not None:
        check_model_options(config, model)
    if layout.is_data_only:
        return layout
    check_settings(config, layout)
    if config.global_batch is not None:
        check_batch(layout, config.global_batch)  # its message has the sizes of axes, which `plan_batches` lacks
    batches = plan_batches(config, layout.num_data_ranks)
    check_layout(
        layout,
        world_size=world_size,
        global_batch=batches.global_batch,
        micro_batch=batches.micro_batch,
        sizes=None if model is None else read_sizes(model, block=config.block_tokens or block),
        pipeline_schedule=config.pipeline_schedule,
    )
    if layout.pipeline > 1 and model is not None and batch_norms(model):
        # All ranks average the statistics together, and the stages have different ones.
        raise ConfigError(
            f"layout {layout} cuts the model {config.model!r} into stages, and it has batch normalisation, whose "
            "statistics are averaged over whole models; use the axes data and shard, or another normalisation"
        )
    return layout


def _divides_model(layout: Layout) -> bool:
    return layout.tensor * layout.pipeline * layout.context > 1


def _depends_on_model(config: TrainConfig, layout: Layout) -> bool:
    needs_layers = config.recompute or config.offload_activations or config.sync_batch_norm
    return _divides_model(layout) or needs_layers or config.recomputes_statistics


def _build_on_meta(config: TrainConfig, layout: Layout) -> nn.Module | None:
    """Return the model on the device "meta", where one of any size is built at once; None if that cannot be."""
    try:
        with torch.device("meta"):
            return build_model(config.model_or_default, config.vocabulary or 1, **config.parse_model_options())
    except RuntimeError:
        # A model of the user may read values of its tensors. All but these axes is checked again with the real one.
        if _divides_model(layout):
            raise
        return None


def check_model_options(config: TrainConfig, model: nn.Module) -> None:
    """Refuse settings for batch normalisation or blocks that the model lacks. It may be on the device "meta".

    Raises:
        ConfigError: the model lacks them.
    """
    name = config.model_or_default
    given = {"--sync-batch-norm": config.sync_batch_norm, "--statistics recompute": config.recomputes_statistics}
    options = [option for option, is_given in given.items() if is_given]
    if options and not batch_norms(model):
        raise ConfigError(
            f"{' and '.join(options)}: the model {name!r} has no batch normalisation; leave the option out, "
            "or choose another --model"
        )
    if (config.recompute or config.offload_activations) and not find_units(model):
        option, effect = ("recompute", "compute again") if config.recompute else ("offload-activations", "copy")
        raise ConfigError(
            f"--{option}: the model {name!r} has no blocks to {effect}; leave the option out, "
            "choose another --model, such as resnet50 or gpt, or give the model a method "
            "`shard_units` that returns blocks"
        )


def check_settings(config: TrainConfig, layout: Layout) -> None:
    """Refuse settings that a layout with other axes than data does not have. Raises ConfigError."""
    # With ZeRO-1 each rank has the whole model, and `DistributedOptimizer` sums its gradients, as with data alone.
    is_divided = config.zero != 1
    whole_only = "leave it out, or use zero 1, with which each rank has the whole model"
    refused = (
        ("precision fp16", config.precision == "fp16", "use bf16, which needs no loss scale"),
        ("compile", config.compile is not None and is_divided, whole_only),
        (
            f"compression {config.compression}",
            config.parse_compression().has_memory,
            "a rank must save what it has not sent of each gradient; leave it out, or use fp16 or bf16 with zero 1",
        ),
        (f"compression {config.compression}", config.compression != "none" and is_divided, whole_only),
        ("op adasum", config.combines_steps, "it combines the steps of whole models; use --op average"),
        (f"bucket {config.bucket}", config.bucket is not None and is_divided, whole_only),
        # FSDP refuses the weights of such a model.
        ("channels_last", config.channels_last and is_divided, f"{whole_only} (--no-channels-last)"),
    )
    for setting, is_set, remedy in refused:
        if is_set:
            raise ConfigError(f"{setting} does not work with layout {layout}; {remedy}")
