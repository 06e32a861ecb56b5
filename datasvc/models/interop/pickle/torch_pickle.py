"""Check the pickle of a torch.save file before torch reads it: only tensors and plain values are allowed.

With `weights_only=True` torch executes no code, but it creates a bytearray of any size and a tensor over any amount
of claimed memory. What passes these checks needs about as much memory as the file has bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.pickle.plain_pickle import MAX_PICKLE_BYTES, PlainUnpickler

_OLD_MODULES: Final = {"__builtin__": "builtins"}
_UNSTORABLE: Final = frozenset({"builtins.set", "builtins.frozenset", "builtins.bytearray"})
_NOT_DENSE: Final = "torch._utils._rebuild_"
# The format before torch 1.6 has five pickles: magic number, version, system, state, keys of the storages.
_LEGACY_PICKLES: Final = 5
_LEGACY_STATE: Final = 3


class _TensorStorage:
    """Stand-in for the storage of a tensor, with `num` elements."""

    def __init__(self, num: int) -> None:
        self.num = num


class _Ordered(dict[Any, Any]):
    """Stand-in for an OrderedDict, which may have attributes, such as those of a state dict."""

    def __init__(self) -> None:
        super().__init__()


class _Plain:
    """Stand-in for a value of a few bytes, or for a class that is only named."""


_PLAIN: Final = _Plain()


def check_pickle(raw: bytes, file_bytes: int, location: str) -> None:
    """Check the pickle of a torch.save file.

    Args:
        raw: bytes of the pickle.
        file_bytes: size of the whole file, which limits the size of the tensors.
        location: name of the file, for messages.

    Raises:
        ConfigError: the pickle holds something other than tensors and plain values (the message names it), or too
            many values.
        CorruptDataError: the pickle is damaged, or its tensors are larger than the file.
    """
    if len(raw) > MAX_PICKLE_BYTES:
        raise ConfigError(
            f"{location} has {len(raw)} bytes of values that are not tensors; at most {MAX_PICKLE_BYTES} are "
            "allowed: save long lists as tensors or arrays"
        )
    _TorchUnpickler(io.BytesIO(raw), len(raw), file_bytes, location).read()


def check_legacy_pickles(raw: bytes, file_bytes: int, location: str) -> None:
    """Check the pickles of a file from before torch 1.6.

    Args:
        raw: first bytes of the file, at most `MAX_PICKLE_BYTES`.
        file_bytes: size of the whole file.
        location: name of the file, for messages.

    Raises:
        Same errors as `check_pickle`.
    """
    file = io.BytesIO(raw)
    for number in range(_LEGACY_PICKLES):
        unpickler = _TorchUnpickler(file, len(raw), file_bytes, location)
        try:
            unpickler.read()
        except CorruptDataError:
            # The pickle is not damaged if it only continues after the bytes in `raw`.
            if number <= _LEGACY_STATE and len(raw) < file_bytes and file.tell() >= len(raw):
                raise ConfigError(
                    f"{location} has more than {MAX_PICKLE_BYTES} bytes of values that are not tensors; save long "
                    "lists as tensors or arrays"
                ) from None
            raise


class _TorchUnpickler(PlainUnpickler):
    def __init__(self, file: io.BytesIO, size_bytes: int, file_bytes: int, location: str) -> None:
        super().__init__(file, size_bytes, location)
        self._file_bytes = file_bytes
        self._claimed: dict[str, int] = {}
        self._callables: Mapping[str, Callable[..., Any]] = {
            "collections.OrderedDict": _Ordered,
            "collections.Counter": self._copy_dict,
            "_codecs.encode": self._encode,
            "builtins.bytes": _small,
            "builtins.complex": _small,
            "torch.device": _small,
            "torch.serialization._get_layout": _small,
            "torch.Size": self._size,
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor,
            "torch._utils._rebuild_parameter": _first,
            "torch._utils._rebuild_parameter_with_state": _first,
            "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
        }

    # Without the opcode NEWOBJ: tensors and plain values do not use it.
    dispatch: ClassVar = {opcode: step for opcode, step in PlainUnpickler.dispatch.items() if opcode != b"\x81"[0]}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{_OLD_MODULES.get(module, module)}.{name}"
        if full in self._callables:
            return self._callables[full]
        if full in {"torch.Tensor", "torch.nn.parameter.Parameter"} or _is_dtype_or_storage(module, name):
            return _PLAIN
        if full in _UNSTORABLE:
            raise ConfigError(
                f"{self.location} holds a {name}, which cannot be stored; save tensors and plain values"
            )
        if full.startswith(_NOT_DENSE):
            raise ConfigError(
                f"{self.location} holds a tensor that is not dense ({full}); only dense tensors can be stored: save "
                "it as a dense tensor"
            )
        raise refusal(full, self.location)

    def persistent_load(self, pid: Any) -> Any:
        kind, _type, key, _device, num = pid[:5]
        if kind != "storage" or type(key) is not str or type(num) is not int or num < 0:
            raise TypeError("the description of a storage is not valid")
        # Several tensors may share a storage, which counts once.
        self._claimed[key] = max(num, self._claimed.get(key, 0))
        if num > self._file_bytes:
            raise CorruptDataError(f"{self.location}: its tensors take more bytes than the file has")
        return _TensorStorage(num)

    def read(self) -> Any:
        value = super().read()
        # An element has at least one byte. `check_tensors` checks the exact sizes after torch has mapped the file.
        if sum(self._claimed.values()) > self._file_bytes:
            raise CorruptDataError(f"{self.location}: its tensors take more bytes than the file has")
        return value

    def build(self, target: Any, state: Any) -> None:
        if not isinstance(target, _Ordered) or not isinstance(state, dict):
            raise TypeError(f"a {type(target).__name__} cannot have a state")
        self.count_copies(len(state))

    def _copy_dict(self, content: Any) -> dict[Any, Any]:
        if type(content) is not dict:
            raise TypeError("a Counter must be created from a dict")
        self.count_copies(len(content))
        return content

    def _encode(self, text: Any, encoding: Any) -> _Plain:
        if type(text) is not str or encoding != "latin1":
            raise TypeError("encoded bytes are not valid")
        self.count_copies(len(text))
        return _PLAIN

    def _size(self, sizes: Any = ()) -> _Plain:
        if type(sizes) not in {tuple, list}:
            raise TypeError("a shape is not valid")
        self.count_copies(len(sizes))
        return _PLAIN

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_more: Any) -> _Plain:
        if not isinstance(storage, _TensorStorage) or type(size) is not tuple or type(stride) is not tuple:
            raise TypeError("the description of a tensor is not valid")
        self.count_copies(len(size))
        numbers = (offset, *size, *stride)
        if not all(type(number) is int and number >= 0 for number in numbers) or len(size) != len(stride):
            raise TypeError("the description of a tensor is not valid")
        if 0 not in size and offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) >= storage.num:
            raise CorruptDataError(f"{self.location}: a tensor exceeds its storage")
        return _PLAIN


def refusal(name: str, location: str) -> ConfigError:
    """Return the error for a class or function in a file that is not allowed."""
    return ConfigError(
        f"{location} holds {name.removeprefix('builtins.')}, and to create one would execute code from the file, so "
        "it is refused. Save plain values, such as model.state_dict(), and import that"
    )


def _is_dtype_or_storage(module: str, name: str) -> bool:
    import torch

    if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
        return True
    return module in {"torch", "torch.storage"} and name.endswith("Storage") and name.isidentifier()


def _small(*_arguments: Any) -> _Plain:
    return _PLAIN


def _first(tensor: Any, *_more: Any) -> Any:
    return tensor


def _rebuild_from_type(rebuild: Any, _type: Any, arguments: Any, _state: Any) -> Any:
    if (
        not callable(rebuild)
        or type(arguments) is not tuple
        or not arguments
        or not isinstance(arguments[0], _TensorStorage)
    ):
        raise TypeError("the description of a tensor is not valid")
    return rebuild(*arguments)
