"""The plan of a layout: which axes divide the ranks, what each rank holds, and which ranks are its peers. Pure.

A layout has six axes. `data` divides the batches over copies of the model. `shard` divides the batches too, and
each of its ranks stores a part of every parameter. `tensor` divides the layers themselves, `pipeline` the sequence of
layers, and `context` the tokens of each block. Ranks that differ only in tensor, pipeline or context have the same
data rank: they read the same batches. `replica` divides the ranks into replicas that each have all other axes, make
steps of their own, and average their weights in rounds.

Nothing here imports torch: a layout that cannot work is refused before a process group exists.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast, get_args

from datasvc.errors import ConfigError

# Outermost first: neighbouring ranks, which are on one node, differ in the axis that communicates most.
AXES: Final = ("replica", "pipeline", "data", "shard", "context", "tensor")
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zbv"]
PIPELINE_SCHEDULES: Final = get_args(PipelineSchedule)
LOST_AFTER_S: Final = 6.0  # of silence, until a rank is asked whether it runs; see `lost_ranks`
_SHOWN_ORDER: Final = ("replica", "data", "shard", "tensor", "pipeline", "context")
_MAX_CHOICES: Final = 8  # sizes that an error message lists


@dataclass(frozen=True)
class Layout:
    """Number of parts into which each axis divides the ranks; their product is the number of ranks.

    Attributes:
        data: copies of the model, each with its own batches; their gradients are summed in every step.
        shard: ranks that store one replica together and have their own batches (ZeRO, FSDP).
        tensor: ranks that compute each layer together (Megatron).
        pipeline: ranks that compute successive layers (GPipe).
        context: ranks that compute successive tokens of each block.
        replica: groups of ranks with steps of their own, which average their weights in rounds; each has all of the
            other axes.
        is_elastic: whether the ranks of each copy of the model are consecutive, which the launcher of an elastic job
            takes out together. Otherwise the stages of a pipeline are farther apart than copies of a stage.

    Raises:
        ConfigError: a size is below 1.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    replica: int = 1
    is_elastic: bool = False

    def __post_init__(self) -> None:
        for axis in _SHOWN_ORDER:
            if self.size_of(axis) < 1:
                raise ConfigError(f"{axis} is {self.size_of(axis)}; expected at least 1")

    def __str__(self) -> str:
        """Return the form that `parse_layout` reads, without axes of size 1: "data=2,tensor=2"."""
        parts = [f"{axis}={self.size_of(axis)}" for axis in _SHOWN_ORDER if self.size_of(axis) > 1]
        return ",".join(parts) or "data=1"

    def size_of(self, axis: str) -> int:
        """Return the size of one of `AXES`."""
        size: int = getattr(self, axis)
        return size

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.size_of(axis) for axis in AXES)

    @property
    def axes(self) -> tuple[str, ...]:
        """`AXES`, outermost first."""
        return ("replica", "data", "pipeline", *AXES[3:]) if self.is_elastic else AXES

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read different batches."""
        return self.replica * self.replica_data_ranks

    @property
    def replica_data_ranks(self) -> int:
        """Number of ranks of one replica that read different batches."""
        return self.data * self.shard

    @property
    def averaged_data_ranks(self) -> int:
        """Number of data ranks that average their weights with others together: of a replica, or a rank alone."""
        return 1 if self.is_data_only else self.replica_data_ranks

    @property
    def num_copies(self) -> int:
        """Number of ranks that read the same batches."""
        return self.size // self.num_data_ranks

    @property
    def is_data_only(self) -> bool:
        """Whether every rank holds the whole model, so that the gradients are all that the ranks exchange."""
        return self.size == self.data

    def without_replica(self) -> Layout:
        """Return the layout with the axis `replica` as a factor of `data`."""
        return replace(self, data=self.replica * self.data, replica=1)


@dataclass(frozen=True)
class ModelSizes:
    """What a layout must divide.

    Attributes:
        layers: transformer blocks; None: the model cannot be cut into stages.
        heads: attention heads; None: the model has no plan for `tensor`.
        width: channels of the residual stream.
        block: tokens of a sample; None: unknown, or samples are not token blocks.
        splits_tokens: whether the model can compute a part of each block.
    """

    layers: int | None = None
    heads: int | None = None
    width: int | None = None
    block: int | None = None
    splits_tokens: bool = False


@dataclass(frozen=True)
class RankLayout:
    """What one rank holds.

    Attributes:
        rank: rank in the job.
        coordinates: index of the rank along each axis.
        data_rank: index among the ranks that read different batches; equal on all that read the same.
        peers: ranks that differ from this one in one axis only, by axis, this rank included, in order.
    """

    rank: int
    coordinates: Mapping[str, int]
    data_rank: int
    peers: Mapping[str, tuple[int, ...]]

    @property
    def is_first_copy(self) -> bool:
        """Whether this is the first of the ranks with its data rank; the others read the same batches again."""
        return not any(self.coordinates[axis] for axis in ("pipeline", "context", "tensor"))


@dataclass(frozen=True)
class LayoutPlan:
    """A layout over ranks 0 to `layout.size - 1`.

    Attributes:
        layout: the layout.
        shape: size of each of `layout.axes`: the shape of the device mesh.
        ranks: what each rank holds, by rank.
    """

    layout: Layout
    shape: tuple[int, ...]
    ranks: tuple[RankLayout, ...]


def parse_sizes(text: str) -> dict[str, int]:
    """Return the sizes that a text such as "shard=2,tensor=2" names, by axis.

    Raises:
        ConfigError: the text has another form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, number = (piece.strip() for piece in part.partition("="))
        if axis not in AXES or not equals or not (number.isascii() and number.isdecimal()) or int(number) < 1:
            raise ConfigError(
                f"layout is {text!r}, and {part.strip()!r} is not AXIS=SIZE with a size of 1 or more; the axes are "
                f"{', '.join(_SHOWN_ORDER)}, such as 'data=2,shard=2'"
            )
        if axis in sizes:
            raise ConfigError(f"layout is {text!r}, which names {axis} twice; give each axis once")
        sizes[axis] = int(number)
    return sizes


def parse_layout(text: str, world_size: int) -> Layout:
    """Return the layout that a text such as "shard=2,tensor=2" describes for `world_size` ranks.

    A missing `data` is what the other axes leave of the ranks; other missing axes are 1.

    Raises:
        ConfigError: the text has another form, or its sizes do not multiply to `world_size`.
    """
    sizes = parse_sizes(text)
    others = math.prod(size for axis, size in sizes.items() if axis != "data")
    if "data" not in sizes:
        if world_size % others:
            raise ConfigError(
                f"layout is {text!r}, whose axes need a multiple of {others} ranks, and there are {world_size}; "
                f"{_suggest_sizes(sizes, world_size)}"
            )
        sizes["data"] = world_size // others
    layout = _layout_of(sizes)
    _check_size(layout, world_size)
    return layout


# A layout of an elastic job describes one replica: its outermost axis has as many replicas as the ranks make.


def replica_size_of(text: str) -> int:
    """Return the number of ranks of a replica of an elastic job: the product of all axes but the outermost one.

    This is `replica` if the text names it, and `data` otherwise.

    Raises:
        ConfigError: the text has another form.
    """
    sizes = parse_sizes(text)
    return math.prod(size for axis, size in sizes.items() if axis != _outermost(sizes))


def fit_layout(text: str, world_size: int) -> Layout:
    """Return the layout of `world_size` ranks of an elastic job, whatever size the text gives the outermost axis.

    Raises:
        ConfigError: the text has another form, or the ranks are not a multiple of those of a replica.
    """
    sizes, replica_size = parse_sizes(text), replica_size_of(text)
    if not world_size or world_size % replica_size:
        raise ConfigError(
            f"layout is {text!r}, of which a replica has {replica_size} ranks, and there are {world_size}; start a "
            f"multiple of {replica_size}"
        )
    return _layout_of({**sizes, _outermost(sizes): world_size // replica_size}, is_elastic=True)


def _layout_of(sizes: Mapping[str, int], *, is_elastic: bool = False) -> Layout:
    return Layout(**cast("Any", sizes), is_elastic=is_elastic)


def _outermost(sizes: Mapping[str, int]) -> str:
    return "replica" if "replica" in sizes else "data"


def plan_layout(layout: Layout) -> LayoutPlan:
    """Return what each rank of a layout holds. Rank numbers are those of a mesh of shape `LayoutPlan.shape`."""
    shape = tuple(layout.size_of(axis) for axis in layout.axes)
    places = list(itertools.product(*(range(size) for size in shape)))
    rank_of = {place: rank for rank, place in enumerate(places)}
    ranks = []
    for rank, place in enumerate(places):
        coordinates = dict(zip(layout.axes, place, strict=True))
        peers = {
            axis: tuple(rank_of[(*place[:i], index, *place[i + 1 :])] for index in range(shape[i]))
            for i, axis in enumerate(layout.axes)
        }
        data_rank = coordinates["replica"] * layout.data + coordinates["data"]
        data_rank = data_rank * layout.shard + coordinates["shard"]
        ranks.append(RankLayout(rank, coordinates, data_rank, peers))
    return LayoutPlan(layout, shape, tuple(ranks))


def check_layout(
    layout: Layout,
    *,
    world_size: int,
    global_batch: int,
    micro_batch: int | None = None,
    sizes: ModelSizes | None = None,
    pipeline_schedule: str = "1f1b",
) -> None:
    """Check that a layout divides the ranks, the batch and the model, and goes with the schedule of its pipeline.

    Args:
        layout: layout to check.
        world_size: number of ranks.
        global_batch: samples of all ranks per step.
        micro_batch: samples of one pass of one data rank; None: one pass per step.
        sizes: sizes of the model; None: not known yet, so only ranks and batch are checked.
        pipeline_schedule: one of `PIPELINE_SCHEDULES`.

    Raises:
        ConfigError: a size does not divide, or the schedule does not go with an axis; the message has what would do.
    """
    _check_size(layout, world_size)
    check_batch(layout, global_batch)
    if layout.pipeline > 1:
        if pipeline_schedule == "zbv":
            _check_zbv(layout)
        _check_micro_batches(layout, global_batch // layout.num_data_ranks, micro_batch, pipeline_schedule)
    if sizes is not None:
        _check_model(layout, sizes, pipeline_schedule)


def check_batch(layout: Layout, global_batch: int) -> None:
    """Raise ConfigError, with the sizes that would do, if the data ranks cannot divide `global_batch` evenly."""
    if global_batch % layout.num_data_ranks:
        axes = "data x shard" if layout.replica == 1 else "replica x data x shard"
        raise ConfigError(
            f"layout {layout} divides the batches over {layout.num_data_ranks} data ranks ({axes}), and the "
            f"global batch of {global_batch} cannot be divided evenly among them; {axes} may be "
            f"{_list_divisors(global_batch)}, or use a global batch that is a multiple of {layout.num_data_ranks}"
        )


def stages_per_rank(pipeline_schedule: str) -> int:
    """Return how many stages of a pipeline each rank holds.

    Interleaved 1F1B and ZBV need more than one: that is how they shorten the time in which ranks wait.

    Raises:
        ConfigError: there is no such schedule.
    """
    if pipeline_schedule not in PIPELINE_SCHEDULES:
        raise ConfigError(
            f"pipeline schedule is {pipeline_schedule!r}; expected one of {', '.join(PIPELINE_SCHEDULES)}"
        )
    return 2 if pipeline_schedule in ("interleaved", "zbv") else 1


def _check_size(layout: Layout, world_size: int) -> None:
    if layout.size != world_size:
        sizes = {axis: layout.size_of(axis) for axis in AXES if layout.size_of(axis) > 1}
        raise ConfigError(
            f"layout {layout} needs {layout.size} ranks, and there are {world_size}; "
            f"{_suggest_sizes(sizes, world_size)}"
        )


def _suggest_sizes(sizes: Mapping[str, int], world_size: int) -> str:
    """Return, for each given axis, the sizes that fit the ranks if the other axes but `data` stay."""
    suggestions = []
    for axis in sizes:
        others = math.prod(size for other, size in sizes.items() if other not in (axis, "data"))
        if axis != "data" and world_size % others == 0:
            suggestions.append(f"{axis} may be {_list_divisors(world_size // others)}")
    return "; ".join(suggestions) or f"use sizes whose product is {world_size}, or leave out data to derive it"


def _check_zbv(layout: Layout) -> None:
    # torch 2.13 splits the backward pass: `stage_backward_input` first looks up the parameters of the stage in the
    # graph, to compute their gradients later. FSDP, which divides parameters over these axes, has freed the gathered
    # ones by then (`reshard_after_forward`, ZeRO-3). The sharded ones are not in the graph, so gradients are missing
    # or wrong, without an error. With ZeRO-2 they are right, but FSDP refuses tied weights: the first rank has these
    # in both of its stages, each of which is a root.
    if layout.shard * layout.context > 1:
        raise ConfigError(
            f"layout {layout} does not work with the schedule zbv, which goes with data, tensor and pipeline; use "
            "another schedule, or only these axes"
        )


def _check_micro_batches(layout: Layout, batch: int, micro_batch: int | None, pipeline_schedule: str) -> None:
    num_stages = layout.pipeline * stages_per_rank(pipeline_schedule)
    micro_batch = min(micro_batch or batch, batch)
    # torch's interleaved schedule works in rounds of one micro-batch per rank; 1F1B and ZBV need a micro-batch for
    # every stage.
    fewest = num_stages if pipeline_schedule == "zbv" else layout.pipeline
    if pipeline_schedule == "gpipe":
        fewest = 1
    fits = [
        size
        for size in divisors(batch)
        if batch // size >= fewest and (pipeline_schedule != "interleaved" or batch // size % layout.pipeline == 0)
    ]
    if micro_batch not in fits:
        found = f"{batch} samples in micro-batches of {micro_batch}"
        remedy = (
            f"micro_batch may be {_format(fits)}"
            if fits
            else f"use a batch per data rank that is a multiple of {fewest}"
        )
        raise ConfigError(
            f"layout {layout} with the schedule {pipeline_schedule} needs equal micro-batches, "
            f"at least {fewest} of them"
            + (f" and a multiple of {layout.pipeline}" if pipeline_schedule == "interleaved" else "")
            + f", and each data rank has {found}; {remedy}"
        )


def _check_model(layout: Layout, sizes: ModelSizes, pipeline_schedule: str) -> None:
    if layout.tensor > 1:
        if sizes.heads is None:
            raise ConfigError(
                f"layout {layout} divides layers over {layout.tensor} ranks, and the model has no plan for `tensor`; "
                "use shard, or a model with a method `tensor_plan`, such as gpt"
            )
        if sizes.heads % layout.tensor:
            raise ConfigError(
                f"layout {layout} divides the attention heads over {layout.tensor} ranks, and the model has "
                f"{sizes.heads}; tensor may be {_list_divisors(sizes.heads)}"
            )
    if layout.pipeline > 1:
        if sizes.layers is None:
            raise ConfigError(
                f"layout {layout} cuts the model into {layout.pipeline} stages, and the model cannot be cut; use "
                "shard, or a model with a method `stage`, such as gpt"
            )
        num_stages = layout.pipeline * stages_per_rank(pipeline_schedule)
        if sizes.layers % num_stages:
            per_rank = stages_per_rank(pipeline_schedule)
            fits = [size // per_rank for size in divisors(sizes.layers) if size % per_rank == 0]
            raise ConfigError(
                f"layout {layout} with the schedule {pipeline_schedule} cuts the layers into {num_stages} stages, "
                f"and the model has {sizes.layers}; pipeline may be {_format(fits)}"
            )
    if layout.context > 1:
        if not sizes.splits_tokens:
            raise ConfigError(
                f"layout {layout} divides the tokens of a block over {layout.context} ranks, and the model cannot "
                "divide them; use data or shard, or a model with a method `split_tokens`, such as gpt"
            )
        if sizes.block is not None and sizes.block % layout.context:
            raise ConfigError(
                f"layout {layout} divides each block over {layout.context} ranks, and a block has {sizes.block} "
                f"tokens; context may be {_list_divisors(sizes.block)}"
            )


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _list_divisors(number: int) -> str:
    return _format(divisors(number))


def _format(numbers: list[int]) -> str:
    if not numbers:
        return "1 only"
    shown = ", ".join(map(str, numbers[:_MAX_CHOICES]))
    return f"{shown}, ..., {numbers[-1]}" if len(numbers) > _MAX_CHOICES else shown
