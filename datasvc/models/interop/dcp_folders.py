"""Folders of torch's distributed checkpoint (DCP): read without its pickle ever running, written by torch itself."""

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

Place = tuple[str, Shape | None]
"""Name and first element of a block of a tensor; None for a value that is no tensor."""


@dataclass(frozen=True)
class Extent:
    """Where something lies: `length` bytes from `offset` of a file in the folder."""

    path: Path
    offset: int
    length: int

    def load(self, what: str) -> Any:
        """Return what torch.save wrote there. Raises ConfigError, CorruptDataError, OSError."""
        if self.offset + self.length > self.path.stat().st_size:
            raise CorruptDataError(f"{self.path} was cut off: {what} should end at byte {self.offset + self.length}")
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return load_plain(file.read(self.length), f"{what} in {self.path}")


def read_dcp_folder(folder: Path) -> ForeignState:
    """Return the state in a folder that `torch.distributed.checkpoint` wrote, at any number of ranks.

    Raises:
        ConfigError: metadata or a value name a class that only running code could make; or bytes were transformed by
            an extension.
        CorruptDataError: damaged, or files and metadata do not agree.
        OSError: something cannot be read.
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
        raise CorruptDataError(f"{location} does not say what it should: {type(error).__name__}: {error}") from error
    is_bare = tree == items and all(isinstance(item, ForeignTensor) for item in items.values())
    return ForeignState("dcp", tensors, None if is_bare else skeleton)


def write_dcp_folder(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state tree into an empty folder, by torch's own writer.

    Raises:
        ConfigError: DCP cannot hold this tree, such as one with both "a.b" and "b" in "a".
        OSError: it cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process saves, as meant
        try:
            save(dict(state), storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise _failure(error) from None
        except ValueError as error:
            raise ConfigError(f"this state cannot be written as DCP: {error}") from error


def _failure(error: BaseException) -> BaseException:
    """Return why a save failed: torch wraps it in an exception of its own, which is no Exception."""
    causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
    for cause in causes:
        why: BaseException | None = cause
        while why is not None:
            if isinstance(why, OSError) or not isinstance(why, Exception):
                return why
            why = why.__context__
        if "inline_container" in str(cause):  # torch's archive, which does not say why a write failed
            return OSError(errno.EIO, f"torch could not write, the disk may be full: {cause}")
    said = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes) or str(error)
    return ConfigError(f"this state cannot be written as DCP: {said}")


def _items(described: Mapping[Any, Any], extents: Mapping[Place, Extent], location: str) -> dict[str, Any]:
    """Return every tensor, to be read later, and every other value, by flat name."""
    found: dict[str, Any] = {}
    for name, about in described.items():
        check_tensor_name(name, location)
        if isinstance(about, stored.TensorMetadata):
            found[name] = _tensor(name, about, extents, location)
        elif isinstance(about, stored.ValueMetadata):
            found[name] = extents[name, None].load(f"value {name!r}")
        else:
            raise CorruptDataError(f"{location}: {name!r} is neither a tensor nor a value")
    return found


def _flatten(tree: Any, size_bytes: int, location: str) -> tuple[Any, list[ForeignTensor]]:
    """Return the skeleton of a tree of foreign tensors, and these by the names that they have in it.

    `size_bytes` is that of everything in the folder.
    """
    import torch

    foreign: dict[int, ForeignTensor] = {}
    kept: list[torch.Tensor] = []

    def stand_in(value: Any) -> Any:
        # Only the nodes that `build_tree` made hold foreign tensors; what was read may be a tree without end.
        if isinstance(value, ForeignTensor):
            kept.append(torch.empty(0))
            foreign[id(kept[-1])] = value
            return kept[-1]
        if isinstance(value, _List):
            return [stand_in(each) for each in value]
        return {key: stand_in(each) for key, each in value.items()} if isinstance(value, _Node) else value

    skeleton, leaves = flatten(stand_in(tree), max_nodes=MAX_NODES)
    check_tensors({name: leaf for name, leaf in leaves.items() if id(leaf) not in foreign}, size_bytes, location)
    return skeleton, [
        replace(foreign[id(leaf)], name=name) if id(leaf) in foreign else of_tensor(name, leaf)
        for name, leaf in leaves.items()
    ]


def _extents(folder: Path, storage_data: Mapping[Any, Any]) -> dict[Place, Extent]:
    """Return where every block of a tensor and every value lies, by name and first element."""
    found: dict[Place, Extent] = {}
    for index, info in storage_data.items():
        if not isinstance(index, stored.StoredMetadataIndex) or not isinstance(info, stored.StorageInfo):
            raise CorruptDataError(f"{folder / METADATA_FILE}: its storage data name something else than files")
        name = index.fields["fqn"]
        if info.fields.get("transform_descriptors"):
            raise ConfigError(f"{folder}: {name!r} was transformed by an extension of DCP; save it without one")
        offset = index.fields.get("offset")
        path = _plain_file(folder, info.fields["relative_path"])
        start, length = info.fields["offset"], info.fields["length"]
        if not all(type(each) is int and each >= 0 for each in (start, length)):
            raise CorruptDataError(f"{folder / METADATA_FILE}: {name!r} lies nowhere")
        found[name, None if offset is None else _sizes(offset)] = Extent(path, start, length)
    _check_apart(found.values())
    return found


def _check_apart(extents: Iterable[Extent]) -> None:
    """Raise CorruptDataError where two lie over each other: one that many names share would be read for each."""
    ordered = sorted(extents, key=lambda each: (each.path, each.offset, each.length))
    for one, next_one in itertools.pairwise(ordered):
        if one.path == next_one.path and one.offset + one.length > next_one.offset:
            raise CorruptDataError(f"{one.path}: two values lie over each other at byte {next_one.offset}")


def _plain_file(folder: Path, name: object) -> Path:
    if not isinstance(name, str) or not is_plain_name(name):
        raise CorruptDataError(
            f"{folder / METADATA_FILE} names {str(name)[:80]!r}; expected the name of a file beside it"
        )
    return folder / name


def _tensor(name: str, about: stored.Standin, extents: Mapping[Place, Extent], location: str) -> ForeignTensor:
    dtype = about.fields["properties"].values[0]
    if not isinstance(dtype, stored.Dtype):
        raise CorruptDataError(f"{location}: tensor {name!r} has no dtype")
    shape = _sizes(about.fields["size"])
    boxes = [(_sizes(chunk.fields["offsets"]), _sizes(chunk.fields["sizes"])) for chunk in about.fields["chunks"]]
    boxes = [box for box in boxes if 0 not in box[1]]
    if not is_tiling(shape, boxes):
        raise CorruptDataError(f"{location}: the blocks of tensor {name!r} leave out elements or hold some twice")
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
                    f"{extent.path}: a block of tensor {name!r} is not the {spec} that it should be"
                )
            yield start, block

    return blocks


def _sizes(size: object) -> Shape:
    """Return a torch.Size as it was pickled. Raises ValueError."""
    values = size.arguments[0] if isinstance(size, stored.Size) and size.arguments else size
    if isinstance(size, stored.Size) and not size.arguments:
        values = ()
    if not isinstance(values, (tuple, list)) or len(values) > _MAX_DIMENSIONS:
        raise ValueError("a shape is damaged")
    if not all(type(each) is int and 0 <= each < 1 << 60 for each in values):
        raise ValueError("a shape is damaged")
    return tuple(values)


class _Node(dict[Any, Any]):
    """A dict or list of the state, as long as it is not known which."""


def build_tree(items: Mapping[str, Any], paths: Mapping[str, Any], location: str) -> Any:
    """Return the tree that flat names came from; the names themselves where the metadata does not say."""
    root = _Node()
    for name, value in items.items():
        path = paths.get(name, (name,))
        if not isinstance(path, tuple) or not 0 < len(path) <= _MAX_STEPS:
            raise CorruptDataError(f"{location}: {name!r} has no place in the state")
        place: Any = root
        for step in path[:-1]:
            place = place.setdefault(step, _Node())
        if not isinstance(place, _Node) or path[-1] in place:
            raise CorruptDataError(f"{location}: two values have one place in the state, {name!r} is one of them")
        place[path[-1]] = value
    return _settle(root)


class _List(list[Any]):
    """A list of the state, as the metadata say."""


def _settle(value: Any) -> Any:
    """Turn nodes whose keys are 0, 1, 2, ... into lists."""
    if not isinstance(value, _Node):
        return value
    settled = _Node((key, _settle(each)) for key, each in value.items())
    if all(type(key) is int for key in settled) and settled.keys() == set(range(len(settled))):
        return _List(settled[index] for index in range(len(settled))) if settled else {}
    return settled
