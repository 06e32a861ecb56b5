"""Makes all ranks start from the root's state. Every rank calls these in the same order.

Objects travel as pickles, by cloudpickle where pickle cannot: lambdas, classes of functions and notebooks. The ranks
of one job run the same program and trust each other. Nothing here reads a pickle from a file or from outside the job.
"""

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # has no types
import torch
from torch import Tensor

from datasvc.trainer.gradients.compression_with_memory import HasMemory
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.ops import allgather, broadcast_, broadcast_async_


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str | None, Tensor]] | Iterable[Tensor], root_rank: int
) -> None:
    """Overwrites the tensors with the root's, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or ``model.parameters()``, which must come in
            the same order on every rank; values that are no tensors are left alone.
        root_rank: the rank to copy from.

    Raises:
        ValueError: ``params`` is none of these.
        HorovodInternalError: ranks have different tensors under a name.
    """
    handles = [
        broadcast_async_(tensor, root_rank, f"parameters.{name}")
        for name, tensor in _named_values(params)
        if isinstance(tensor, Tensor)
    ]
    for handle in handles:
        handle.wait()


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object on every rank; a copy on all but the root.

    Args:
        obj: anything that cloudpickle can pickle; ignored on ranks other than the root.
        root_rank: the rank to copy from: its global number.
        name: needed only if several threads broadcast objects at a time.
        process_set: whose ranks take part.

    Raises:
        ValueError: this rank, or the root, is not in the process set.
    """
    name = name or "object"
    is_root = runtime.rank() == root_rank
    data = torch.frombuffer(bytearray(_pickle(obj)), dtype=torch.uint8) if is_root else None
    length = broadcast_(torch.tensor([0 if data is None else data.numel()]), root_rank, f"{name}.length", process_set)
    if data is None:
        data = torch.empty(int(length.item()), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.data", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())  # noqa: S301 - from a rank of this job


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in rank order, as copies.

    Args:
        obj: anything that cloudpickle can pickle.
        name: needed only if several threads gather objects at a time.
        process_set: whose ranks take part.

    Raises:
        ValueError: this rank is not in the process set.
    """
    name = name or "object"
    data = torch.frombuffer(bytearray(_pickle(obj)), dtype=torch.uint8)
    lengths = allgather(torch.tensor([data.numel()]), f"{name}.length", process_set).tolist()
    parts = torch.split(allgather(data, f"{name}.data", process_set), lengths)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]  # noqa: S301 - from ranks of this job


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Makes the optimizer's state and options equal to the root's.

    Tensors that exist already are overwritten in place; scalars and tuples keep their types. State that only
    the root has (it restored a checkpoint) is created, state that the root lacks is dropped: a fresh optimizer stays
    fresh. Parameters without a gradient get a zero one, as Horovod leaves them. What a compression has not sent yet
    stays with its rank.

    Args:
        optimizer: distributed or not, over the same parameters in the same order on every rank.
        root_rank: the rank to copy from.
        model: whose sparse embeddings get no zero gradient, which would be a dense one.

    Raises:
        ValueError: an LBFGS optimizer, whose state is not kept per parameter.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of LBFGS is not kept per parameter")  # noqa: TRY004 - Horovod's type
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # SparseAdam takes no dense gradient.
    sparse = (
        _sparse_parameters(model) if not isinstance(optimizer, torch.optim.SparseAdam) else set(map(id, parameters))
    )
    _add_zero_gradients([parameter for parameter in parameters if id(parameter) not in sparse])
    mine = [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
    mine += [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    described = [_describe(values) for values in mine]
    shared = optimizer.shared_memory() if isinstance(optimizer, HasMemory) else {}
    wanted, shared = broadcast_object((described, shared), root_rank, "optimizer")
    if runtime.rank() != root_rank:
        devices = [parameter.device for parameter in parameters]
        devices += [group["params"][0].device for group in optimizer.param_groups]
        mine = [_prepare(*each) for each in zip(mine, wanted, devices, strict=True)]
        _adopt(optimizer, parameters, mine)
        if isinstance(optimizer, HasMemory):
            optimizer.adopt_shared_memory(shared)
    tensors = {f"optimizer.{i}.{key}": mine[i][key] for i, key in _described_tensors(wanted)}
    broadcast_parameters(tensors, root_rank)


def _pickle(obj: Any) -> bytes:
    # pickle first: it sends classes and functions of the program by name, so that what arrives is an instance of the
    # receiver's own class, and a member of its own enum. cloudpickle sends a copy of the class.
    try:
        return pickle.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError):
        return bytes(cloudpickle.dumps(obj))


@dataclass(frozen=True)
class _TensorDescription:
    shape: torch.Size
    dtype: torch.dtype
    is_on_host: bool


def _describe(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _TensorDescription(value.shape, value.dtype, value.device.type == "cpu")
        if isinstance(value, Tensor)
        else value
        for key, value in values.items()
    }


def _prepare(mine: Mapping[str, Any], wanted: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The wanted values; tensors, still to be filled, are mine where they fit."""
    prepared = dict(wanted)
    for key, value in wanted.items():
        if isinstance(value, _TensorDescription):
            old = mine.get(key)
            fits = isinstance(old, Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype)
            where = torch.device("cpu") if value.is_on_host else device
            prepared[key] = old if fits else torch.empty(value.shape, dtype=value.dtype, device=where)
    return prepared


def _adopt(optimizer: torch.optim.Optimizer, parameters: list[Tensor], values: list[dict[str, Any]]) -> None:
    for parameter, state in zip(parameters, values, strict=False):
        if state:
            optimizer.state[parameter] = state
        else:
            # Optimizers initialise what is absent; an empty entry would look initialised to some.
            optimizer.state.pop(parameter, None)
    for group, options in zip(optimizer.param_groups, values[len(parameters) :], strict=True):
        group.update(options)


def _described_tensors(wanted: Iterable[Mapping[str, Any]]) -> list[tuple[int, str]]:
    return [
        (i, key)
        for i, values in enumerate(wanted)
        for key, value in values.items()
        if isinstance(value, _TensorDescription)
    ]


def _sparse_parameters(model: torch.nn.Module | None) -> set[int]:
    modules = () if model is None else model.modules()
    return {id(module.weight) for module in modules if getattr(module, "sparse", False) is True}


def _add_zero_gradients(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _named_values(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return list(params.items())
    # A tensor is iterable too: its rows would travel one by one.
    listed = [] if isinstance(params, Tensor) else list(params)
    pairs = [(None, entry) if isinstance(entry, Tensor) else entry for entry in listed]
    if isinstance(params, Tensor) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "params must be model.state_dict(), model.named_parameters() or a list of tensors such as "
            f"list(model.parameters()), not {type(params).__name__}"
        )
    return [(f"unnamed.{i}" if name is None else name, value) for i, (name, value) in enumerate(pairs)]
