"""Reads the metadata of a DCP folder, which is a pickle. It may name only the classes that torch writes there.

Only the child process of `torch_reader` may use this module, because it does not limit the memory of a pickle.
"""

from __future__ import annotations

import pickle
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.torch_reader import Extent

_METADATA: Final = "torch.distributed.checkpoint.metadata"
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
