"""Decides what the names of classes in a pickle of another program stand for; no code of these classes runs.

The metadata of a DCP folder may name only the classes that torch writes there. In a `torch.save` file, scalars and
arrays of NumPy are data, made here from their bytes; any other class for which torch would have to trust the file is
replaced by a placeholder that takes whatever the file gives it, so that the rest can be read.

Only the child process of `torch_reader` may use this module, because it does not limit the memory of a pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, Final, Self

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.torch_reader import Extent

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_NUMPY_KINDS: Final = "biufc"  # of numbers, which a tensor can have
_DCP_CLASSES: Final = frozenset({
    (_METADATA, "Metadata"), (_METADATA, "TensorStorageMetadata"), (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"), (_METADATA, "TensorProperties"), (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"), (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"),
    ("pathlib", "Path"), ("collections", "OrderedDict"),
})  # fmt: skip


class _DcpUnpickler(pickle.Unpickler):
    """Refuses references to classes and functions other than those of DCP metadata, before they are called."""

    location = ""  # name of the pickle in error messages

    def find_class(self, module: str, name: str) -> Any:
        # A dtype is pickled as a reference to an attribute of torch, such as torch.float32.
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and (module, name) not in _DCP_CLASSES:
            raise ConfigError(
                f"{self.location} refers to {module}.{name}, which is not part of DCP metadata and could execute "
                "code, so the folder is refused; save it again with torch.distributed.checkpoint"
            )
        return super().find_class(module, name)


def describe_metadata(extent: Extent) -> dict[str, Any]:
    """Return the metadata whose pickle is a whole file, as JSON lists. Their elements are not checked.

    Returns:
        "items": [name, [dtype, shape, [[start, shape] of each block]]] for a tensor, [name, None] for another value;
        "extents": [name, start of the block or None, file, offset, length, whether an extension transformed it];
        "paths": [name, keys in the state tree].

    Raises:
        ConfigError: the pickle refers to a class or function that is not part of DCP metadata; it was not called.
        CorruptDataError: the pickle is not DCP metadata.
        Exception: damaged or hostile bytes may raise any exception.
    """
    with extent.path.open("rb") as file:
        unpickler = _DcpUnpickler(file)
        unpickler.location = extent.location
        metadata = unpickler.load()
    if not isinstance(metadata, Metadata):
        raise CorruptDataError(f"{extent.location} is not DCP metadata: it holds a {type(metadata).__name__}")
    return {
        "items": [
            [name, _describe_blocks(item) if isinstance(item, TensorStorageMetadata) else None]
            for name, item in metadata.state_dict_metadata.items()
        ],
        "extents": [
            [
                index.fqn,  # torch's fully qualified name: the name of the tensor or value
                None if index.offset is None else list(index.offset),
                info.relative_path,
                info.offset,
                info.length,
                bool(getattr(info, "transform_descriptors", None)),
            ]
            for index, info in metadata.storage_data.items()
        ],
        "paths": [[name, list(path)] for name, path in (metadata.planner_data or {}).items()],
    }


def _describe_blocks(tensor: TensorStorageMetadata) -> list[Any]:
    """Return dtype, shape and blocks of a tensor, as in "items" above."""
    blocks = [[list(block.offsets), list(block.sizes)] for block in tensor.chunks]
    return [str(tensor.properties.dtype).removeprefix("torch."), list(tensor.size), blocks]


class _Placeholder:
    """Placeholder of a value of a class, or of the class itself; `name` is that of the class."""

    name = ""

    def __new__(cls, *_args: Any, **_named: Any) -> Self:
        return object.__new__(cls)

    def __init__(self, *_args: Any, **_named: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass


class _Dtype:
    """A dtype of NumPy, as NumPy pickles it: its text, then a state with its byte order."""

    def __init__(self, text: str, *_args: Any) -> None:
        self.dtype: np.dtype[Any] = np.dtype(text)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1]) if state[1] in ("<", ">") else self.dtype

    @property
    def plain(self) -> np.dtype[Any]:
        """The dtype. Raises ValueError: its values are objects or have fields."""
        if self.dtype.hasobject or self.dtype.fields or self.dtype.kind == "V":
            raise ValueError(f"values of {self.dtype} are not plain numbers")
        return self.dtype


class _Array:
    """An array of NumPy, as NumPy pickles it: an empty one, then a state with its shape, dtype and bytes."""

    def __init__(self, stored: dict[int, int]) -> None:
        self._stored = stored
        self.tensor: torch.Tensor | None = None
        self.name = "a numpy.ndarray"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        self.name = f"a numpy.ndarray of {dtype.dtype}"
        if dtype.dtype.kind not in _NUMPY_KINDS or not isinstance(content, bytes):
            return  # of objects: a placeholder, as for an unknown class
        array = np.frombuffer(bytearray(content), dtype.plain).reshape(shape, order="F" if is_fortran else "C")
        tensor = torch.from_numpy(np.ascontiguousarray(array.astype(dtype.plain.newbyteorder("="))).reshape(shape))
        # These values are from the file, as `_check_tensors` asks.
        self._stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        self.tensor = tensor


def foreign_globals(stored: dict[int, int]) -> dict[str, Any]:
    """Return what stands for the functions and classes of a pickle that are data, by their full names.

    `stored` gets the sizes of the storages of arrays, by address.
    """

    def make_array(*_args: Any) -> _Array:
        return _Array(stored)

    def make_scalar(dtype: _Dtype, content: bytes) -> Any:
        (value,) = np.frombuffer(content, dtype.plain)
        return value

    def make_dict(*_args: Any) -> dict[Any, Any]:
        return {}  # a defaultdict: its factory may be a function of the file

    made: dict[str, Any] = {"numpy.dtype": _Dtype, "collections.defaultdict": make_dict}
    made |= placeholder("numpy.ndarray")
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        made |= {f"{module}._reconstruct": make_array, f"{module}.scalar": make_scalar}
    # The class of an array is an argument of `_reconstruct`; `_Array` is what torch may set the state of.
    return {**made, "datasvc.array": _Array}


def placeholder(name: str) -> dict[str, Any]:
    """Return a placeholder for a class or function, by the names that a file may have for it."""
    made = type("_Placeholder", (_Placeholder,), {"name": name})
    # torch leaves the module of a builtin out of its message.
    return {name: made} if "." in name else {name: made, f"builtins.{name}": made}


def stored_form(value: Any, path: str, refused: dict[str, str]) -> Any:
    """Return what is stored of a value; None for what cannot be: `refused` then gets its path and the reason."""
    reason = None
    if isinstance(value, _Array):
        if value.tensor is not None:
            return value.tensor
        reason = value.name
    elif isinstance(value, _Placeholder) or (isinstance(value, type) and issubclass(value, _Placeholder)):
        reason = f"{value.name}, and to create one would execute code from the file"
    elif isinstance(value, _Dtype):
        reason = f"a numpy.dtype, {value.dtype}"
    elif isinstance(value, Mapping):
        key = next((key for key in value if not isinstance(key, str | int) or isinstance(key, bool)), None)
        if key is not None or None in value:
            reason = f"a dict with a key of type {type(key).__name__}, which is neither a string nor an int"
    if reason is None:
        return value
    refused[path or "(root)"] = reason
    return None
