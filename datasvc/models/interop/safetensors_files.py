"""Reads and writes safetensors files, and the folder of an export in this format.

Files are read block by block and written in groups of tensors, so a file is never held in memory as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from datasvc import durable
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.safetensors_header import PlacedTensor, encode_header, parse_object, read_header
from datasvc.models.interop.state import (
    ForeignState,
    ForeignTensor,
    bytes_of,
    check_inside,
    flat_skeleton,
    read_block,
)
from datasvc.models.restoring.fit import TensorSpec
from datasvc.models.tensors.chunks import Shape, plan_chunks
from datasvc.models.tensors.container_types import join_types, split_types
from datasvc.models.tensors.tensor_table import ITEM_BYTES
from datasvc.sizes import group_by_size

if TYPE_CHECKING:
    import torch

SUFFIX: Final = ".safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
TENSORS_FILE, STATE_FILE, ENTRY_FILE = "tensors.safetensors", "state.json", "entry.json"
TYPES_FILE: Final = "state_types.json"
CHECKPOINT_FILES: Final = (TENSORS_FILE, STATE_FILE, TYPES_FILE, ENTRY_FILE)
# Limit for untrusted JSON files, which are read into memory as a whole.
_MAX_JSON_BYTES: Final = 32 << 20
GROUP_BYTES: Final = 256 << 20  # size of the tensors that a write has in memory at a time
_METADATA: Final = {"format": "pt"}  # "pt" stands for PyTorch


def read_safetensors(path: Path) -> ForeignState:
    """Return the tensors of a safetensors file.

    Raises:
        CorruptDataError, ConfigError: see `read_header`.
        OSError: the file cannot be read.
    """
    return ForeignState("safetensors", _read_tensors(path))


def read_safetensors_folder(folder: Path) -> ForeignState:
    """Return the model in a folder with one safetensors file, with its state tree if `models export` wrote it.

    Raises:
        CorruptDataError: a header is not valid, see `read_header`.
        ConfigError: a dtype is not supported, or the folder has several files.
        OSError: a file cannot be read.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix == SUFFIX and file.is_file())
    if len(files) != 1:
        raise ConfigError(
            f"{folder} has {len(files)} safetensors files and no {INDEX_FILE}; give the path of the file to import"
        )
    tensors = _read_tensors(check_inside(folder, files[0]))
    if files[0].name != TENSORS_FILE:
        return ForeignState("huggingface", tensors, weight_files=(files[0].name,))
    # The name of the file shows that `models export` wrote this folder. The state tree is in another file; without
    # that file, the state is a dict of tensors by name.
    state_file = folder / STATE_FILE
    if state_file.exists():
        return ForeignState("safetensors", tensors, _read_state(folder))
    return ForeignState("safetensors", tensors, flat_skeleton({tensor.name: tensor.name for tensor in tensors}))


def write_safetensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    load: Callable[[Sequence[str]], Mapping[str, torch.Tensor]],
    *,
    group_bytes: int = GROUP_BYTES,
) -> None:
    """Write tensors to a file, atomically.

    `load` loads tensors by name. It is called for one group of tensors after another, so that only one group is in
    memory. A group has at most `group_bytes`, or is one larger tensor.

    Raises:
        ConfigError: safetensors does not support the dtype of a tensor.
        OSError: the file cannot be written.
    """
    # Order by element size, largest first, so that every tensor is aligned to the size of its elements.
    names = sorted(specs, key=lambda name: (-ITEM_BYTES[specs[name].dtype], name))
    header = encode_header(((name, specs[name].dtype, specs[name].shape) for name in names), _METADATA)
    with durable.replacing(path) as file:
        file.write(header)
        for group in group_by_size(names, lambda name: specs[name].nbytes, group_bytes):
            loaded = load(group)
            for name in group:
                if loaded[name].numel():
                    file.write(bytes_of(loaded[name].contiguous()))


def write_checkpoint(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    load: Callable[[Sequence[str]], Mapping[str, torch.Tensor]],
    skeleton: Any | None,
    entry: Mapping[str, Any],
) -> None:
    """Write the tensors, the state and the entry of a version, in the form that `read_safetensors_folder` reads.

    If `skeleton` is None, no `state.json` is written. For other arguments and errors, see `write_safetensors`.
    """
    write_safetensors(folder / TENSORS_FILE, specs, load)
    if skeleton is not None:
        tree, types = split_types(skeleton)
        _write_json(folder / STATE_FILE, tree)
        if types:
            _write_json(folder / TYPES_FILE, {"types": types})
    _write_json(folder / ENTRY_FILE, dict(entry))


def write_index(folder: Path, files: Mapping[str, Iterable[str]], total_bytes: int) -> None:
    """Write the index of a folder in Hugging Face's layout; `files` has the names of the tensors by file name."""
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / INDEX_FILE, index)


def _read_state(folder: Path) -> Any:
    """Return the skeleton of the state tree in a folder that `write_checkpoint` wrote."""
    tree = _read_json(folder / STATE_FILE)
    types_file = folder / TYPES_FILE
    if not types_file.exists():
        return tree
    try:
        return join_types(tree, _read_json(types_file)["types"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"{types_file} does not fit {STATE_FILE}: {error!r}") from error


def _write_json(path: Path, value: Any) -> None:
    durable.write_file(path, (json.dumps(value, indent=2) + "\n").encode())


def _read_json(path: Path) -> dict[str, Any]:
    check_inside(path.parent, path)
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise CorruptDataError(f"{path} has {path.stat().st_size} bytes; at most {_MAX_JSON_BYTES} are supported")
    return parse_object(path.read_bytes(), str(path))


def _read_tensors(path: Path) -> list[ForeignTensor]:
    """Return the tensors in the header of a file; their values are read later, block by block."""
    return [
        ForeignTensor(placed.name, placed.dtype, placed.shape, _block_reader(path, placed))
        for placed in read_header(path)
    ]


def _block_reader(path: Path, placed: PlacedTensor) -> Callable[[], Iterator[tuple[Shape, torch.Tensor]]]:
    """Return the function `blocks` of a `ForeignTensor`."""

    def blocks() -> Iterator[tuple[Shape, torch.Tensor]]:
        # Do not use the package safetensors, which maps the file. If another process truncates the file, an ordinary
        # read raises an error, but an access to a mapped page would kill this process with SIGBUS.
        with path.open("rb", buffering=0) as file:
            file.seek(placed.offset)
            for start, shape in plan_chunks(placed.shape, ITEM_BYTES[placed.dtype]):
                yield start, read_block(file, placed.dtype, shape, f"{path}: tensor {placed.name!r}")

    return blocks
