"""Encodes torch's `Metadata` as the sharding object of a version, for `DcpWriter`, and decodes it, for `DcpReader`.

The sharding object is JSON with the blocks of each tensor, and the path of each value in the state tree. (A block is
a chunk in torch's terms.) Torch itself stores its metadata as a pickle. JSON is safe: reading it executes no code.
Shapes and dtypes are only in the tensor table, and values only in the state, so that nothing is stored twice. The
blocks are checked against the table before memory is allocated for them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.dcp.values import Path, check_paths, check_reach, path_of
from datasvc.models.tensors.chunks import Box, is_tiling
from datasvc.models.tensors.state_tree import flatten, unflatten
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.models.versions.entry_fields import MAX_SHARDING_BYTES
from datasvc.repository.logs.references import parse_reference
from datasvc.sizes import format_size

SHARDING_FORMAT: Final = 1
_MEMORY_FORMATS: Final = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}


@dataclass(frozen=True)
class Sharding:
    """Description of a stored version for torch's planners.

    The keys are those of the dict to which a planner flattens the state.

    Attributes:
        metadata: torch's metadata, by key.
        names: names of the tensors in the tensor table, by key.
        paths: paths of the values in the state tree, by key.
        opaque: keys of values that a planner encoded in its own format; only this planner can read them.
    """

    metadata: Metadata
    names: Mapping[str, str]
    paths: Mapping[str, Path]
    opaque: frozenset[str] = frozenset()


def encode_sharding(metadata: Metadata, opaque: Iterable[str], save_id: str) -> bytes:
    """Return the bytes of the sharding object of a save.

    Args:
        metadata: torch's metadata of the save.
        opaque: keys as in `Sharding`.
        save_id: torch's id of the save.

    Raises:
        ConfigError: see `planned_paths`; or the result is larger than `MAX_SHARDING_BYTES`.
    """
    # The paths are tuples. JSON has no tuples, but a skeleton represents them.
    skeleton, _ = flatten({"planner_data": planned_paths(metadata)})
    described = {
        "format": SHARDING_FORMAT,
        "version": metadata.version,
        "save_id": save_id,
        "planner_data": skeleton["planner_data"],
        "tensors": {
            key: _encode_tensor(stored)
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        },
        "values": [
            key for key, stored in metadata.state_dict_metadata.items() if isinstance(stored, BytesStorageMetadata)
        ],
        "opaque": sorted(opaque),
    }
    raw = json.dumps(described, sort_keys=True, allow_nan=False).encode()
    if len(raw) > MAX_SHARDING_BYTES:
        raise ConfigError(
            f"the sharding of this save, a list of the blocks of each tensor, has {format_size(len(raw))}; at most "
            f"{format_size(MAX_SHARDING_BYTES)} are allowed; save parts of the state as separate models"
        )
    return raw


def planned_paths(metadata: Metadata) -> Mapping[str, Path] | None:
    """Return, for each key of a save, its path in the state tree; None if the planner did not flatten the state.

    Raises ConfigError: the planner's data is not a dict with a path for each key.
    """
    try:
        return check_paths(metadata.planner_data)
    except ValueError as error:
        raise ConfigError(
            f"the planner's data cannot be stored: {error}; put other data into the state instead"
        ) from error


def decode_sharding(raw: bytes, records: Mapping[str, TensorRecord], skeleton: Any, version: str) -> Sharding:
    """Decode a sharding object and check it against the tensor table of the version and the skeleton of its state.

    Raises:
        CorruptDataError: the object is damaged, or contradicts the table or the state.
        ConfigError: a later release of datasvc wrote the object.
    """
    try:
        described = json.loads(raw)
        # Compare the format first: a later format may have other fields. Its ConfigError is raised after this block,
        # which would report it as damage, because it is a ValueError.
        is_later = int(described["format"]) > SHARDING_FORMAT
        sharding = None if is_later else _build_sharding(described, records, skeleton)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptDataError(f"the sharding of {version} is damaged: {error!r}") from error
    if sharding is None:
        raise ConfigError(
            f"{version} has sharding format {described['format']}; this datasvc reads up to {SHARDING_FORMAT}: "
            "upgrade it"
        )
    return sharding


def describe_unsharded(skeleton: Any, records: Mapping[str, TensorRecord], version: str) -> Sharding:
    """Return the sharding of a version that was saved unsharded, with the keys of torch's default planner.

    Raises:
        ConfigError: two values have the same key, or the state is not a dict.
        CorruptDataError: the state is damaged, or names tensors that are not in the table.
    """
    # Tensors on the device "meta" have a shape and a dtype, but no memory.
    placeholders = {
        name: torch.empty(record.shape, dtype=getattr(torch, record.dtype), device="meta")
        for name, record in records.items()
    }
    state = unflatten(skeleton, placeholders)
    try:
        # Use torch's own function, because its default planner computes the keys with it when it loads.
        flat, paths = flatten_state_dict(state)
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{version} has no keys that a planner can use: {error}; use datasvc.models.restore"
        ) from error
    # Find the names by identity: flattening keeps the tensor objects, but not their names.
    names_by_id = {id(tensor): name for name, tensor in placeholders.items()}
    names = {key: names_by_id[id(value)] for key, value in flat.items() if isinstance(value, torch.Tensor)}
    stored: dict[str, Any] = {key: BytesStorageMetadata() for key in flat}
    for key, name in names.items():
        shape = records[name].shape
        stored[key] = _tensor_metadata(records[name], [((0,) * len(shape), shape)])
    return Sharding(Metadata(stored, planner_data=paths, storage_meta=StorageMeta()), names, paths)


def _build_sharding(described: Mapping[str, Any], records: Mapping[str, TensorRecord], skeleton: Any) -> Sharding:
    stored: dict[str, Any] = {
        key: _decode_tensor(tensor, records[key]) for key, tensor in described["tensors"].items()
    }
    names = {key: key for key in stored}  # a sharded save names the tensors in the table by their keys
    stored.update({str(key): BytesStorageMetadata() for key in described["values"]})
    planner_data = check_paths(unflatten(described["planner_data"], {}))
    if planner_data is not None:
        # Keep only keys with a stored value, because a planner builds a tree from all of these paths.
        planner_data = {key: path for key, path in planner_data.items() if key in stored}
        check_reach(skeleton, planner_data.values())
    metadata = Metadata(
        stored,
        planner_data=planner_data,
        storage_meta=StorageMeta(save_id=_text_or_none(described["save_id"])),
        version=_text_or_none(described["version"]),
    )
    paths = {key: path_of(planner_data, key) for key in stored}
    return Sharding(metadata, names, paths, frozenset(map(str, described["opaque"])))


def _encode_tensor(stored: TensorStorageMetadata) -> dict[str, Any]:
    properties = stored.properties
    return {
        "requires_grad": properties.requires_grad,
        "pin_memory": properties.pin_memory,
        "memory_format": str(properties.memory_format).removeprefix("torch."),
        "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in stored.chunks],
    }


def _decode_tensor(described: Mapping[str, Any], record: TensorRecord) -> TensorStorageMetadata:
    blocks = [(_sizes(start), _sizes(shape)) for start, shape in described["chunks"]]
    # If no block covered an element, the caller's tensor would keep its old value there, without an error. A block
    # without elements is valid, but `is_tiling` does not accept it.
    if not is_tiling(record.shape, [block for block in blocks if math.prod(block[1])]):
        raise ValueError(f"the chunks of {record.name!r} do not cover each element exactly once")
    return _tensor_metadata(
        record,
        blocks,
        requires_grad=bool(described["requires_grad"]),
        memory_format=_MEMORY_FORMATS[described["memory_format"]],
        pin_memory=bool(described["pin_memory"]),
    )


def _tensor_metadata(record: TensorRecord, blocks: Iterable[Box], **properties: Any) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, record.dtype), **properties),
        torch.Size(record.shape),
        [ChunkStorageMetadata(torch.Size(start), torch.Size(shape)) for start, shape in blocks],
    )


def _sizes(numbers: Iterable[Any]) -> tuple[int, ...]:
    sizes = tuple(numbers)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes} are not valid sizes; expected integers of 0 or more")
    return sizes


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)


# For these classes, a `checkpoint_id` names a repository, or a model or one of its versions, or both.


@dataclass(frozen=True)
class CheckpointId:
    """Parts of a `checkpoint_id`; None for a part that is not given.

    Attributes:
        url: URL of the repository.
        ref: NAME, NAME@3 or NAME@tag.
    """

    url: str | None
    ref: str | None

    @classmethod
    def parse(cls, checkpoint_id: str | os.PathLike[str]) -> CheckpointId:
        """Parse "NAME@3", a path or URL (any text with a slash), or "URL#NAME@3".

        Raises:
            ConfigError: the text has none of these forms.
            TypeError: `checkpoint_id` is neither a text nor a path.
        """
        text = os.fspath(checkpoint_id)
        url, separator, ref = text.rpartition("#")
        if not separator:
            # The text is only one of the two parts. A name has no slash, so a text with a slash is a path or URL.
            is_url = isinstance(checkpoint_id, os.PathLike) or "/" in text or os.sep in text
            url, ref = (text, "") if is_url else ("", text)
        if not url and not ref:
            raise ConfigError(
                f"{text!r} is not a valid checkpoint_id; give NAME, NAME@VERSION, a repository's URL, or URL#NAME"
            )
        if ref:
            parse_reference(ref, "model")
        return cls(url or None, ref or None)


@dataclass
class VersionStorageMeta(StorageMeta):
    """Torch's ids of a save or load, and the version that was saved or read.

    Attributes:
        reference: the version as "URL#NAME@3", which `DcpReader` and `dcp.load` accept.
    """

    reference: str | None = None


class CheckpointIdMixin:
    """Implements the methods of torch's `StorageReader` and `StorageWriter` that concern `checkpoint_id`.

    Attributes:
        url: URL of the repository.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.url = os.fspath(path)
        self._checkpoint_id: str | os.PathLike[str] = path

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The last `checkpoint_id` that torch passed to `reset`; `path` before the first."""
        return self._checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` has a valid form."""
        try:
            CheckpointId.parse(checkpoint_id)
        except (ConfigError, TypeError):
            return False
        return True
