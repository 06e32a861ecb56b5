"""What a reader of foreign files gives: tensors that are read block by block, and the tree that they hang in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from datasvc.errors import CorruptDataError
from datasvc.models.tensors.chunks import Shape

if TYPE_CHECKING:
    import torch

_MAX_NAME_BYTES = 4096


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor in a file of another format.

    Attributes:
        name: as the file says it.
        dtype: torch's name of it.
        shape: sizes.
        blocks: reads it: yields first element and values of blocks that tile it, a few MiB each where the format
            allows. Raises CorruptDataError, OSError.
    """

    name: str
    dtype: str
    shape: Shape
    blocks: Callable[[], Iterator[tuple[Shape, torch.Tensor]]]


@dataclass(frozen=True)
class ForeignState:
    """A model or a whole checkpoint in another format.

    Attributes:
        format: "safetensors", "huggingface", "torch" or "dcp".
        tensors: by name, as the format lists them.
        skeleton: the state tree as returned by `state_tree.flatten`, with the same tensor names; None for a
            plain state dict.
        config: JSON values that came along.
        files: that came along, their bytes as they are, by name.
        ignored: names of tensors that are there and do not belong to it.
    """

    format: str
    tensors: Sequence[ForeignTensor]
    skeleton: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def check_tensor_name(name: object, location: str) -> str:
    """Return `name` where a tensor may have it. Raises CorruptDataError."""
    try:
        if isinstance(name, str) and 0 < len(name.encode()) <= _MAX_NAME_BYTES:
            return name
    except UnicodeEncodeError:
        pass
    raise CorruptDataError(f"{location}: {str(name)[:60]!r} cannot name a tensor")


def flat_skeleton(names: Mapping[str, str]) -> Any:
    """Return the skeleton of a dict whose keys hold the tensors of these names."""
    return dict_skeleton({key: {"$tensor": name} for key, name in names.items()})


def dict_skeleton(parts: Mapping[str, Any]) -> Any:
    """Return the skeleton of a dict from those of its values. Keys that look like marks are written as such."""
    if any(key.startswith("$") for key in parts):
        return {"$dict": [[key, part] for key, part in parts.items()]}
    return dict(parts)
