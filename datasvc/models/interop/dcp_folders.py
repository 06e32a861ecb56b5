"""Read folders of torch's distributed checkpoint (DCP) without executing their pickles; write them with torch.

A folder has a pickle with metadata, and files with blocks of tensors and other values. The folder is not trusted: all
names, shapes and byte ranges in the metadata are checked before a tensor is read.
"""

from __future__ import annotations

import errno
import itertools
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.state import ForeignState, ForeignTensor, check_file_name, check_inside, check_tensor_name
from datasvc.models.interop.torch_reader import MAX_NODES, Extent, TorchReader, check_shared_bytes
from datasvc.models.restoring.fit import TensorSpec
from datasvc.models.tensors.chunks import Shape, is_tiling
from datasvc.models.tensors.state_tree import flatten, unflatten

if TYPE_CHECKING:
    import torch

METADATA_FILE: Final = ".metadata"
# Limits for untrusted metadata.
_MAX_DIMENSIONS: Final = 64
_MAX_PATH_KEYS: Final = 100

BlockKey = tuple[str, Shape | None]
"""Name of a tensor and first index of one of its blocks; (name, None) for a value that is not a tensor."""


def read_dcp_folder(folder: Path, memory_bytes: int) -> ForeignState:
    """Return the state in a folder that any number of ranks wrote. For `memory_bytes` see `TorchReader`.

    Raises:
        ConfigError: the metadata or a value refers to a class that is not allowed, or an extension of DCP has
            transformed the bytes.
        CorruptDataError: a file is damaged, or the files and the metadata contradict each other.
        OSError: a file cannot be read.
    """
    location = str(folder / METADATA_FILE)
    reader = TorchReader(memory_bytes)
    metadata = reader.read_dcp_metadata(check_inside(folder, folder / METADATA_FILE))
    # The elements of `metadata` were not checked. The errors that invalid elements cause are converted below.
    try:
        extents = _read_extents(folder, metadata["extents"])
        items: dict[str, Any] = {}
        for name, description in metadata["items"]:
            item_name = check_tensor_name(name, location)
            if description is None:
                items[item_name] = _read_value(reader, extents[name, None])
            else:
                items[item_name] = _make_tensor(reader, name, description, extents)
        tree = build_tree(items, {name: tuple(path) for name, path in metadata["paths"]}, location)
        skeleton, tensors = _flatten(tree)
    except ConfigError:
        raise  # not converted below, although it is a ValueError
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise CorruptDataError(f"{location} is not valid DCP metadata: {type(error).__name__}: {error}") from error
    check_shared_bytes(tensors, sum(extent.length for extent in extents.values()), location)
    # A flat dict of tensors needs no skeleton: the names describe the whole tree.
    is_bare = tree == items and all(isinstance(item, ForeignTensor) for item in items.values())
    return ForeignState("dcp", tensors, None if is_bare else skeleton)


def write_dcp_folder(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state tree into an empty folder with torch's own writer.

    Raises:
        ConfigError: DCP does not support this tree, for example one with both a key "a.b" and a key "b" in "a".
        OSError: the folder cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with warnings.catch_warnings():
        # torch warns if a single process saves, but here it does so on purpose.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(dict(state), storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise _error_of_save(error) from None
        except ValueError as error:
            raise ConfigError(f"this state cannot be written as DCP: {error}") from error


def _error_of_save(error: BaseException) -> BaseException:
    """Return the exception to raise for a failed save.

    torch wraps the cause in a `CheckpointException`, which does not derive from `Exception`.
    """
    causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
    for cause in causes:
        reason: BaseException | None = cause
        # Find the disk error, or the interrupt such as Ctrl-C, that led to this error.
        while reason is not None:
            if isinstance(reason, OSError) or not isinstance(reason, Exception):
                return reason
            reason = reason.__context__
        if "inline_container" in str(cause):  # torch's archive writer, which does not report why a write failed
            return OSError(errno.EIO, f"torch could not write, the disk may be full: {cause}")
    details = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes) or str(error)
    return ConfigError(f"this state cannot be written as DCP: {details}")


def _read_value(reader: TorchReader, extent: Extent) -> Any:
    """Return a value that is not a tensor, with a `ForeignTensor` for each tensor in it."""
    state = reader.read_state(_checked_extent(extent))
    # `unflatten` only puts the tensors into the tree, so it accepts foreign ones.
    return unflatten(state.skeleton, {tensor.name: tensor for tensor in state.tensors})  # type: ignore[misc]


def _flatten(tree: Any) -> tuple[Any, list[ForeignTensor]]:
    """Return the skeleton of a tree of tensors that are not loaded yet, and the tensors, named as in it."""
    import torch
    from torch.utils import _pytree as pytree

    foreign: dict[int, ForeignTensor] = {}
    placeholders: list[torch.Tensor] = []  # keeps a reference to each placeholder, so that its id stays unique

    def to_placeholder(value: Any) -> Any:
        if not isinstance(value, ForeignTensor):
            return value
        placeholders.append(
            torch.empty(0, dtype=torch.float32, device="cpu")
        )  # because `flatten` needs a loaded tensor
        foreign[id(placeholders[-1])] = value
        return placeholders[-1]

    skeleton, leaves = flatten(pytree.tree_map(to_placeholder, tree), max_nodes=MAX_NODES)
    return skeleton, [replace(foreign[id(leaf)], name=name) for name, leaf in leaves.items()]


def _read_extents(folder: Path, described: Iterable[Sequence[Any]]) -> dict[BlockKey, Extent]:
    """Return the byte range of every block of a tensor, and of every other value, from "extents" of the metadata."""
    extents: dict[BlockKey, Extent] = {}
    for name, block_start, file, offset, length, is_transformed in described:
        if is_transformed:
            raise ConfigError(f"{folder}: {name!r} was transformed by an extension of DCP; save it without one")
        path = check_file_name(folder, file, listed_in=METADATA_FILE)
        if not all(type(number) is int and number >= 0 for number in (offset, length)):
            raise CorruptDataError(
                f"{folder / METADATA_FILE}: {name!r} has the offset {offset!r} and length {length!r}; expected "
                "integers of 0 or more"
            )
        if block_start is None:
            extents[name, None] = Extent(path, offset, length, f"value {name!r} in {path}")
        else:
            block = Extent(path, offset, length, f"a block of tensor {name!r} in {path}")
            extents[name, _checked_shape(block_start)] = block
    _check_no_overlap(extents.values())
    return extents


def _checked_extent(extent: Extent) -> Extent:
    """Return `extent` if its file has these bytes, otherwise raise CorruptDataError or OSError."""
    if extent.offset + extent.length > extent.path.stat().st_size:
        raise CorruptDataError(
            f"{extent.location}: the file is truncated, it should have {extent.offset + extent.length} bytes or more"
        )
    return extent


def _check_no_overlap(extents: Iterable[Extent]) -> None:
    """Raise CorruptDataError if two ranges overlap: the same bytes under many names could fill the memory."""
    ordered = sorted(extents, key=lambda extent: (extent.path, extent.offset, extent.length))
    for extent, following in itertools.pairwise(ordered):
        if extent.path == following.path and extent.offset + extent.length > following.offset:
            raise CorruptDataError(f"{extent.path}: two values overlap at byte {following.offset}")


def _make_tensor(
    reader: TorchReader, name: str, description: Sequence[Any], extents: Mapping[BlockKey, Extent]
) -> ForeignTensor:
    """Return a tensor whose blocks are read from their byte ranges; `description` has dtype, shape and blocks."""
    dtype, shape = description[0], _checked_shape(description[1])
    blocks = [(_checked_shape(start), _checked_shape(size)) for start, size in description[2]]
    # An empty block covers no element, and torch may have stored nothing for it.
    blocks = [(start, size) for start, size in blocks if 0 not in size]
    if not is_tiling(shape, blocks):
        raise ValueError(f"the blocks of tensor {name!r} do not cover each element exactly once")
    stored_blocks = [(start, TensorSpec(dtype, size), extents[name, start]) for start, size in blocks]

    def read() -> Iterator[tuple[Shape, torch.Tensor]]:
        for start, spec, extent in stored_blocks:
            tensors = reader.read_state(_checked_extent(extent)).tensors
            # The bytes of a block must be one tensor with all its elements, as described in the metadata.
            found_specs = [TensorSpec(tensor.dtype, tensor.shape) for tensor in tensors]
            if found_specs != [spec] or spec.nbytes > extent.length:
                raise CorruptDataError(f"{extent.location} is not {spec}, as the metadata describes it")
            for inner_start, values in tensors[0].blocks():
                yield tuple(map(operator.add, start, inner_start)), values

    return ForeignTensor(name, dtype, shape, read)


def _checked_shape(values: object) -> Shape:
    """Return a shape or first index as a tuple, or raise ValueError if it is not valid."""
    if not isinstance(values, list) or len(values) > _MAX_DIMENSIONS:
        raise ValueError(f"a shape is not a list of at most {_MAX_DIMENSIONS} sizes")
    if not all(type(number) is int and 0 <= number < 1 << 60 for number in values):
        raise ValueError("a size is not an integer from 0 to 2**60")
    return tuple(values)


class _Node(dict[Any, Any]):
    """An inner node of the tree under construction, which becomes a dict or a list."""


def build_tree(items: Mapping[str, Any], paths: Mapping[str, Any], location: str) -> Any:
    """Build the state tree from values and paths, both by name; a name without a path becomes a key of the root.

    Raises:
        CorruptDataError: a path is empty or too long, leads into a value, or is that of another value.
        TypeError: a key cannot be the key of a dict.
    """
    root = _Node()
    for name, value in items.items():
        path = paths.get(name, (name,))
        if not 0 < len(path) <= _MAX_PATH_KEYS:
            raise CorruptDataError(f"{location}: {name!r} has no valid path in the state")
        node: Any = root
        for key in path[:-1]:
            # A stored value may be a dict too, but no path may lead into it.
            node = node.setdefault(key, _Node()) if isinstance(node, _Node) else None
        if not isinstance(node, _Node) or path[-1] in node:
            raise CorruptDataError(f"{location}: two values have the same path in the state, {name!r} is one of them")
        node[path[-1]] = value
    return _lists_of_nodes(root)


def _lists_of_nodes(value: Any) -> Any:
    """Convert nodes whose keys are 0, 1, 2, ... to lists, and other nodes to dicts."""
    if not isinstance(value, _Node):
        return value
    node = {key: _lists_of_nodes(child) for key, child in value.items()}
    if node and all(type(key) is int for key in node) and node.keys() == set(range(len(node))):
        return [node[index] for index in range(len(node))]
    return node
