"""The metadata of a torch DCP folder, which is a pickle, read so that nothing in it can run.

Every class that torch writes there is replaced by a stand-in that only holds what it is given; any other name is
refused.
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
    """An object of a class of DCP, as its values only.

    Attributes:
        arguments: that it was made with.
        fields: its attributes.
        values: its state where that is a tuple.
    """

    arguments: tuple[Any, ...]
    fields: dict[str, Any]
    values: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Self:
        """Unpickling makes some objects without calling `__init__`."""
        made = super().__new__(cls)
        made.arguments, made.fields, made.values = arguments, {}, ()
        return made

    def set_state(self, state: object) -> None:
        """Take what the object consists of, by reference: a copy for every few bytes of a file would be too much."""
        if isinstance(state, dict):
            self.fields = state
        elif isinstance(state, tuple):
            self.values = state


class Metadata(Standin):
    """torch's Metadata: state_dict_metadata, planner_data, storage_data."""


class TensorMetadata(Standin):
    """torch's TensorStorageMetadata: properties, size, chunks."""


class ValueMetadata(Standin):
    """torch's BytesStorageMetadata: a value that is no tensor."""


class ChunkMetadata(Standin):
    """torch's ChunkStorageMetadata: offsets, sizes."""


class Properties(Standin):
    """torch's TensorProperties; the dtype is the first of `values`."""


class StoredMetadataIndex(Standin):
    """torch's MetadataIndex: fqn, offset. Hashable by identity, as it is a key there."""


class StorageInfo(Standin):
    """torch's _StorageInfo: relative_path, offset, length, transform_descriptors."""


class Size(Standin):
    """torch.Size; made with one sequence."""


class Ignored(Standin):
    """What nobody needs here: layouts, memory formats, paths, ids."""


class Dtype(str):
    """torch's name of a dtype."""

    __slots__ = ()


def _ordered() -> dict[Any, Any]:
    """Return an empty dict: pickling sets what is in one afterwards, so what it is made of need not be copied."""
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


class _Refusing(PlainUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in ITEM_BYTES:
            return Dtype(name)
        try:
            return _CLASSES[module, name]
        except (KeyError, TypeError):
            raise ConfigError(
                f"{self.location} names {module}.{name}, which no metadata of DCP needs. Making it could run code, "
                "so the folder is refused"
            ) from None

    def is_key(self, key: object) -> bool:
        return isinstance(key, Standin) or super().is_key(key)

    def build(self, made: Any, state: Any) -> None:
        if not isinstance(made, Standin):
            raise TypeError(f"a {type(made).__name__} cannot have a state")
        made.set_state(state)


def read_metadata(path: Path) -> Metadata:
    """Return the metadata in a pickle.

    Raises:
        ConfigError: it names a class or function that DCP's metadata has no need of; it was not called.
        CorruptDataError: damaged, or no such metadata, or much larger than any.
        OSError: it cannot be read.
    """
    location = str(path)
    with path.open("rb") as file:
        raw = file.read(MAX_PICKLE_BYTES + 1)
    if len(raw) > MAX_PICKLE_BYTES:
        raise CorruptDataError(f"{location} has more than {MAX_PICKLE_BYTES} bytes, which is all that is believed")
    found = _Refusing(io.BytesIO(raw), len(raw), location).read()
    if not isinstance(found, Metadata):
        raise CorruptDataError(f"{location} is no metadata of DCP: it holds a {type(found).__name__}")
    return found
