"""The settings of a training run. They are checked when they are created, and stored in every checkpoint.

The check does not import torch, which takes seconds, so a mistake on the command line is reported at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from datasvc.errors import ConfigError
from datasvc.planning.layout import LOST_AFTER_S, PipelineSchedule, parse_sizes
from datasvc.trainer.recipes.optimizers.schedules import RateSchedule
from datasvc.trainer.recipes.settings.groups.data import AudioSettings, DataSettings, OrderSettings, TokenSettings
from datasvc.trainer.recipes.settings.groups.images import DecodeSettings, EvaluationSettings, ImageSettings
from datasvc.trainer.recipes.settings.groups.job import (
    CacheSettings,
    CheckpointSettings,
    RankSettings,
    ReportSettings,
    StartSettings,
)
from datasvc.trainer.recipes.settings.groups.setting_group import (
    FieldType,
    Metavar,
    Range,
    SettingGroup,
    check_group,
    field_types,
)
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
from datasvc.trainer.recipes.settings.sync_exclusions import check_exclusions


@dataclass(frozen=True, kw_only=True)
class LayoutSettings(SettingGroup):
    """How the ranks divide the model and the batches; see docs/explanation/layouts.md.

    Attributes:
        layout: number of ranks along each axis, such as "data=2,shard=2,tensor=2"; the axes are data, shard, tensor,
            pipeline and context, and replica: groups of ranks that average their weights as `sync` says. data may be
            left out: it follows from the number of ranks. None: all ranks along data, so that each has the whole
            model.
        pipeline_schedule: order in which the micro-batches go through the stages of a pipeline: "gpipe", "1f1b",
            "interleaved" or "zbv". The last two give each rank two stages.
        zero: what the axis shard divides: 1: the optimizer state; 2: also gradients; 3: also parameters, which are
            gathered for the forward pass and again for the backward pass. None: 3.
        recompute: whether the activations of each block are freed and computed again in the backward pass.
        offload_activations: whether the activations of each block are in host memory until the backward pass.
        offload: whether parameters, gradients and optimizer state are in host memory; needs the axis shard.
        lost_after: seconds without a sign of life of a rank after which the others ask whether it runs, and end the
            run if it does not answer, or with `elastic` go on without it; with parameter servers, after which the job
            goes on without a worker, or ends for a server. The connections of a process that has ended tell sooner.
    """

    title: ClassVar[str] = "layout of the ranks"

    layout: Annotated[str | None, Metavar("AXIS=SIZE,...")] = None
    pipeline_schedule: PipelineSchedule = "1f1b"
    zero: Annotated[int | None, Metavar("STAGE"), Range(1, 4)] = None
    recompute: bool = False
    offload_activations: bool = False
    offload: bool = False
    lost_after: Annotated[float, Metavar("SECONDS"), Range(2)] = LOST_AFTER_S

    def check(self) -> None:
        """Check the form of the layout, and that the options of its axes have their axis."""
        sizes = {} if self.layout is None else parse_sizes(self.layout)
        for option, is_set in (("zero", self.zero is not None), ("offload", self.offload)):
            if is_set and sizes.get("shard", 1) == 1:
                raise ConfigError(f"{option} is for the axis shard; give a --layout with it, such as shard=2")
        if self.offload and self.zero == 1:
            raise ConfigError(
                "offload keeps parts of parameters in host memory, and with zero 1 they are not divided"
            )
        if self.pipeline_schedule != "1f1b" and sizes.get("pipeline", 1) == 1:
            raise ConfigError(
                f"pipeline_schedule is {self.pipeline_schedule!r}; it is for the axis pipeline: give a --layout with "
                "it, such as pipeline=2"
            )
        if self.offload_activations and any(size > 1 for axis, size in sizes.items() if axis != "data"):
            raise ConfigError(
                f"offload_activations needs the whole model on each rank, and layout is {self.layout!r}; give "
                "--recompute in place of it, or leave out one of both"
            )
        if self.offload_activations and self.recompute:
            raise ConfigError(
                "offload_activations keeps the activations that recompute frees; give --recompute or "
                "--offload-activations"
            )
        others = [axis for axis in ("tensor", "pipeline", "context") if sizes.get(axis, 1) > 1]
        if self.zero == 1 and others:
            raise ConfigError(
                f"zero is 1, which goes with the axes data and shard only, not with {', '.join(others)}"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    DataSettings,
    TokenSettings,
    AudioSettings,
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
        if self.moves_momentum and (self.optimizer != "sgd" or self.nesterov):
            raise ConfigError(
                f"compression is {self.compression!r}, which applies the momentum of SGD on each rank, and the "
                f"optimizer is {self.optimizer!r}{' with nesterov' if self.nesterov else ''}; give --optimizer sgd "
                "without --nesterov, or --compression topk"
            )
        if self.offload_activations and (self.compile is not None or self.uses_servers):
            raise ConfigError(
                "offload_activations does not go with --compile, whose graphs keep their own activations, nor with "
                "parameter servers; leave it out"
            )
        if self.elastic and self.averages_weights and self.layout is not None:
            sizes = {axis: size for axis, size in parse_sizes(self.layout).items() if size > 1}
            if sizes.keys() == {"replica", "data"}:
                # Of one replica, only the axis `data` would be left, whose ranks make steps of their own.
                raise ConfigError(
                    f"layout is {self.layout!r}, and sync is {self.sync!r}: if one replica is left of an elastic "
                    "run, its ranks would average weights too, and no longer sum gradients; give it the axis shard "
                    "in place of data, or leave out --elastic"
                )
        if self.elastic and self.combines_steps:
            raise ConfigError(
                "op is 'adasum', which needs a power of two ranks, and the ranks of an elastic run change to any "
                "number; give --op average, or leave out --elastic"
            )
        sizes = {} if self.layout is None else parse_sizes(self.layout)
        if self.lost_after != LOST_AFTER_S and not (sizes.keys() - {"data"} or self.uses_servers or self.elastic):
            raise ConfigError(
                f"lost_after is {self.lost_after:g}; it is for layouts of other axes than data, parameter servers "
                f"and elastic runs: give a --layout or --elastic, or leave it at {LOST_AFTER_S:g}"
            )
        check_exclusions(self)
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
