"""Read the metadata of a torch DCP folder, which is a pickle, without executing any code in it.

Every class that torch writes there is replaced by a stand-in that only stores its values. Any other name is refused.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.pickle.plain_pickle import MAX_PICKLE_BYTES, PlainUnpickler
from datasvc.models.tensors.tensor_table import ITEM_BYTES

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


class Standin:
    """Stand-in for an object of a DCP class: its values without any behaviour.

    Attributes:
        arguments: arguments that it was created with.
        fields: its attributes.
        values: its state, if that is a tuple.
    """

    arguments: tuple[Any, ...]
    fields: dict[str, Any]
    values: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Self:
        """Set the attributes here, because unpickling creates some objects without calling `__init__`."""
        standin = super().__new__(cls)
        standin.arguments, standin.fields, standin.values = arguments, {}, ()
        return standin

    def set_state(self, state: object) -> None:
        """Set the state of the object, by reference: with copies, a few bytes of a file could use much memory."""
        if isinstance(state, dict):
            self.fields = state
        elif isinstance(state, tuple):
            self.values = state


class Metadata(Standin):
    """Stand-in for torch's Metadata, with the fields state_dict_metadata, planner_data and storage_data."""


class TensorMetadata(Standin):
    """Stand-in for torch's TensorStorageMetadata, with the fields properties, size and chunks."""


class ValueMetadata(Standin):
    """Stand-in for torch's BytesStorageMetadata: a value that is not a tensor."""


class ChunkMetadata(Standin):
    """Stand-in for torch's ChunkStorageMetadata, with the fields offsets and sizes."""


class Properties(Standin):
    """Stand-in for torch's TensorProperties; the dtype is the first of `values`."""


class StoredMetadataIndex(Standin):
    """Stand-in for torch's MetadataIndex, with the fields fqn and offset. A dict key, so it is hashed by identity."""


class StorageInfo(Standin):
    """Stand-in for torch's _StorageInfo, with relative_path, offset, length and transform_descriptors."""


class Size(Standin):
    """Stand-in for torch.Size, which is created from one sequence."""


class Ignored(Standin):
    """Stand-in for values that are not used here: layouts, memory formats, paths, ids."""


class Dtype(str):
    """Stand-in for a torch.dtype: its name."""

    __slots__ = ()


def _ordered() -> dict[Any, Any]:
    """Return an empty dict for an OrderedDict: a pickle adds the items afterwards, without a copy."""
    return {}


_CLASSES: Final[Mapping[tuple[str, str], Any]] = {
    (_METADATA, "Metadata"): Metadata,
    (_METADATA, "TensorStorageMetadata"): TensorMetadata,
    (_METADATA, "BytesStorageMetadata"): ValueMetadata,
    (_METADATA, "ChunkStorageMetadata"): ChunkMetadata,
    (_METADATA, "TensorProperties"): Properties,
    (_METADATA, "MetadataIndex"): StoredMetadataIndex,
    (_METADATA, "StorageMeta"): Ignored,
    (_METADATA, "_MEM_FORMAT_ENCODING"): Ignored,
    (_FILESYSTEM, "_StorageInfo"): StorageInfo,
    ("torch", "Size"): Size,
    ("torch.serialization", "_get_layout"): Ignored,
    ("pathlib", "PosixPath"): Ignored,
    ("pathlib", "WindowsPath"): Ignored,
    ("pathlib", "Path"): Ignored,
    ("collections", "OrderedDict"): _ordered,
}


class _MetadataUnpickler(PlainUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in ITEM_BYTES:
            return Dtype(name)
        try:
            return _CLASSES[module, name]
        except (KeyError, TypeError):
            raise ConfigError(
                f"{self.location} refers to {module}.{name}, which is not part of DCP metadata. To create it could "
                "execute code, so the folder is refused"
            ) from None

    def is_key(self, key: object) -> bool:
        return isinstance(key, Standin) or super().is_key(key)

    def build(self, target: Any, state: Any) -> None:
        if not isinstance(target, Standin):
            raise TypeError(f"a {type(target).__name__} cannot have a state")
        target.set_state(state)


def read_metadata(path: Path) -> Metadata:
    """Read the metadata of a DCP folder from its pickle.

    Raises:
        ConfigError: the pickle refers to a class or function that is not part of DCP metadata; it was not called.
        CorruptDataError: the file is damaged, too large, or not DCP metadata.
        OSError: the file cannot be read.
    """
    location = str(path)
    with path.open("rb") as file:
        raw = file.read(MAX_PICKLE_BYTES + 1)
    if len(raw) > MAX_PICKLE_BYTES:
        raise CorruptDataError(f"{location} has more than {MAX_PICKLE_BYTES} bytes, the limit for DCP metadata")
    value = _MetadataUnpickler(io.BytesIO(raw), len(raw), location).read()
    if not isinstance(value, Metadata):
        raise CorruptDataError(f"{location} is not DCP metadata: it holds a {type(value).__name__}")
    return value
