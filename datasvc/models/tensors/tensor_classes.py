"""Classes of tensors: the memory behind a tensor, the part of a DTensor that a rank has, the tensors in a wrapper.

A wrapper, such as a quantised weight, is a tensor without memory of its own: its values are in other tensors, its
*inner tensors*. Its address is 0, so an address tells nothing of its elements. A class with torch's methods
`__tensor_flatten__` and `__tensor_unflatten__` names its inner tensors, and can be made again from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datasvc.errors import ConfigError
from datasvc.models.tensors.chunks import Box

if TYPE_CHECKING:
    import torch

_OTHER_MODULES = ("torch.nested", "torch.distributed", "torch._subclasses")


def is_plain(value: Any) -> bool:
    """Return whether a value is of one of torch's two plain classes of tensors."""
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which a rank may hold only a part."""
    # A DTensor has this attribute, so its class need not be imported. The check of the class is faster.
    import torch

    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "placements")


def local_part(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Box | None]:
    """Return the part of a tensor that this rank holds, without gradient, and its box in the whole tensor.

    Of a tensor that is not a DTensor, the part is the whole tensor. The box is None if the part has no elements, for
    example on a rank outside of the tensor's mesh. No communication takes place.

    Raises:
        ConfigError: the tensor has partial placements, so that no rank has its values; the message has `name`.
    """
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return tensor.detach(), ((0,) * len(shape), shape) if tensor.numel() else None
    distributed: Any = tensor
    if any(placement.is_partial() for placement in distributed.placements):
        raise ConfigError(
            f"tensor {name!r} has the placements {distributed.placements}: each rank has only a summand of its "
            "values; redistribute it to Shard or Replicate first"
        )
    local = distributed.detach().to_local()
    if distributed.device_mesh.get_coordinate() is None or not local.numel():
        return local, None
    # `torch.distributed.checkpoint` asks a DTensor for its parts by this method.
    (chunk,) = distributed.__create_chunk_list__()
    return local, (tuple(chunk.offsets), tuple(chunk.sizes))


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are in memory of its own, at its address; true for an empty tensor."""
    try:
        return tensor.untyped_storage().data_ptr() != 0 or not tensor.numel()
    except (RuntimeError, ValueError):  # a wrapper, a sparse layout, or a parameter without a shape
        return False


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a key that is equal only for tensors with the same elements of the same memory; None without memory."""
    if tensor.is_nested or is_sharded(tensor) or not has_memory(tensor) or not tensor.numel():
        return None
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    return (*place, tensor.is_conj(), tensor.is_neg())


def inner_tensors(tensor: Any) -> dict[str, torch.Tensor] | None:
    """Return the inner tensors of a wrapper that can be made again, by attribute; None for any other value."""
    if not _is_rebuilt(type(tensor)):
        return None
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def described_subclass(tensor: Any) -> tuple[dict[str, Any], tuple[Any, ...]] | None:
    """Return the values that make a wrapper again, and the names of its class, its size and its strides."""
    inner = inner_tensors(tensor)
    if inner is None:
        return None
    _, context = tensor.__tensor_flatten__()
    kind = type(tensor)
    plain = {"inner": inner, "context": context}
    return plain, (kind.__module__, kind.__qualname__, list(tensor.shape), list(tensor.stride()))


def make_subclass(plain: Any, kind: type | None, name: str, size: list[int], stride: list[int]) -> Any:
    """Return a tensor of the class `kind`, called `name`; `plain` itself if its inner tensors are not read.

    Raises:
        ConfigError: the class is not imported, or it does not accept the values.
        ValueError, TypeError, KeyError: `plain` is not from `described_subclass`.
    """
    import torch

    if type(plain) is not dict or type(plain["inner"]) is not dict:
        raise TypeError("the inner tensors are not a dict")
    if not all(isinstance(inner, torch.Tensor) for inner in plain["inner"].values()):
        return plain  # placeholders of a plan
    if kind is None or not _is_rebuilt(kind):
        raise ConfigError(
            f"the state has a tensor of the class {name}, which this program has not imported: import it before the "
            "restore, or restore its inner tensors by their names with only="
        )
    try:
        made: Any = kind
        return made.__tensor_unflatten__(plain["inner"], plain["context"], torch.Size(size), tuple(stride))
    except Exception as error:  # code of another package, which may raise anything
        raise ConfigError(f"{name} does not accept the stored values of a tensor of this class: {error!r}") from error


def _is_rebuilt(kind: type) -> bool:
    """Return whether tensors of a class are stored as their inner tensors."""
    import torch

    if not issubclass(kind, torch.Tensor) or not hasattr(kind, "__tensor_flatten__"):
        return False
    # These are parts of a state of several ranks, have sizes that are no numbers, or have no values.
    return hasattr(kind, "__tensor_unflatten__") and not kind.__module__.startswith(_OTHER_MODULES)
