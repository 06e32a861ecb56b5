"""What `torch_child` makes of values in a `torch.save` file for which torch would have to trust the file.

No code of a file's classes runs. NumPy's scalars and arrays are data: they are made here from their bytes. Any other
class is replaced by a placeholder that takes whatever the file gives it, so that the rest of the file can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch

_NUMPY_KINDS = "biufc"


class _Refused:
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
    made = type("_Refused", (_Refused,), {"name": name})
    # torch leaves the module of a builtin out of its message.
    return {name: made} if "." in name else {name: made, f"builtins.{name}": made}


def stored_form(value: Any, path: str, refused: dict[str, str]) -> Any:
    """Return what is stored of a value; None for what cannot be: `refused` then gets its path and the reason."""
    reason = None
    if isinstance(value, _Array):
        if value.tensor is not None:
            return value.tensor
        reason = value.name
    elif isinstance(value, _Refused) or (isinstance(value, type) and issubclass(value, _Refused)):
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
