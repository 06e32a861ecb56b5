"""JAX: batches of a loader as device arrays, also global ones, and pytrees as states of model versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from datasvc.errors import ConfigError, StateMismatchError
from datasvc.extras import explain_missing
from datasvc.loaders import DataRanks

with explain_missing("datasvc.integrations.jax"):
    import jax
    import torch

__all__ = ["batches", "from_state", "ranks", "to_state"]


def ranks() -> DataRanks:
    """Return this process and the number of processes of JAX, for the `ranks=` of a loader.

    A loader without `ranks=` takes them too, once `jax.distributed` is initialised.
    """
    return DataRanks(jax.process_index(), jax.process_count())


def batches(loader: Any, sharding: Any = None, *, transform: Callable[[Any], Any] = tuple) -> Iterator[Any]:
    """Yield the remaining batches of the loader's epoch as pytrees of `jax.Array`.

    The state of the loader has the position after the batch that was yielded last.

    Args:
        loader: loader of datasvc with `numpy()`, on the CPU; with several processes, created after
            `jax.distributed.initialize()`.
        sharding: sharding of the arrays, such as `NamedSharding(mesh, PartitionSpec("data"))`: each process gives its
            part of the global batch. None: arrays on the default device of this process.
        transform: makes a pytree of NumPy arrays from a batch; by default `(inputs, labels)`.

    Raises:
        ConfigError: see `numpy()` of the loader.
        ValueError: `sharding` cannot divide the batch.
    """
    for batch in loader.numpy():
        tree = transform(batch)
        if sharding is None:
            # A copy: on the CPU, JAX may use the memory of an array, which the loader uses again.
            yield jax.tree.map(lambda array: jax.device_put(np.array(array)), tree)
        else:
            yield jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, np.array(array)), tree)


def to_state(tree: Any) -> dict[str, torch.Tensor]:
    """Return the leaves of a pytree by their paths, as a part of the state that a manager saves.

    Leaves are copied to the CPU. Keys of `jax.random.key` are stored as their numbers.

    Raises:
        ConfigError: a leaf is no number and no array, or another process has a part of it.
    """
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {_name(path): _to_tensor(_name(path), leaf) for path, leaf in leaves}


def from_state(state: dict[str, Any], like: Any) -> Any:
    """Return a pytree like `like` with the leaves of a `to_state` result.

    Args:
        state: part of a restored version, such as `found.state["params"]`.
        like: pytree of arrays with the structure, the shapes, the types and the shardings to restore.

    Raises:
        StateMismatchError: the leaves have other paths, shapes or types than those of `like`.
    """
    leaves, structure = jax.tree.flatten_with_path(like)
    named = {_name(path): leaf for path, leaf in leaves}
    wrong = [f"{name} is missing" for name in named if name not in state]
    wrong += [f"{name} is unexpected" for name in state if name not in named]
    for name in named.keys() & state.keys():
        (dtype, shape), found = _outline(name, named[name]), torch.as_tensor(state[name], device="cpu")
        if (dtype, shape) != (found.dtype, tuple(found.shape)):
            wrong.append(f"{name} is {found.dtype}{list(found.shape)}, expected {dtype}{list(shape)}")
    if wrong:
        raise StateMismatchError("the version has another pytree: " + "; ".join(sorted(wrong)[:10]))
    return jax.tree.unflatten(structure, [_from_tensor(state[name], leaf) for name, leaf in named.items()])


def _name(path: Any) -> str:
    return str(jax.tree_util.keystr(path, simple=True, separator="/"))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _outline(name: str, leaf: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the type and the shape that a leaf has as a tensor; its values, of which others may have some, stay."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    elif not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
    return _to_tensor(name, np.empty(0, leaf.dtype)).dtype, tuple(leaf.shape)


def _to_tensor(name: str, leaf: Any) -> torch.Tensor:
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if not leaf.is_fully_replicated:
            raise ConfigError(
                f"{name} has parts on other processes; gather it first, with jax.experimental.multihost_utils"
                ".process_allgather"
            )
        leaf = leaf.addressable_data(0)
    array = np.array(leaf)
    if array.dtype == jax.numpy.bfloat16:  # NumPy has no such type, and torch does not take that of JAX
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ConfigError(
            f"{name} is {type(leaf).__name__} {array.dtype}, which no version can have: {error}"
        ) from error


def _from_tensor(tensor: Any, like: Any) -> Any:
    """Return a leaf with the type and the sharding of `like`."""
    tensor = torch.as_tensor(tensor, device="cpu")
    if tensor.dtype == torch.bfloat16:
        array = tensor.view(torch.uint16).numpy().view(jax.numpy.bfloat16)
    else:
        array = tensor.numpy()
    if _is_key(like):
        return jax.device_put(jax.random.wrap_key_data(array, impl=jax.random.key_impl(like)), like.sharding)
    if isinstance(like, jax.Array):
        return jax.device_put(array, like.sharding)
    return array if isinstance(like, np.ndarray) else type(like)(array.item())
