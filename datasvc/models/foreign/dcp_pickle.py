"""The metadata of a torch DCP folder, which is a pickle, read so that nothing in it can run.

Every class that torch writes there is replaced by a stand-in that only holds what it is given; any other name is
refused. Python's own unpickler in Python is used, not the one in C: that one allocates what a file claims to need.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.records import ITEM_BYTES

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_MAX_BYTES: Final = 256 << 20


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

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.fields = {str(name): value for name, value in state.items()}
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


class Index(Standin):
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


_CLASSES: Final[Mapping[tuple[str, str], Any]] = {
    (_METADATA, "Metadata"): Metadata,
    (_METADATA, "TensorStorageMetadata"): TensorMetadata,
    (_METADATA, "BytesStorageMetadata"): ValueMetadata,
    (_METADATA, "ChunkStorageMetadata"): ChunkMetadata,
    (_METADATA, "TensorProperties"): Properties,
    (_METADATA, "MetadataIndex"): Index,
    (_METADATA, "StorageMeta"): Ignored,
    (_METADATA, "_MEM_FORMAT_ENCODING"): Ignored,
    (_FILESYSTEM, "_StorageInfo"): StorageInfo,
    ("torch", "Size"): Size,
    ("torch.serialization", "_get_layout"): Ignored,
    ("pathlib", "PosixPath"): Ignored,
    ("pathlib", "WindowsPath"): Ignored,
    ("pathlib", "Path"): Ignored,
    ("collections", "OrderedDict"): dict,
}


# What pickling plain dataclasses, dicts, tuples, texts and numbers takes. Others may allocate what they like.
_OPCODES: Final = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT,
    pickle.BINGET, pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1,
    pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE,
    pickle.BINUNICODE8, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS,
    pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD,
)  # fmt: skip


class _Refusing(pickle._Unpickler):  # noqa: SLF001 - the one in Python, see above
    dispatch: ClassVar = {opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _OPCODES}  # noqa: SLF001

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in ITEM_BYTES:
            return Dtype(name)
        try:
            return _CLASSES[module, name]
        except (KeyError, TypeError):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}") from None


def read_metadata(raw: bytes, location: str) -> Metadata:
    """Return the metadata in a pickle.

    Raises:
        ConfigError: it names a class or function that DCP's metadata has no need of; it was not called.
        CorruptDataError: damaged, or no such metadata.
    """
    if len(raw) > _MAX_BYTES:
        raise CorruptDataError(f"{location} has {len(raw)} bytes; at most {_MAX_BYTES} are believed")
    try:
        found = _Refusing(io.BytesIO(raw)).load()
    except pickle.UnpicklingError as error:
        refused = str(error).removeprefix("GLOBAL ")
        if refused != str(error):
            raise ConfigError(
                f"{location} names {refused}, which no metadata of DCP needs. Making it could run code, so the "
                "folder is refused"
            ) from None
        raise CorruptDataError(f"{location} is damaged: {error}") from None
    except Exception as error:  # noqa: BLE001 - hostile bytes may raise anything; all of it means the same
        raise CorruptDataError(f"{location} is damaged: {type(error).__name__}: {error}") from None
    if not isinstance(found, Metadata):
        raise CorruptDataError(f"{location} is no metadata of DCP: it holds a {type(found).__name__}")
    return found
