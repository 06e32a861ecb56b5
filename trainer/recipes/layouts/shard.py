"""The axis `shard`: each rank stores a part of every parameter (ZeRO, Rajbhandari et al. 2020; torch's FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are gathered, and whose activations are recomputed, together.

    A model names them with a method `shard_units`. Otherwise they are the modules with layers of their own in the
    `nn.ModuleList`s and `nn.Sequential`s of the model, also in nested ones. Other parameters stay with the root.
    """
    if hasattr(model, "shard_units"):
        return list(cast("Callable[[], list[nn.Module]]", model.shard_units)())
    roots = [model] if isinstance(model, nn.Sequential) else model.children()
    # A module that occurs twice is one unit.
    return list(dict.fromkeys(unit for root in roots for unit in _find_blocks(root)))


def _find_blocks(group: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(group, nn.ModuleList | nn.Sequential):
        return
    for module in group:
        if isinstance(module, nn.ModuleList | nn.Sequential) and any(list(layer.children()) for layer in module):
            yield from _find_blocks(module)
        elif list(module.children()) and next(module.parameters(), None) is not None:
            yield module


def shard_parameters(model: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool, offload: bool) -> None:
    """Shard the parameters over the last axis of `mesh`, in place; an axis before it has replicas.

    Gradients are then summed over all ranks of the mesh, not averaged: the loss is divided by the targets of all
    ranks. Every rank of the mesh calls this.

    Args:
        model: model, or stage of a pipeline, with equal parameters on all ranks of the mesh.
        mesh: one axis, or the axes of the replicas and of the shards.
        reshard_after_forward: whether gathered parameters are freed between forward and backward pass (ZeRO-3), so
            that they are gathered twice per step; otherwise they are kept (ZeRO-2).
        offload: whether parameters, gradients and optimizer state are in host memory.
    """
    pin_memory = mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pin_memory) if offload else OffloadPolicy()
    shard: Callable[[nn.Module], Any] = partial(
        fully_shard, mesh=mesh, reshard_after_forward=reshard_after_forward, offload_policy=policy
    )
    for unit in find_units(model):
        shard(unit)
        if reshard_after_forward:
            # Autocast would keep 16-bit copies of the freed parameters until the end of the forward pass.
            unit.register_forward_hook(lambda *_: torch.clear_autocast_cache())
    shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The sum needs both: the factor, and an operation that gloo has.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)


def recompute_activations(model: nn.Module) -> None:
    """Free the activations of each unit after the forward pass; the backward pass computes them again.

    Chen et al. 2016, arXiv:1604.06174. The names of parameters do not change. Batch statistics are tracked once.
    """
    for unit in find_units(model):
        unit.forward = partial(_recompute, unit, unit.forward)


def _recompute(unit: nn.Module, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        # A compiled graph changes buffers only in the forward pass, and can contain no such context.
        return cast("torch.Tensor", checkpoint(forward, *args, use_reentrant=False, **kwargs))
    contexts = partial(_make_contexts, unit)
    return cast("torch.Tensor", checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs))


def _make_contexts(unit: nn.Module) -> tuple[nullcontext[None], DiscardedStatistics]:
    """Return the contexts of the forward pass and of the recomputation."""
    return nullcontext(), DiscardedStatistics(unit)


def offload_activations(model: nn.Module, *, pin_memory: bool) -> None:
    """Keep what each unit saves for its backward pass in host memory until then.

    vDNN (Rhu et al. 2016, arXiv:1602.08124) and KARMA (Wahib et al. 2020, arXiv:2008.11421) swap so; here
    `torch.autograd.graph.save_on_cpu` copies. Values, and so weights, do not change. Weights stay on the device.

    Args:
        model: model, whose units have their weights on the device.
        pin_memory: whether the host memory is pinned, for faster copies from and to a GPU.
    """
    for unit in find_units(model):
        unit.forward = partial(_offload, unit, unit.forward, pin_memory)


def _offload(
    unit: nn.Module, forward: Callable[..., torch.Tensor], pin_memory: bool, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # A layer saves its weights too, also as views of them: a copy would free no memory of the device. The 16-bit
    # copies that autocast makes are not known here.
    weights = {weight.untyped_storage().data_ptr() for weight in unit.parameters()}
    hooks = torch.autograd.graph.save_on_cpu(pin_memory=pin_memory)

    def pack(tensor: torch.Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in weights else hooks.pack_hook(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else hooks.unpack_hook(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


class DiscardedStatistics:
    """Lets batch normalisations update copies of their statistics in the context, and forgets these at its end.

    It can be entered again after its end: the schedule zbv splits the backward pass, and so recomputes a unit for the
    gradients of its inputs, and again for those of its weights.
    """

    def __init__(self, unit: nn.Module) -> None:
        # The name is that of the base class of all batch normalisations.
        base = nn.modules.batchnorm._BatchNorm  # noqa: SLF001
        self._norms = [module for module in unit.modules() if isinstance(module, base)]
        self._kept: list[dict[str, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        """Replace the statistics by copies."""
        self._kept = [module._buffers for module in self._norms]  # noqa: SLF001 - to be set back as a whole
        for module in self._norms:
            module._buffers = {  # noqa: SLF001
                name: None if value is None else value.clone()
                for name, value in module._buffers.items()  # noqa: SLF001
            }

    def __exit__(self, *_exception: object) -> None:
        """Set the statistics back."""
        for module, buffers in zip(self._norms, self._kept, strict=True):
            module._buffers = buffers  # noqa: SLF001


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank stores, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def from_local(value: Any, like: torch.Tensor) -> Any:
    """Return a value of the weights or the state of `like`; as a sharded tensor, if it is the local part of one.

    It is not copied, unless it is on another device.
    """
    if not torch.is_tensor(value) or isinstance(value, DTensor) or not value.dim():
        return value
    part = to_local(like)
    value = value.to(part.device)
    if not isinstance(like, DTensor) or value.shape != part.shape:
        return value
    return DTensor.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
