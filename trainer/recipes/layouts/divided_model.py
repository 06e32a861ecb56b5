"""A model that is divided over the ranks by torch's engines, and what is different in its steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import datasvc.trainer as hvd
from datasvc.planning.layout import Layout, LayoutPlan, ModelSizes, RankLayout, plan_layout, stages_per_rank
from datasvc.trainer.gradients.bucket_choice import BUCKET_BYTES
from datasvc.trainer.job.process_sets import ProcessSet, add_process_sets
from datasvc.trainer.recipes.layouts.pipeline import Pipeline, join_stages, plan_stages
from datasvc.trainer.recipes.layouts.shard import recompute_activations, shard_parameters, to_local
from datasvc.trainer.recipes.layouts.tensor import ContextSplit, FusedHeadsParallel, divide_layers, find_tensor_plan


@dataclass(frozen=True)
class LayoutOptions:
    """How the axes of a layout work.

    Attributes:
        pipeline_schedule: one of `PIPELINE_SCHEDULES`.
        zero: stage of ZeRO for the axis `shard`: 2 keeps gathered parameters until the backward pass, 3 frees them.
        recompute: whether the activations of each unit are computed again in the backward pass.
        offload: whether parameters, gradients and optimizer state are in host memory.
    """

    pipeline_schedule: str = "1f1b"
    zero: int = 3
    recompute: bool = False
    offload: bool = False


@dataclass
class DividedModel:
    """A model that is divided over the ranks, on one rank.

    Attributes:
        rank_layout: what this rank has.
        model: parameters and buffers of this rank, with the names of the whole model; without a pipeline, the model.
        modules: modules that compute: the stages of this rank, or the model.
        pipeline: stages of this rank; None without a pipeline.
        split: tokens of each block on this rank; None: all.
        groups: ranks along each axis of more than one rank over which this object communicates; "data": if FSDP does
            not sum the gradients over it.
        tied_group: ranks of the first and the last stage, if these have the same weights; None: not here.
        tied_name: name of these weights.
        exchanges_heads: whether ranks of the axis `tensor` exchange queries, keys and values.
        replica_set: ranks that make each step together: all, or those of this replica.
        place_set: ranks at the same place in each replica, which average their weights; None if none do.
        parameter_groups: groups of an optimizer of the whole model, with the names of parameters as "params".
    """

    layout: Layout
    rank_layout: RankLayout
    model: nn.Module
    modules: list[nn.Module]
    pipeline: Pipeline | None = None
    split: ContextSplit | None = None
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    tied_group: dist.ProcessGroup | None = None
    tied_name: str | None = None
    exchanges_heads: bool = False
    replica_set: ProcessSet = hvd.global_process_set
    place_set: ProcessSet | None = None
    parameter_groups: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reports_outputs(self) -> bool:
        """Whether this rank has outputs of the model that no rank before it has: its metrics count."""
        return self.rank_layout.coordinates["tensor"] == 0 and (self.pipeline is None or self.pipeline.has_last)

    def reshard(self) -> None:
        """Free the parameters that a forward pass without a backward pass has gathered.

        Otherwise the next forward pass would use them although the parts have changed, by a step or by a load.
        """
        for module in self.modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def sum_over_copies(self, value: torch.Tensor) -> torch.Tensor:
        """Add up parts of a value of one batch, in place, from all stages and all parts of the blocks.

        Every rank calls this; the result is equal on all ranks with the same data rank.
        """
        for axis in ("pipeline", "context"):
            if axis in self.groups:
                dist.all_reduce(value, group=self.groups[axis])
        return value

    def sum_gradients(self) -> None:
        """Add up the gradients that FSDP does not, after the backward pass. Every rank calls this.

        These are the weights that the first and the last stage have, and all of a pipeline without FSDP over `data`.
        """
        if self.tied_group is not None:
            assert self.tied_name is not None
            gradient = self.model.get_parameter(self.tied_name).grad
            assert gradient is not None
            dist.all_reduce(to_local(gradient), group=self.tied_group)
        if "data" not in self.groups:
            return
        gradients = [to_local(weight.grad) for weight in self.model.parameters() if weight.grad is not None]
        for bucket in _fill_buckets(gradients):
            total = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(total, group=self.groups["data"])
            parts = torch.split(total, [gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that the norm of the whole model's gradient is at most `max_norm`; return the norm.

        Every rank calls this. The norm, that of this replica, is equal on its ranks to the last bit, `float32[]` on
        the CPU.
        """
        weights = self.model.named_parameters()
        gradients = [(name, weight.grad) for name, weight in weights if weight.grad is not None]
        # Each element counts on one rank of a replica, so that one sum over its ranks is the square of the norm.
        counted = [to_local(gradient) for name, gradient in gradients if self._counts(name, gradient)]
        squares = torch.zeros((), dtype=torch.float64, device="cpu")
        if counted:
            # One copy to the host, because each waits for the device.
            squares = torch.stack([torch.linalg.vector_norm(each).double() for each in counted]).square().sum().cpu()
        total = hvd.allreduce(squares, name="layout.norm", op=hvd.Sum, process_set=self.replica_set)
        norm = total.sqrt().float()
        # As torch's `clip_grad_norm_`.
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for _, gradient in gradients:
            to_local(gradient).mul_(scale.to(gradient.device))
        return norm

    def _counts(self, name: str, gradient: torch.Tensor) -> bool:
        """Return whether this rank is the first of those that have the same elements of a gradient."""
        if name == self.tied_name and self.pipeline is not None and not self.pipeline.has_first:
            return False
        coordinates = self.rank_layout.coordinates
        index = {
            "data": coordinates["data"],
            "shard": coordinates["shard"] * self.layout.context + coordinates["context"],
            "tensor": coordinates["tensor"],
        }
        if isinstance(gradient, DTensor):
            names = gradient.device_mesh.mesh_dim_names or ()
            for axis, placement in zip(names, gradient.placements, strict=True):
                assert not placement.is_partial(), f"the gradient of {name} is not summed over {axis}"
                if not placement.is_replicate():
                    del index[axis]
        return not any(index.values())


def _fill_buckets(gradients: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the gradients in order, in lists of one dtype and of some megabytes, each for one message."""
    buckets: list[list[torch.Tensor]] = []
    num_bytes = 0
    for gradient in gradients:
        if not buckets or num_bytes > BUCKET_BYTES or gradient.dtype != buckets[-1][0].dtype:
            buckets.append([])
            num_bytes = 0
        buckets[-1].append(gradient)
        num_bytes += gradient.nbytes
    return buckets


def sizes_of(model: nn.Module) -> Mapping[str, int]:
    """Return the sizes of a whole model by name, from its method `sizes`; empty without one."""
    return cast("Callable[[], Mapping[str, int]]", model.sizes)() if hasattr(model, "sizes") else {}


def read_sizes(model: nn.Module, *, block: int | None = None) -> ModelSizes:
    """Return what a layout must divide, from the methods of a model. The model may be on the device "meta"."""
    sizes = sizes_of(model)
    return ModelSizes(
        layers=sizes.get("layers") if hasattr(model, "stage") else None,
        heads=sizes.get("heads") if hasattr(model, "tensor_plan") else None,
        width=sizes.get("width"),
        block=block,
        splits_tokens=hasattr(model, "split_tokens"),
    )


def apply_layout(
    model: nn.Module,
    layout: Layout,
    options: LayoutOptions,
    *,
    rank: int,
    device: torch.device,
    num_micro_batches: int = 1,
    block: int | None = None,
    averages_weights: bool = False,
) -> DividedModel:
    """Divide a model over all ranks. Every rank calls this; the default process group must exist.

    Args:
        model: whole model on the CPU, equal on all ranks; this rank keeps its part, on `device`.
        layout: layout of all ranks, which `check_layout` has accepted.
        options: how the axes work.
        rank: rank of this process.
        device: device of this rank.
        num_micro_batches: equal parts into which a pipeline divides each batch.
        block: tokens of a sample; only for the axis `context`.
        averages_weights: whether replicas average their weights, also if an elastic job has only one replica now.
    """
    plan = plan_layout(layout)
    divided = DividedModel(layout, plan.ranks[rank], model, [model])
    if averages_weights:
        divided.replica_set = add_process_sets(_ranks_of_replicas(plan))
        divided.place_set = add_process_sets({each.peers["replica"] for each in plan.ranks})
    # `shard` and `context` are one axis of the mesh: the ranks of both have parts of the gradient sum, so the
    # parameters are divided over both.
    names = tuple(axis for axis in layout.axes if axis != "context")
    shape = tuple(layout.size_of(axis) * (layout.context if axis == "shard" else 1) for axis in names)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    divided.groups = {axis: mesh.get_group(axis) for axis in ("pipeline", "tensor") if layout.size_of(axis) > 1}
    if layout.context > 1:
        assert block is not None
        _split_tokens(divided, plan, block, device)
    if layout.pipeline > 1:
        _cut(divided, plan, options, device=device, num_micro_batches=num_micro_batches)
    parameter_mesh = _choose_parameter_mesh(mesh, layout)
    if layout.data > 1 and parameter_mesh is None:
        divided.groups = {**divided.groups, "data": mesh.get_group("data")}
    # FSDP moves one unit after the other, so that a model that is larger than the device fits.
    if layout.tensor > 1 or parameter_mesh is None:
        divided.model.to(device)
    tensor_plan = find_tensor_plan(model) if layout.tensor > 1 else {}
    divided.exchanges_heads = any(isinstance(style, FusedHeadsParallel) for style in tensor_plan.values())
    for module in divided.modules:
        if tensor_plan:
            divide_layers(module, tensor_plan, mesh["tensor"])
        if options.recompute:
            recompute_activations(module)
        if parameter_mesh is not None:
            shard_parameters(module, parameter_mesh, reshard_after_forward=options.zero == 3, offload=options.offload)
    return divided


def _ranks_of_replicas(plan: LayoutPlan) -> list[range]:
    # The axis `replica` is the outermost, so the ranks of a replica are consecutive.
    size = plan.layout.size // plan.layout.replica
    return [range(start, start + size) for start in range(0, plan.layout.size, size)]


def _choose_parameter_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh | None:
    """Return the axes over which FSDP sums gradients; None if it is not used."""
    # A stage whose parameters are not divided needs no FSDP, which does not go with the schedule zbv.
    if layout.data > 1 and (layout.pipeline == 1 or layout.shard * layout.context > 1):
        return mesh["data", "shard"]
    return mesh["shard"] if layout.shard * layout.context > 1 else None


def _split_tokens(divided: DividedModel, plan: LayoutPlan, block: int, device: torch.device) -> None:
    own, size = divided.rank_layout, divided.layout.context
    group = new_group({peer.peers["context"] for peer in plan.ranks}, own.rank)
    divided.groups = {**divided.groups, "context": group}
    mesh = DeviceMesh.from_group(group, device.type)
    divided.split = ContextSplit(own.coordinates["context"], size, block // size, mesh)
    cast("Any", divided.model).split_tokens(divided.split)


def _cut(
    divided: DividedModel,
    plan: LayoutPlan,
    options: LayoutOptions,
    *,
    device: torch.device,
    num_micro_batches: int,
) -> None:
    """Replace the whole model by the stages of this rank."""
    own, size, schedule = divided.rank_layout, divided.layout.pipeline, options.pipeline_schedule
    num_stages = size * stages_per_rank(schedule)
    whole = cast("Any", divided.model)
    numbers = plan_stages(own.coordinates["pipeline"], size, schedule)
    tied = find_tied_weights(whole, num_stages)
    # With "zbv" one rank has both stages, and the weights once.
    if tied is not None and schedule != "zbv":
        ends = {(peer.peers["pipeline"][0], peer.peers["pipeline"][-1]) for peer in plan.ranks}
        group = new_group(ends, own.rank)
        if {0, num_stages - 1} & set(numbers):
            divided.tied_name, divided.tied_group = tied, group
    stages: list[nn.Module] = [whole.stage(number, num_stages) for number in numbers]
    divided.model, divided.modules = join_stages(stages), stages
    divided.pipeline = Pipeline(
        stages,
        schedule=schedule,
        num_micro_batches=num_micro_batches,
        device=device,
        group=divided.groups["pipeline"],
    )


def find_tied_weights(model: nn.Module, num_stages: int) -> str | None:
    """Return the name of the parameter that both the first and the last of `num_stages` stages have, or None."""
    first, last = (cast("Any", model).stage(number, num_stages) for number in (0, num_stages - 1))
    names = {name for name, _ in last.named_parameters()}
    tied = [name for name, _ in first.named_parameters() if name in names]
    assert len(tied) <= 1, "a stage shares at most one parameter with another"
    return tied[0] if tied else None


def new_group(rank_lists: Collection[tuple[int, ...]], rank: int) -> dist.ProcessGroup:
    """Create a process group of each list of ranks, and return the one of this rank. All ranks call this alike."""
    own = None
    for ranks in sorted(rank_lists):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            own = group
    return cast("dist.ProcessGroup", own)
