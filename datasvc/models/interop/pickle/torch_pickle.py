"""The pickle in a file of torch.save, gone through before torch reads it: that it holds tensors and plain values.

torch, told to load weights only, runs no code, but makes a bytearray of any size and a tensor of whatever memory it
claims. Everything that passes here takes about as much memory as the file has bytes.
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
# Before torch 1.6: magic number, version and system stand before the state, the keys of the storages behind it.
_LEGACY_PICKLES: Final = 5
_LEGACY_STATE: Final = 3


class _TensorStorage:
    """The memory of a tensor."""

    def __init__(self, num: int) -> None:
        self.num = num


class _Ordered(dict[Any, Any]):
    """A dict that may have attributes, as state dicts have."""

    def __init__(self) -> None:
        super().__init__()


class _Plain:
    """A value of a few bytes, or a class that only stands for itself."""


_PLAIN: Final = _Plain()


def check_pickle(raw: bytes, file_bytes: int, location: str) -> None:
    """Look at the pickle of a file of torch.save.

    Args:
        raw: the pickle.
        file_bytes: of the whole file: no tensor can have more.
        location: for messages.

    Raises:
        ConfigError: it holds what is neither a tensor nor a plain value; names it. Or far too many of them.
        CorruptDataError: damaged, or it claims more than the file has.
    """
    if len(raw) > MAX_PICKLE_BYTES:
        raise ConfigError(
            f"{location} has {len(raw)} bytes of other values than tensors; at most {MAX_PICKLE_BYTES} are read: "
            "keep long lists as tensors or arrays"
        )
    _TorchUnpickler(io.BytesIO(raw), len(raw), file_bytes, location).read()


def check_legacy_pickles(raw: bytes, file_bytes: int, location: str) -> None:
    """Look at the pickles of a file from before torch 1.6; `raw` is how it begins. Raises as `check_pickle`."""
    file = io.BytesIO(raw)
    for number in range(_LEGACY_PICKLES):
        unpickler = _TorchUnpickler(file, len(raw), file_bytes, location)
        try:
            unpickler.read()
        except CorruptDataError:
            if number <= _LEGACY_STATE and len(raw) < file_bytes and file.tell() >= len(raw):
                raise ConfigError(
                    f"{location} has more than {MAX_PICKLE_BYTES} bytes of other values than tensors; keep long "
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
                f"{self.location} holds a tensor that is not dense ({full}); only dense tensors can be stored, save "
                "it as one"
            )
        raise refusal(full, self.location)

    def persistent_load(self, pid: Any) -> Any:
        kind, _type, key, _device, num = pid[:5]
        if kind != "storage" or type(key) is not str or type(num) is not int or num < 0:
            raise TypeError("a storage is damaged")
        self._claimed[key] = max(num, self._claimed.get(key, 0))
        if num > self._file_bytes:
            raise CorruptDataError(f"{self.location}: its tensors take more bytes than the file has")
        return _TensorStorage(num)

    def read(self) -> Any:
        found = super().read()
        # A storage has one byte an element at least; how many in truth is looked at once torch has mapped it.
        if sum(self._claimed.values()) > self._file_bytes:
            raise CorruptDataError(f"{self.location}: its tensors take more bytes than the file has")
        return found

    def build(self, made: Any, state: Any) -> None:
        if not isinstance(made, _Ordered) or not isinstance(state, dict):
            raise TypeError(f"a {type(made).__name__} cannot have a state")
        self.count_copies(len(state))

    def _copy_dict(self, given: Any) -> dict[Any, Any]:
        if type(given) is not dict:
            raise TypeError("a Counter is made of a dict")
        self.count_copies(len(given))
        return given

    def _encode(self, text: Any, encoding: Any) -> _Plain:
        if type(text) is not str or encoding != "latin1":
            raise TypeError("bytes are damaged")
        self.count_copies(len(text))
        return _PLAIN

    def _size(self, sizes: Any = ()) -> _Plain:
        if type(sizes) not in {tuple, list}:
            raise TypeError("a shape is damaged")
        self.count_copies(len(sizes))
        return _PLAIN

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_more: Any) -> _Plain:
        if not isinstance(storage, _TensorStorage) or type(size) is not tuple or type(stride) is not tuple:
            raise TypeError("a tensor is damaged")
        self.count_copies(len(size))
        if not all(type(each) is int and each >= 0 for each in (offset, *size, *stride)) or len(size) != len(stride):
            raise TypeError("a tensor is damaged")
        if 0 not in size and offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) >= storage.num:
            raise CorruptDataError(f"{self.location}: a tensor reaches out of its memory")
        return _PLAIN


def refusal(name: str, location: str) -> ConfigError:
    """Return what is said of a class or function in a file, which is never called."""
    return ConfigError(
        f"{location} holds {name.removeprefix('builtins.')}, and making one would run code from the file: that is "
        "never done. Save plain values, such as model.state_dict(), and import that"
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
        raise TypeError("a tensor is damaged")
    return rebuild(*arguments)
