"""Chooses the layout of a run, and refuses what cannot work before a process group exists."""

from __future__ import annotations

import torch

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.layouts.divided_model import read_sizes
from datasvc.trainer.recipes.layouts.layout import Layout, check_batch, check_layout, parse_layout
from datasvc.trainer.recipes.models import build_model
from datasvc.trainer.recipes.settings.batch_plan import plan_batches
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.batch_statistics import batch_norms


def read_layout(config: TrainConfig, world_size: int) -> Layout:
    """Return the layout of `world_size` ranks, without a check of the model and of other settings.

    Raises:
        ConfigError: the sizes of the layout do not multiply to `world_size`.
    """
    return Layout(data=world_size) if config.layout is None else parse_layout(config.layout, world_size)


def choose_layout(config: TrainConfig, world_size: int) -> Layout:
    """Return the layout of `world_size` ranks. Communicates with no other rank.

    Raises:
        ConfigError: the layout does not divide the ranks, the batch or the model, or does not go with a setting.
    """
    layout = read_layout(config, world_size)
    if layout.is_data_only:
        return layout
    check_settings(config, layout)
    if config.global_batch is not None:
        check_batch(layout, config.global_batch)  # its message has the sizes of axes, which `plan_batches` lacks
    batches = plan_batches(config, layout.num_data_ranks)
    # Only these axes depend on the model. On the device "meta", a model of any size is built at once.
    model = None
    if layout.tensor * layout.pipeline * layout.context > 1:
        with torch.device("meta"):
            model = build_model(config.model_or_default, config.vocabulary or 1, **config.parse_model_options())
    check_layout(
        layout,
        world_size=world_size,
        global_batch=batches.global_batch,
        micro_batch=batches.micro_batch,
        sizes=None if model is None else read_sizes(model, block=config.block_tokens),
        pipeline_schedule=config.pipeline_schedule,
    )
    if layout.pipeline > 1 and model is not None and batch_norms(model):
        # All ranks average the statistics together, and the stages have different ones.
        raise ConfigError(
            f"layout {layout} cuts the model {config.model!r} into stages, and it has batch normalisation, whose "
            "statistics are averaged over whole models; use the axes data and shard, or another normalisation"
        )
    return layout


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
