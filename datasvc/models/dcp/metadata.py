"""The metadata of torch.distributed.checkpoint as JSON: how a save was cut over ranks, and what its planner noted.

Shapes and dtypes are not here but in the tensor table, values not here but in the state: nothing is said twice.
Reading runs no code, and what it says is checked against the table before anyone allocates by it.
"""

from __future__ import annotations

import json
import math
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
from datasvc.models.dcp.paths import Path, check_paths, check_reach, path_of
from datasvc.models.tensors.chunks import Box, is_tiling
from datasvc.models.tensors.state_tree import flatten, unflatten
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.models.versions.entry_refs import MAX_SHARDING_BYTES
from datasvc.sizes import format_size

SHARDING_FORMAT: Final = 1
_MEMORY_FORMATS: Final = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}


@dataclass(frozen=True)
class Sharding:
    """What a planner needs to know of a stored version.

    Attributes:
        metadata: torch's, keys as the planner made them.
        names: of tensors in the tensor table, by key.
        paths: where each value lies in the state tree, by key.
        opaque: keys whose value is bytes that only the planner which made them understands.
    """

    metadata: Metadata
    names: Mapping[str, str]
    paths: Mapping[str, Path]
    opaque: frozenset[str] = frozenset()


def encode_sharding(metadata: Metadata, opaque: Iterable[str], save_id: str) -> bytes:
    """Return the bytes of a sharding object.

    Raises:
        ConfigError: the planner noted something else than the paths of keys; names it. Or they are too many bytes.
    """
    paths, _ = flatten({"planner_data": planned_paths(metadata)})
    described = {
        "format": SHARDING_FORMAT,
        "version": metadata.version,
        "save_id": save_id,
        "planner_data": paths["planner_data"],
        "tensors": {
            key: _encode_tensor(each)
            for key, each in metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        },
        "values": [k for k, each in metadata.state_dict_metadata.items() if isinstance(each, BytesStorageMetadata)],
        "opaque": sorted(opaque),
    }
    raw = json.dumps(described, sort_keys=True, allow_nan=False).encode()
    if len(raw) > MAX_SHARDING_BYTES:
        raise ConfigError(
            f"how this save was cut over the ranks takes {format_size(len(raw))} to say, and may take "
            f"{format_size(MAX_SHARDING_BYTES)}; save parts of the state as models of their own"
        )
    return raw


def planned_paths(metadata: Metadata) -> Mapping[str, Path] | None:
    """Return where the planner of a save took each key from; None where it did not flatten.

    Raises:
        ConfigError: it noted something else.
    """
    try:
        return check_paths(metadata.planner_data)
    except ValueError as error:
        raise ConfigError(
            f"the planner's data cannot be stored: {error}; give what is to be kept to the state instead"
        ) from error


def decode_sharding(raw: bytes, records: Mapping[str, TensorRecord], skeleton: Any, version: str) -> Sharding:
    """Return what a sharding object of `version` says.

    Args:
        raw: its bytes.
        records: the version's tensor table, by name.
        skeleton: of its state tree.
        version: for messages.

    Raises:
        CorruptDataError: damaged, or it contradicts the table or the state.
        ConfigError: of a later format.
    """
    try:
        described = json.loads(raw)
        later = int(described["format"]) > SHARDING_FORMAT
        sharding = None if later else _sharding(described, records, skeleton)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptDataError(f"the sharding of {version} is damaged: {error!r}") from error
    if sharding is None:
        raise ConfigError(
            f"{version} has sharding format {described['format']}; this datasvc reads up to {SHARDING_FORMAT}: "
            "upgrade it"
        )
    return sharding


def describe_unsharded(skeleton: Any, records: Mapping[str, TensorRecord], version: str) -> Sharding:
    """Return the same for a version that one process saved whole: keys are those of torch's default planner.

    Raises:
        ConfigError: two values have one key, or the state is no dict.
        CorruptDataError: the state is damaged or names tensors that the table lacks.
    """
    placeholders = {
        name: torch.empty(record.shape, dtype=getattr(torch, record.dtype), device="meta")
        for name, record in records.items()
    }
    state = unflatten(skeleton, placeholders)
    try:
        flat, paths = flatten_state_dict(state)
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{version} has no keys that a planner could use: {error}; use datasvc.models.restore"
        ) from error
    names_by_id = {id(tensor): name for name, tensor in placeholders.items()}
    names = {key: names_by_id[id(each)] for key, each in flat.items() if isinstance(each, torch.Tensor)}
    stored: dict[str, Any] = {
        key: _whole_tensor(records[names[key]]) if key in names else BytesStorageMetadata() for key in flat
    }
    return Sharding(Metadata(stored, planner_data=paths, storage_meta=StorageMeta()), names, paths)


def _sharding(described: Mapping[str, Any], records: Mapping[str, TensorRecord], skeleton: Any) -> Sharding:
    stored: dict[str, Any] = {key: _decode_tensor(each, records[key]) for key, each in described["tensors"].items()}
    names = {key: key for key in stored}
    stored.update({str(key): BytesStorageMetadata() for key in described["values"]})
    planner_data = check_paths(unflatten(described["planner_data"], {}))
    if planner_data is not None:
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
    boxes = [(_sizes(start), _sizes(shape)) for start, shape in described["chunks"]]
    # Chunks that leave out elements would leave memory as it was where the caller expects what was saved.
    if not is_tiling(record.shape, [box for box in boxes if math.prod(box[1])]):
        raise ValueError(f"the chunks of {record.name!r} leave out elements or hold some twice")
    return TensorStorageMetadata(
        TensorProperties(
            dtype=getattr(torch, record.dtype),
            requires_grad=bool(described["requires_grad"]),
            memory_format=_MEMORY_FORMATS[described["memory_format"]],
            pin_memory=bool(described["pin_memory"]),
        ),
        torch.Size(record.shape),
        [_chunk(box) for box in boxes],
    )


def _whole_tensor(record: TensorRecord) -> TensorStorageMetadata:
    whole = _chunk(((0,) * len(record.shape), record.shape))
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, record.dtype)), torch.Size(record.shape), [whole]
    )


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))


def _sizes(numbers: Iterable[Any]) -> tuple[int, ...]:
    sizes = tuple(numbers)
    if not all(type(each) is int and each >= 0 for each in sizes):
        raise ValueError(f"{sizes} are no sizes")
    return sizes


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)
