"""Read folders of torch's distributed checkpoint (DCP) without executing their pickles; write them with torch."""

from __future__ import annotations

import errno
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from datasvc.durable import is_plain_name
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.pickle import dcp_pickle as stored
from datasvc.models.interop.state import ForeignState, ForeignTensor, check_tensor_name
from datasvc.models.interop.torch_files import MAX_NODES, check_tensors, load_plain, of_tensor
from datasvc.models.restoring.fit import TensorSpec
from datasvc.models.restoring.load_into_module import spec_of
from datasvc.models.tensors.chunks import Shape, is_tiling
from datasvc.models.tensors.state_tree import flatten

if TYPE_CHECKING:
    import torch

METADATA_FILE: Final = ".metadata"
_MAX_DIMENSIONS: Final = 64
_MAX_STEPS: Final = 100

BlockKey = tuple[str, Shape | None]
"""Name of a tensor and first index of one of its blocks; (name, None) for a value that is not a tensor."""


@dataclass(frozen=True)
class Extent:
    """Byte range of a file in the folder: `length` bytes from `offset`."""

    path: Path
    offset: int
    length: int

    def load(self, what: str) -> Any:
        """Load the output of torch.save in this range; `what` names it in messages.

        Raises:
            ConfigError, CorruptDataError, OSError: see `load_plain`; or the file ends before the range.
        """
        if self.offset + self.length > self.path.stat().st_size:
            raise CorruptDataError(f"{self.path} is truncated: {what} should end at byte {self.offset + self.length}")
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return load_plain(file.read(self.length), f"{what} in {self.path}")


def read_dcp_folder(folder: Path) -> ForeignState:
    """Return the state in a folder that `torch.distributed.checkpoint` wrote with any number of ranks.

    Raises:
        ConfigError: the metadata or a value refers to a class that is not allowed, or an extension of DCP has
            transformed the bytes.
        CorruptDataError: a file is damaged, or the files and the metadata contradict each other.
        OSError: a file cannot be read.
    """
    location = str(folder / METADATA_FILE)
    metadata = stored.read_metadata(folder / METADATA_FILE)
    try:
        extents = _extents(folder, metadata.fields["storage_data"])
        items = _items(metadata.fields["state_dict_metadata"], extents, location)
        tree = build_tree(items, metadata.fields.get("planner_data") or {}, location)
        skeleton, tensors = _flatten(tree, sum(extent.length for extent in extents.values()), location)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise CorruptDataError(f"{location} is not valid DCP metadata: {type(error).__name__}: {error}") from error
    # A flat dict of tensors is a plain state dict, which needs no skeleton.
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
        # A single process saves here, on purpose.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(dict(state), storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise _failure(error) from None
        except ValueError as error:
            raise ConfigError(f"this state cannot be written as DCP: {error}") from error


def _failure(error: BaseException) -> BaseException:
    """Return the cause of a failed save; torch wraps it in an exception that is not an `Exception`."""
    causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
    for cause in causes:
        reason: BaseException | None = cause
        while reason is not None:
            if isinstance(reason, OSError) or not isinstance(reason, Exception):
                return reason
            reason = reason.__context__
        if "inline_container" in str(cause):  # torch's archive writer, which does not report why a write failed
            return OSError(errno.EIO, f"torch could not write, the disk may be full: {cause}")
    details = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes) or str(error)
    return ConfigError(f"this state cannot be written as DCP: {details}")


def _items(described: Mapping[Any, Any], extents: Mapping[BlockKey, Extent], location: str) -> dict[str, Any]:
    """Return all tensors, which are read later, and all other values, by flat name."""
    items: dict[str, Any] = {}
    for name, description in described.items():
        check_tensor_name(name, location)
        if isinstance(description, stored.TensorMetadata):
            items[name] = _tensor(name, description, extents, location)
        elif isinstance(description, stored.ValueMetadata):
            items[name] = extents[name, None].load(f"value {name!r}")
        else:
            raise CorruptDataError(f"{location}: {name!r} is neither a tensor nor a value")
    return items


def _flatten(tree: Any, size_bytes: int, location: str) -> tuple[Any, list[ForeignTensor]]:
    """Return the skeleton of a tree of foreign tensors, and the tensors with their names in it.

    `size_bytes` is the size of all values in the folder.
    """
    import torch

    foreign: dict[int, ForeignTensor] = {}
    kept: list[torch.Tensor] = []

    def stand_in(value: Any) -> Any:
        # Only the nodes from `build_tree` hold foreign tensors. A value that was read may contain itself, so it is
        # not searched.
        if isinstance(value, ForeignTensor):
            # `flatten` needs a tensor here. `kept` holds a reference, so that its id stays unique.
            kept.append(torch.empty(0))
            foreign[id(kept[-1])] = value
            return kept[-1]
        if isinstance(value, _List):
            return [stand_in(child) for child in value]
        return {key: stand_in(child) for key, child in value.items()} if isinstance(value, _Node) else value

    skeleton, leaves = flatten(stand_in(tree), max_nodes=MAX_NODES)
    check_tensors({name: leaf for name, leaf in leaves.items() if id(leaf) not in foreign}, size_bytes, location)
    return skeleton, [
        replace(foreign[id(leaf)], name=name) if id(leaf) in foreign else of_tensor(name, leaf)
        for name, leaf in leaves.items()
    ]


def _extents(folder: Path, storage_data: Mapping[Any, Any]) -> dict[BlockKey, Extent]:
    """Return the byte range of every block and of every value."""
    extents: dict[BlockKey, Extent] = {}
    for index, info in storage_data.items():
        if not isinstance(index, stored.StoredMetadataIndex) or not isinstance(info, stored.StorageInfo):
            raise CorruptDataError(f"{folder / METADATA_FILE}: its storage data are not byte ranges of files")
        name = index.fields["fqn"]
        if info.fields.get("transform_descriptors"):
            raise ConfigError(f"{folder}: {name!r} was transformed by an extension of DCP; save it without one")
        offset = index.fields.get("offset")
        path = _plain_file(folder, info.fields["relative_path"])
        start, length = info.fields["offset"], info.fields["length"]
        if not all(type(number) is int and number >= 0 for number in (start, length)):
            raise CorruptDataError(
                f"{folder / METADATA_FILE}: {name!r} has the offset {start!r} and length {length!r}; expected "
                "integers of 0 or more"
            )
        extents[name, None if offset is None else _sizes(offset)] = Extent(path, start, length)
    _check_no_overlap(extents.values())
    return extents


def _check_no_overlap(extents: Iterable[Extent]) -> None:
    """Check that no two ranges overlap: a range that many names share would be loaded once for each of them.

    Raises:
        CorruptDataError: two ranges overlap.
    """
    ordered = sorted(extents, key=lambda extent: (extent.path, extent.offset, extent.length))
    for extent, following in itertools.pairwise(ordered):
        if extent.path == following.path and extent.offset + extent.length > following.offset:
            raise CorruptDataError(f"{extent.path}: two values overlap at byte {following.offset}")


def _plain_file(folder: Path, name: object) -> Path:
    if not isinstance(name, str) or not is_plain_name(name):
        raise CorruptDataError(
            f"{folder / METADATA_FILE} refers to {str(name)[:80]!r}; expected the name of a file in the same folder"
        )
    return folder / name


def _tensor(
    name: str, description: stored.Standin, extents: Mapping[BlockKey, Extent], location: str
) -> ForeignTensor:
    dtype = description.fields["properties"].values[0]
    if not isinstance(dtype, stored.Dtype):
        raise CorruptDataError(f"{location}: tensor {name!r} has no dtype")
    shape = _sizes(description.fields["size"])
    chunks = description.fields["chunks"]
    boxes = [(_sizes(chunk.fields["offsets"]), _sizes(chunk.fields["sizes"])) for chunk in chunks]
    # An empty block covers no element and may not be stored.
    boxes = [box for box in boxes if 0 not in box[1]]
    if not is_tiling(shape, boxes):
        raise CorruptDataError(f"{location}: the blocks of tensor {name!r} do not cover each element exactly once")
    placed = [(start, TensorSpec(str(dtype), size), extents[name, start]) for start, size in boxes]
    return ForeignTensor(name, str(dtype), shape, _reader(name, placed))


def _reader(
    name: str, placed: Sequence[tuple[Shape, TensorSpec, Extent]]
) -> Callable[[], Iterator[tuple[Shape, torch.Tensor]]]:
    def blocks() -> Iterator[tuple[Shape, torch.Tensor]]:
        import torch

        for start, spec, extent in placed:
            block = extent.load(f"a block of tensor {name!r}")
            if not isinstance(block, torch.Tensor) or spec_of(block) != spec or block.nbytes > extent.length:
                raise CorruptDataError(
                    f"{extent.path}: a block of tensor {name!r} is not {spec}, as the metadata describe it"
                )
            yield start, block

    return blocks


def _sizes(size: object) -> Shape:
    """Return the values of a pickled torch.Size.

    Raises:
        ValueError: it is not a valid shape.
    """
    values = size.arguments[0] if isinstance(size, stored.Size) and size.arguments else size
    if isinstance(size, stored.Size) and not size.arguments:
        values = ()
    if not isinstance(values, (tuple, list)) or len(values) > _MAX_DIMENSIONS:
        raise ValueError(f"a shape is not a list of at most {_MAX_DIMENSIONS} sizes")
    if not all(type(number) is int and 0 <= number < 1 << 60 for number in values):
        raise ValueError("a size is not an integer from 0 to 2**60")
    return tuple(values)


class _Node(dict[Any, Any]):
    """An inner node of the tree: a dict, or a list whose type is not decided yet."""


def build_tree(items: Mapping[str, Any], paths: Mapping[str, Any], location: str) -> Any:
    """Build the state tree from flat names and their paths; a name without a path becomes a key of the root."""
    root = _Node()
    for name, value in items.items():
        path = paths.get(name, (name,))
        if not isinstance(path, tuple) or not 0 < len(path) <= _MAX_STEPS:
            raise CorruptDataError(f"{location}: {name!r} has no valid path in the state")
        node: Any = root
        for step in path[:-1]:
            node = node.setdefault(step, _Node())
        if not isinstance(node, _Node) or path[-1] in node:
            raise CorruptDataError(f"{location}: two values have the same path in the state, {name!r} is one of them")
        node[path[-1]] = value
    return _lists_of_nodes(root)


class _List(list[Any]):
    """A list that `build_tree` created, in contrast to a list that was read from a file."""


def _lists_of_nodes(value: Any) -> Any:
    """Convert nodes whose keys are 0, 1, 2, ... to lists."""
    if not isinstance(value, _Node):
        return value
    node = _Node((key, _lists_of_nodes(child)) for key, child in value.items())
    if all(type(key) is int for key in node) and node.keys() == set(range(len(node))):
        return _List(node[index] for index in range(len(node))) if node else {}
    return node
