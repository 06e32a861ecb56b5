"""Broadcast of parameters, optimizer state and objects, so that all ranks start from the state of the root.

Every rank calls these functions in the same order. Objects are sent as pickles; cloudpickle is used for objects that
pickle rejects, such as lambdas and classes defined in functions or notebooks. The ranks of a job run the same program
and trust each other. This module never reads a pickle from a file or from outside the job.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # has no types
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from datasvc.trainer.gradients.compression_with_memory import HasMemory
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.ops import allgather, broadcast_, broadcast_async_


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str | None, Tensor]] | Iterable[Tensor], root_rank: int
) -> None:
    """Overwrite tensors with those of the root, in place.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or `model.parameters()`, in the same order on every
            rank; values that are not tensors are ignored. Of a wrapper, such as a quantised weight, the tensors are
            sent that it is made of.
        root_rank: global rank to copy from.

    Raises:
        ValueError: `params` is none of these.
        HorovodInternalError: ranks have different tensors under one name.
    """
    handles = [
        broadcast_async_(tensor, root_rank, f"parameters.{name}")
        for named in _named_values(params)
        for name, tensor in _with_memory(*named)
    ]
    for handle in handles:
        handle.wait()


# The thread of the engine writes tensors outside inference mode: those that are made here must not be of it.
@torch.inference_mode(mode=False)
def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of the root on every rank: the object itself on the root, a copy on the others.

    Args:
        obj: object that cloudpickle can pickle; ignored on ranks other than the root.
        root_rank: global rank to copy from.
        name: name of the operation; needed only if several threads broadcast objects at the same time.
        process_set: ranks that take part.

    Raises:
        ValueError: this rank or the root is not in the process set.
    """
    name = name or "object"
    is_root = runtime.rank() == root_rank
    # On the other ranks, `data` is None until the length is known.
    data = torch.frombuffer(bytearray(pickle_object(obj)), dtype=torch.uint8) if is_root else None
    # Send the length first, because the other ranks must allocate the memory for the data.
    length = broadcast_(
        torch.tensor([0 if data is None else data.numel()], dtype=torch.int64, device="cpu"),
        root_rank,
        f"{name}.length",
        process_set,
    )
    if data is None:
        data = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, f"{name}.data", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())  # noqa: S301 - from a rank of this job


@torch.inference_mode(mode=False)
def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return copies of the objects of all ranks, in rank order.

    Args:
        obj: object that cloudpickle can pickle.
        name: name of the operation; needed only if several threads gather objects at the same time.
        process_set: ranks that take part.

    Raises:
        ValueError: this rank is not in the process set.
    """
    name = name or "object"
    data = torch.frombuffer(bytearray(pickle_object(obj)), dtype=torch.uint8)
    lengths = allgather(
        torch.tensor([data.numel()], dtype=torch.int64, device="cpu"), f"{name}.length", process_set
    ).tolist()
    parts = torch.split(allgather(data, f"{name}.data", process_set), lengths)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]  # noqa: S301 - from ranks of this job


@torch.inference_mode(mode=False)
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Make the state and options of the optimizer equal to those of the root.

    Existing tensors are overwritten in place; scalars and tuples keep their types. State that only the root has,
    for example from a checkpoint, is created on the other ranks. State that the root does not have is removed.
    As in Horovod, parameters without a gradient get a gradient of zeros. Residuals of a compression (unsent parts of
    gradients) stay on their rank.

    Args:
        optimizer: plain or distributed optimizer, over the same parameters in the same order on every rank.
        root_rank: global rank to copy from.
        model: model whose sparse embeddings get no gradient of zeros, because that gradient would be dense.

    Raises:
        ValueError: `optimizer` is LBFGS, which does not keep its state per parameter; or the optimizers have other
            parameter groups, on every rank.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(  # noqa: TRY004 - Horovod's type
            "LBFGS does not keep its state per parameter, so it cannot be broadcast; use another optimizer"
        )
    _check_groups(optimizer, root_rank)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # SparseAdam rejects dense gradients, so none of its parameters may get one.
    is_sparse_adam = isinstance(optimizer, torch.optim.SparseAdam)
    sparse_ids = set(map(id, parameters)) if is_sparse_adam else _find_sparse_parameters(model)
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None and id(parameter) not in sparse_ids:
            parameter.grad = torch.zeros_like(parameter)
    # First broadcast all values except the tensors, and prepare tensors of the root's shapes. Then broadcast these.
    # `local_values` has the state of each parameter, then the options of each group; the lists below have this order.
    local_values = [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
    local_values += [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    descriptions = [describe_values(values) for values in local_values]
    # The memory of a compression, without the residuals.
    shared_memory = optimizer.shared_memory() if isinstance(optimizer, HasMemory) else {}
    root_values, shared_memory = broadcast_object((descriptions, shared_memory), root_rank, "optimizer")
    if runtime.rank() != root_rank:
        devices = [parameter.device for parameter in parameters]
        devices += [group["params"][0].device for group in optimizer.param_groups]
        local_values = [
            prepare_values(values, values_of_root, device)
            for values, values_of_root, device in zip(local_values, root_values, devices, strict=True)
        ]
        adopt_values(optimizer, parameters, local_values)
    if isinstance(optimizer, HasMemory):
        # On the root too: all ranks of an averaging optimizer then begin the round in progress again.
        optimizer.adopt_shared_memory(shared_memory)
    tensors = {
        f"optimizer.{i}.{key}": local_values[i][key]
        for i, values in enumerate(root_values)
        for key, value in values.items()
        if isinstance(value, TensorDescription)
    }
    broadcast_parameters(tensors, root_rank)


def _check_groups(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Compare the parameter groups of all ranks: values of other groups would be those of other parameters."""
    sizes = allgather_object([len(group["params"]) for group in optimizer.param_groups], "optimizer.groups")
    for rank, sizes_of_rank in enumerate(sizes):
        if sizes_of_rank != sizes[root_rank]:
            of_root, of_rank = (
                f"{len(each)} parameter groups of {', '.join(map(str, each))} parameters"
                for each in (sizes[root_rank], sizes_of_rank)
            )
            raise ValueError(
                f"broadcast_optimizer_state: rank {root_rank}, the root, has {of_root}; rank {rank} has {of_rank}; "
                "make the optimizer alike on all ranks, for example add a group on all of them before the call"
            )


def pickle_object(obj: Any) -> bytes:
    """Return a pickle of the object, by cloudpickle if pickle rejects the object."""
    # pickle first: it sends classes by name, so the receiver uses its own class. cloudpickle may send a copy of it.
    try:
        return pickle.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError):
        return bytes(cloudpickle.dumps(obj))


@dataclass(frozen=True)
class TensorDescription:
    """The properties of a tensor of the root, from which another rank can allocate it."""

    shape: torch.Size
    dtype: torch.dtype
    is_on_host: bool


def describe_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with each tensor replaced by its description."""
    return {
        key: TensorDescription(value.shape, value.dtype, value.device.type == "cpu")
        if isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)
        else value  # a wrapper is sent as an object: another rank cannot make it from a shape
        for key, value in values.items()
    }


def prepare_values(
    local_values: Mapping[str, Any], root_values: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return the values of the root, with a tensor for each description: the local one if it fits, else a new one."""
    prepared = {k: value.to(device) if isinstance(value, Tensor) else value for k, value in root_values.items()}
    for key, value in root_values.items():
        if isinstance(value, TensorDescription):
            local = local_values.get(key)
            fits = isinstance(local, Tensor) and (local.shape, local.dtype) == (value.shape, value.dtype)
            # The root may keep a tensor, such as a step counter, on the host. Others are on the parameter's device.
            tensor_device = torch.device("cpu") if value.is_on_host else device
            prepared[key] = local if fits else torch.empty(value.shape, dtype=value.dtype, device=tensor_device)
    return prepared


def adopt_values(optimizer: torch.optim.Optimizer, parameters: list[Tensor], values: list[dict[str, Any]]) -> None:
    """Replace the state and options: `values` has the state of each parameter, then the options of each group."""
    # Not strict, because the options of the groups follow the states.
    for parameter, state in zip(parameters, values, strict=False):
        if state:
            optimizer.state[parameter] = state
        else:
            # Delete the entry, because some optimizers would mistake an empty entry for initialized state.
            optimizer.state.pop(parameter, None)
    for group, options in zip(optimizer.param_groups, values[len(parameters) :], strict=True):
        group.update(options)


def _find_sparse_parameters(model: torch.nn.Module | None) -> set[int]:
    """Return the ids of the parameters that get sparse gradients: the weights of embeddings with `sparse=True`."""
    modules = () if model is None else model.modules()
    return {id(module.weight) for module in modules if getattr(module, "sparse", False) is True}


def _with_memory(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a tensor is made of: itself, or those inside a wrapper; nothing of another value."""
    # Of a DTensor, each rank has another part.
    if is_traceable_wrapper_subclass(value) and not hasattr(value, "placements"):
        for inner in value.__tensor_flatten__()[0]:
            yield from _with_memory(f"{name}.{inner}", getattr(value, inner))
    elif isinstance(value, Tensor):
        yield name, value


def _named_values(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str, Any]]:
    """Return pairs of name and value for the `params` of `broadcast_parameters`; number tensors without a name."""
    if isinstance(params, Mapping):
        return list(params.items())
    # A tensor is iterable too, but is rejected below: otherwise its rows would be broadcast one by one.
    entries = [] if isinstance(params, Tensor) else list(params)
    pairs = [(None, entry) if isinstance(entry, Tensor) else entry for entry in entries]
    if isinstance(params, Tensor) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "params must be model.state_dict(), model.named_parameters() or a list of tensors such as "
            f"list(model.parameters()), not {type(params).__name__}"
        )
    return [(f"unnamed.{i}" if name is None else name, value) for i, (name, value) in enumerate(pairs)]
