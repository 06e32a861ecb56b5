"""The settings of a training run. They are checked when they are created, and stored in every checkpoint.

The check does not import torch, which takes seconds, so a mistake on the command line is reported at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from datasvc.errors import ConfigError
from datasvc.planning.layout import parse_sizes
from datasvc.trainer.recipes.optimizers.schedules import RateSchedule
from datasvc.trainer.recipes.settings.groups.data import DataSettings, OrderSettings, TokenSettings
from datasvc.trainer.recipes.settings.groups.images import DecodeSettings, EvaluationSettings, ImageSettings
from datasvc.trainer.recipes.settings.groups.job import (
    CacheSettings,
    CheckpointSettings,
    RankSettings,
    ReportSettings,
    StartSettings,
)
from datasvc.trainer.recipes.settings.groups.setting_group import FieldType, SettingGroup, check_group, field_types
from datasvc.trainer.recipes.settings.groups.training import (
    IMAGE_MODEL,
    TEXT_MODEL,
    GradientSettings,
    LengthSettings,
    ModelSettings,
    OptimizerSettings,
    PrecisionSettings,
    RateSettings,
)
from datasvc.trainer.recipes.settings.layout_settings import LayoutSettings


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    DataSettings,
    TokenSettings,
    CacheSettings,
    OrderSettings,
    ImageSettings,
    DecodeSettings,
    ModelSettings,
    LengthSettings,
    OptimizerSettings,
    RateSettings,
    GradientSettings,
    LayoutSettings,
    PrecisionSettings,
    EvaluationSettings,
    CheckpointSettings,
    StartSettings,
    ReportSettings,
    RankSettings,
):
    """Settings of a run: those of all groups; `--help` and `--show-config` list the groups in this order.

    Raises:
        ConfigError: a value is out of range, or does not go with another one.
    """

    def __post_init__(self) -> None:
        # Check here all that needs no data: an error on one rank must come before the ranks wait for each other.
        for group in setting_groups():
            check_group(self, group)
        self.check()

    def check(self) -> None:
        """Check the settings of several groups together.

        Raises:
            ConfigError: settings do not go together.
        """
        if self.precision == "fp16" and self.parse_compression().has_memory:
            # An overflow would stay in the unsent part for ever, and that part has the loss scale of its step.
            raise ConfigError(
                f"precision is 'fp16' and compression is {self.compression!r}, whose unsent part does not go with a "
                "loss scale that changes; give --precision bf16, or --compression none, fp16 or bf16"
            )
        if self.elastic and self.layout is not None:
            only_data = parse_sizes(self.layout).keys() == {"data"}
            reason = "has a fixed number of ranks" if only_data else "can lose a part of the model with a rank"
            raise ConfigError(
                f"layout is {self.layout!r}, which {reason}, and the ranks of an elastic run change. Leave out "
                "--layout, or leave out --elastic: after a failure start the run again, with a layout of the ranks "
                "that are there; it continues the newest version at any layout"
            )
        if self.elastic and self.combines_steps:
            raise ConfigError(
                "op is 'adasum', which needs a power of two ranks, and the ranks of an elastic run change to any "
                "number; give --op average, or leave out --elastic"
            )
        # Created only for its errors about the milestones.
        RateSchedule(
            peak=self.learning_rate, epochs=self.epochs, shape=self.schedule, milestones=self.parse_milestones()
        )
        # These check their own ranges. They come last, because their import takes longer than all other checks.
        from datasvc.loaders.decode.pixels import PixelFormat
        from datasvc.loaders.decode_sharing.settings import DecodeGroup

        self.build_augment()
        PixelFormat(mean=self.mean, std=self.std)
        if self.decode_group is not None:
            DecodeGroup(self.decode_group)

    @property
    def model_or_default(self) -> str:
        """The model; by default, that of token data if the settings have a vocabulary, else that of images."""
        return self.model or (IMAGE_MODEL if self.vocabulary is None else TEXT_MODEL)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {field.name: getattr(self, field.name) for field in setting_fields()}


def setting_groups() -> tuple[type[SettingGroup], ...]:
    """Return the groups of which `TrainConfig` consists, in the order of `--help`."""
    return TrainConfig.__bases__


def setting_fields() -> list[dataclasses.Field[Any]]:
    """Return the fields of all settings, group by group. `dataclasses.fields` has the groups in reverse order."""
    return [field for group in setting_groups() for field in dataclasses.fields(group)]


def setting_types() -> dict[str, FieldType]:
    """Return the types of all settings by name."""
    return {name: field_type for group in setting_groups() for name, field_type in field_types(group).items()}


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
