"""Base class of the batches of all loaders: they unpack as `(inputs, labels)`, and can be moved to a device."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Generic, Self, SupportsIndex, TypeVar, cast

from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.loaders.core import pinned
from datasvc.loaders.core.sample_keys import BatchPlaces

if TYPE_CHECKING:
    import torch

    from datasvc.shards.versions.samples import Sample

A = TypeVar("A")


def check_gpu(device: str | int | torch.device) -> None:
    """Raise ConfigError if a device is a GPU that torch does not find."""
    with explain_missing("a loader with device="):
        import torch

    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    if torch.device(name).type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (torch.device(name).index or 0) < count:
        return
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        advice = "this torch is built without CUDA: install one with CUDA, or use device 'cpu'"
    elif not count:
        advice = "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device 'cpu'"
    else:
        advice = f"use 'cuda:{count - 1}' or a lower number, or device 'cpu'"
    raise ConfigError(f"device is {name!r}, and torch finds {count or 'no'} GPU{'s' * (count != 1)} here; {advice}")


class Batch(ABC, Generic[A]):
    """Base of dataclasses of arrays or tensors, which can be unpacked and indexed like the tuple `(inputs, labels)`.

    `len(batch)` is therefore 2, as for a pair from torch's `DataLoader`; the number of samples is
    `len(batch.positions)`. `A` is the type of inputs and labels: a torch tensor or a NumPy array. Without labels in
    the data, the second element is None. Only the type of the attribute says so: in most loops there are labels.

    Attributes:
        places: where the samples are stored; set by the loader.
    """

    places: BatchPlaces | None

    @property
    def keys(self) -> list[str]:
        """Key of each sample, also of padding.

        Only this property reads the sample indexes of the batch's shards, so a batch costs nothing more without it.

        Raises:
            ConfigError: no loader of datasvc made the batch.
            CorruptDataError, NotFoundError, UnavailableError: a sample index cannot be read.
        """
        return self._known_places.keys()

    def sample(self, index: int) -> Sample:
        """Return the stored sample, with all its columns and the encoded image, at an index of the batch.

        Raises:
            ConfigError: no loader of datasvc made the batch.
            CorruptDataError, NotFoundError, UnavailableError: the sample cannot be read.
        """
        return self._known_places.sample(index)

    @property
    def _known_places(self) -> BatchPlaces:
        if self.places is None:
            raise ConfigError(
                "this batch was not made by a loader of datasvc, so the places of its samples are unknown"
            )
        return self.places

    @property
    @abstractmethod
    def _pair(self) -> tuple[A, A | None]:
        """Inputs of the model, and labels or None."""

    def __iter__(self) -> Iterator[A]:
        return iter(cast("tuple[A, A]", self._pair))

    def __len__(self) -> int:
        return len(self._pair)

    def __getitem__(self, index: SupportsIndex) -> A:
        if not hasattr(index, "__index__") and not isinstance(index, slice):
            names = ", ".join(vars(self))
            raise TypeError(f"a batch is a pair (inputs, labels), which has no {index!r}; its attributes are {names}")
        return cast("tuple[A, A]", self._pair)[index]

    def __repr__(self) -> str:
        shapes = [f"{name} {list(value.shape)}" for name, value in vars(self).items() if hasattr(value, "shape")]
        return f"{type(self).__name__}({', '.join(shapes)})"

    def to(self, device: str | int | torch.device, *, non_blocking: bool = False) -> Self:
        """Return the batch with all tensors on a device; NumPy arrays and other values are unchanged.

        Args:
            device: any device that `torch.Tensor.to` accepts.
            non_blocking: whether a copy from page-locked memory may run asynchronously.

        Raises:
            ConfigError: `device` is a GPU that torch does not find.
        """
        try:
            return self._change(methodcaller("to", device, non_blocking=non_blocking))
        except (AssertionError, RuntimeError):  # torch's errors for a GPU that is not there
            check_gpu(device)
            raise

    def pin_memory(self) -> Self:
        """Return the batch with all tensors in page-locked memory; unchanged if torch finds no GPU."""
        return self._change(methodcaller("pin_memory")) if pinned.can_pin() else self

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the batch with `change` applied to each tensor, also to those in mappings."""
        import torch

        def convert(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: convert(element) for name, element in value.items()}
            return change(value) if isinstance(value, torch.Tensor) else value

        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every batch is a dataclass
        changed = {field.name: convert(getattr(self, field.name)) for field in fields}
        return dataclasses.replace(self, **changed)  # type: ignore[type-var]  # every batch is a dataclass


def register_tree(kind: type[Batch[Any]]) -> None:
    """Register a class of batches as a pytree of torch, whose leaves are the tensors. This imports torch."""
    from torch.utils import _pytree

    if kind not in _pytree.SUPPORTED_NODES:
        name = f"{kind.__module__}.{kind.__qualname__}"
        _pytree.register_pytree_node(kind, _flatten, _unflatten, serialized_type_name=name)


@dataclass(frozen=True, eq=False)
class _Structure:
    """What of a batch is no tensor. Structures are equal if their tensors have equal names."""

    batch: Batch[Any]
    names: tuple[tuple[str, ...], ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)


def _flatten(batch: Batch[Any]) -> tuple[list[Any], _Structure]:
    import torch

    tensors: dict[tuple[str, ...], Any] = {}
    rest: dict[str, Any] = {}  # without the tensors, whose memory a structure must not hold
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            tensors[name,], rest[name] = value, None
        elif isinstance(value, Mapping):
            inner = {key: each for key, each in value.items() if isinstance(each, torch.Tensor)}
            tensors |= {(name, key): each for key, each in inner.items()}
            rest[name] = {key: each for key, each in value.items() if key not in inner}
    return list(tensors.values()), _Structure(dataclasses.replace(batch, **rest), tuple(tensors))  # type: ignore[type-var]


def _unflatten(leaves: Iterable[Any], structure: _Structure) -> Batch[Any]:
    changed: dict[str, Any] = {}
    for (name, *keys), leaf in zip(structure.names, leaves, strict=True):
        if keys:
            changed.setdefault(name, dict(getattr(structure.batch, name)))[keys[0]] = leaf
        else:
            changed[name] = leaf
    return dataclasses.replace(structure.batch, **changed)  # type: ignore[type-var]  # every batch is a dataclass
