"""Defines the result of reading a model in another file format: a state tree, and tensors to read block by block.

Each reader of a format returns a `ForeignState`, and `importing` stores it. The files are not trusted, so this module
also checks the names in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from datasvc.durable import is_plain_name, target_outside
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.tensors.chunks import Shape
from datasvc.models.tensors.state_tree import dict_skeleton
from datasvc.models.tensors.tensor_table import ITEM_BYTES

if TYPE_CHECKING:
    import torch

_MAX_NAME_BYTES = 4096


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor in a file of another format.

    Attributes:
        name: name in the file.
        dtype: torch's name of the dtype, such as "float32".
        shape: sizes of its dimensions.
        blocks: function that reads the tensor. It yields blocks that tile the tensor, as pairs (first index, values).
            A block has a few MiB if the format allows it. It raises CorruptDataError or OSError.
    """

    name: str
    dtype: str
    shape: Shape
    blocks: Callable[[], Iterator[tuple[Shape, torch.Tensor]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in memory; 0 for a dtype that cannot be stored."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 0)


@dataclass(frozen=True)
class ForeignState:
    """A model or a whole checkpoint in another format.

    Attributes:
        format: "safetensors", "huggingface", "torch" or "dcp".
        tensors: tensors, in the order of the format.
        skeleton: skeleton of the state, with the same names, see `state_tree.flatten`; None for a plain state dict.
        config: configuration that was stored with the model, as JSON values.
        files: other files that were stored with the model: unchanged bytes by file name.
        ignored: names of tensors that are in the files, but do not belong to the model.
        left_out: names of files of the folder that are neither weights of the model nor in `files`.
        refused: values that cannot be stored, by path: what they are.
        weight_files: names of the files of the folder that hold `tensors`.
    """

    format: str
    tensors: Sequence[ForeignTensor]
    skeleton: Any = None
    refused: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    weight_files: tuple[str, ...] = ()


def check_kept(refused: Mapping[str, str], location: str) -> None:
    """Raise ConfigError if values cannot be stored: `refused` says by path what they are."""
    if refused:
        path, what = next(iter(refused.items()))
        more = f" (and {len(refused) - 1} more such values)" if len(refused) > 1 else ""
        plain = "save plain values, such as model.state_dict(), and import that"
        if path == "(root)":  # the whole file: nothing can be left out
            raise ConfigError(f"{location} is a {what}, so it is refused. Load it where its class is, {plain}")
        raise ConfigError(
            f"{location} holds {what}, so it is refused: {path}{more}. Leave it out (--exclude {path}, in Python "
            f"exclude=), import a part (--only, only=), or {plain}"
        )


def check_tensor_name(name: object, location: str) -> str:
    """Return `name` if it is a text of 1 to 4096 bytes in UTF-8, otherwise raise CorruptDataError."""
    try:
        if isinstance(name, str) and 0 < len(name.encode()) <= _MAX_NAME_BYTES:
            return name
    except UnicodeEncodeError:
        pass
    raise CorruptDataError(
        f"{location}: {str(name)[:60]!r} is not a valid name of a tensor; expected a text of "
        f"1 to {_MAX_NAME_BYTES} bytes"
    )


def check_file_name(folder: Path, name: object, *, listed_in: str, suffix: str = "") -> Path:
    """Return the path of the file `name`, to which the file `listed_in` of the same untrusted folder refers.

    Raises:
        CorruptDataError: `name` is not the name of a file in this folder, or does not end with `suffix`.
        ConfigError: see `check_inside`.
    """
    if not isinstance(name, str) or not name.endswith(suffix) or not is_plain_name(name):
        kind = f"{suffix} file".strip()
        raise CorruptDataError(
            f"{folder / listed_in} refers to {str(name)[:80]!r}; expected the name of a {kind} in the same folder"
        )
    return check_inside(folder, folder / name)


def check_inside(folder: Path, path: Path) -> Path:
    """Return `path`, a file of an untrusted folder; raise ConfigError if it is a link out, or no regular file."""
    if (target := target_outside(folder, path)) is not None:
        raise ConfigError(
            f"{path} is a link out of the folder, to {target}, so it is not read: the "
            "author of the folder may have chosen any file. If you trust it, copy the folder with the files (cp -rL)"
        )
    return check_regular(path)


def check_regular(path: Path) -> Path:
    """Return `path`; raise ConfigError if it is a pipe, a socket, a device or a folder. A missing file passes."""
    # To open a pipe would wait for its writer without end, and some devices have no end.
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file; give another one, or remove it from its folder")
    return path


def flat_skeleton(names: Mapping[str, str]) -> Any:
    """Return the skeleton of a dict of tensors; `names` has the name of the tensor for each key of the dict."""
    return dict_skeleton({key: {"$tensor": name} for key, name in names.items()})


def read_block(file: IO[bytes], dtype: str, shape: Shape, location: str) -> torch.Tensor:
    """Read a block of a tensor at the current position of a file.

    Raises:
        CorruptDataError: the file ends inside the block.
        OSError: the file cannot be read.
    """
    import torch

    block = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    # `readinto` may read fewer bytes than requested, in particular from a pipe. Call it until the block is full.
    view, filled = bytes_of(block), 0
    while filled < view.nbytes:
        length = file.readinto(view[filled:])  # type: ignore[attr-defined] # every binary file has it
        if not length:
            raise CorruptDataError(f"{location} was truncated while it was read")
        filled += length
    return block


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor on the CPU."""
    import torch

    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view
