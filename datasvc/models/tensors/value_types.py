"""Values of a state that are neither JSON nor tensors: what is stored of them, and how they are made again.

`describe` gives each of them a *kind*, a plain value (of dicts, lists, tuples, numbers, texts, bytes and tensors) and
details for JSON; `make` is its inverse. Kinds are part of the format of a state, see docs/reference/formats.md. The
plain values and the details may come from an untrusted file: nothing is imported, and no code runs but the
constructors of the types in this module and `__tensor_unflatten__` of classes that the program has imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import enum
import inspect
import keyword
import pathlib
import sys
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np

from datasvc.errors import ConfigError
from datasvc.models.tensors.tensor_classes import described_subclass, make_subclass

_MAX_FIELDS: Final = 1 << 12


class Described(NamedTuple):
    """A value as `describe` returns it; `plain` has the type that `make` expects, its parts may have types too."""

    kind: str
    plain: Any
    details: tuple[Any, ...] = ()


class _Simple(NamedTuple):
    """A kind without details: what is stored of a value, the type of that, and the constructor that takes it."""

    kind: str
    to_plain: Callable[[Any], Any]
    plain_type: type
    make: Callable[[Any], Any]


def _sorted(values: Any) -> list[Any]:
    # Sets have no order that survives a restart; equal states must give equal bytes.
    return sorted(values, key=lambda value: (type(value).__name__, repr(value)))


_SIMPLE: Final[Mapping[type, _Simple]] = {
    OrderedDict: _Simple("ordered", dict, dict, OrderedDict),
    Counter: _Simple("counter", dict, dict, Counter),
    set: _Simple("set", _sorted, list, set),
    frozenset: _Simple("frozenset", _sorted, list, frozenset),
    complex: _Simple("complex", lambda value: (value.real, value.imag), tuple, lambda parts: complex(*parts)),
    bytearray: _Simple("bytearray", bytes, bytes, bytearray),
    range: _Simple("range", lambda value: (value.start, value.stop, value.step), tuple, lambda parts: range(*parts)),
    slice: _Simple("slice", lambda value: (value.start, value.stop, value.step), tuple, lambda parts: slice(*parts)),
    Decimal: _Simple("decimal", str, str, Decimal),
    Fraction: _Simple("fraction", lambda value: (value.numerator, value.denominator), tuple, lambda p: Fraction(*p)),
    uuid.UUID: _Simple("uuid", str, str, uuid.UUID),
    pathlib.PosixPath: _Simple("path", str, str, pathlib.Path),
    pathlib.PurePosixPath: _Simple("pure_posix_path", str, str, pathlib.PurePosixPath),
    pathlib.PureWindowsPath: _Simple("pure_windows_path", str, str, pathlib.PureWindowsPath),
    dt.date: _Simple("date", dt.date.isoformat, str, dt.date.fromisoformat),
    dt.timedelta: _Simple(
        "timedelta",
        lambda value: (value.days, value.seconds, value.microseconds),
        tuple,
        lambda parts: dt.timedelta(*parts),
    ),
    argparse.Namespace: _Simple("namespace", vars, dict, lambda fields: argparse.Namespace(**fields)),
    types.SimpleNamespace: _Simple("simple_namespace", vars, dict, lambda fields: types.SimpleNamespace(**fields)),
}
_BY_KIND: Final[Mapping[str, _Simple]] = {simple.kind: simple for simple in _SIMPLE.values()}
_FACTORIES: Final[Mapping[str, Callable[[], Any] | None]] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, bytes, complex, dict, float, int, list, set, str, tuple)},
    **{kind.__name__: kind for kind in (Counter, OrderedDict, deque)},
}
# Types of torch whose values have one name each, and what a text of theirs begins with.
_TORCH_NAMES: Final = ("dtype", "layout", "memory_format")

# What torch.load() reads with weights_only=True: an export keeps only these types.
_EXPORTED: Final = ("ordered", "counter", "set", "complex", "bytearray", "size", "dtype", "device")


def is_kind(kind: Any) -> bool:
    """Return whether `kind` is one of the kinds of this release."""
    return isinstance(kind, str) and (kind in _BY_KIND or kind in _MAKERS)


def describe(value: Any, place: str) -> Described | None:
    """Return what is stored of a value; None if it is plain, or of no kind that can be stored.

    Raises ConfigError: the value is of such a kind, but more than its plain value would be needed to make it again;
    the message has `place`.
    """
    kind = type(value)
    if kind in _SIMPLE:
        return Described(_SIMPLE[kind].kind, _SIMPLE[kind].to_plain(value))
    if isinstance(value, np.generic):
        return _describe_numpy(value)
    if isinstance(value, enum.Enum):
        return _describe_member(value, place)
    if kind is deque:
        return Described("deque", list(value), (value.maxlen,))
    if kind is defaultdict:
        factory = next((name for name, made in _FACTORIES.items() if made is value.default_factory), None)
        if factory is None:
            raise _not_storable(place, f"a defaultdict with {value.default_factory!r}", "convert it with dict()")
        return Described("defaultdict", dict(value), (factory,))
    if kind in (dt.datetime, dt.time):
        return _describe_time(value, place)
    if isinstance(value, tuple) and kind is not tuple:
        return _describe_tuple(value, place)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _describe_dataclass(value, place)
    return _describe_torch(value, place)


def make(kind: str, plain: Any, details: list[Any], *, is_exported: bool = False) -> Any:
    """Return the value of a `describe` result.

    With `is_exported`, types that `torch.load` refuses by default are left out: their plain value is returned.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, ArithmeticError: these values are not from `describe`.
        ConfigError: a tensor's class is not imported, or does not accept the values.
    """
    simple = _BY_KIND.get(kind)
    if is_exported and kind not in _EXPORTED:
        return plain
    if simple is not None:
        if type(plain) is not simple.plain_type:
            raise TypeError(f"the plain value of a {kind} is a {type(plain).__name__}")
        return simple.make(plain)
    made: Any = _MAKERS[kind](plain, *details)
    return made


def is_named_tuple(value: tuple[Any, ...]) -> bool:
    """Return whether a tuple has a name for each of its elements, as those of `collections.namedtuple`."""
    fields = getattr(type(value), "_fields", None)
    return isinstance(fields, tuple) and len(fields) == len(value) and _are_names(fields)


def find_class(module: Any, qualname: Any) -> type | None:
    """Return a class that the program has imported; None if there is none of this name. No code runs."""
    if not isinstance(module, str) or not isinstance(qualname, str):
        raise TypeError("the name of a class is not a text")
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        # Not `getattr`, which may run code of the module.
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


def _not_storable(place: str, what: str, advice: str) -> ConfigError:
    return ConfigError(f"state value {place or '(root)'} is {what}, which cannot be stored without pickle; {advice}")


def _name_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _describe_numpy(value: np.generic) -> Described | None:
    if value.dtype.hasobject or value.dtype.fields or value.dtype.kind == "V":
        return None
    # In little-endian order, whatever the machine is.
    return Described(
        "numpy", value.astype(value.dtype.newbyteorder("<")).tobytes(), (value.dtype.newbyteorder("<").str,)
    )


def _make_numpy(content: bytes, name: str) -> Any:
    dtype = np.dtype(name)
    values = np.frombuffer(content, dtype) if dtype.itemsize else np.zeros(1, dtype)  # an empty text has no bytes
    if len(values) != 1:
        raise ValueError(f"{len(content)} bytes are not one {name}")
    return values.astype(dtype.newbyteorder("="))[0]


def _describe_member(value: enum.Enum, place: str) -> Described:
    # A combination of flags has no name of its own.
    if value.name not in type(value).__members__:
        raise _not_storable(place, f"{value!r}, a combination of flags", "store its value")
    plain = value.value if type(value.value) in (str, int, bool) else value.name
    return Described("enum", plain, (*_name_of(type(value)), value.name))


def _make_member(plain: Any, module: str, qualname: str, name: str) -> Any:
    found = find_class(module, qualname)
    if found is not None and issubclass(found, enum.Enum) and name in found.__members__:
        return found.__members__[name]
    _check_names([name])
    # Equal to its value, as a member of an IntEnum or StrEnum is: which of them the class was is not stored.
    mixin = type(plain) if type(plain) in (str, int) else None
    made: Any = enum.Enum(qualname.rpartition(".")[2], {name: plain}, type=mixin)  # type: ignore[misc]
    return made[name]


def _describe_time(value: dt.datetime | dt.time, place: str) -> Described:
    zone = value.tzinfo
    key = zone.key if isinstance(zone, zoneinfo.ZoneInfo) else None
    if key is None and type(zone) not in (type(None), dt.timezone):
        raise _not_storable(place, f"a {type(value).__name__} in the time zone {zone!r}", "convert it to UTC")
    text = value.isoformat() if key is None else value.replace(tzinfo=None).isoformat()
    return Described(type(value).__name__, text, (key, value.fold))


def _make_time(kind: Any) -> Callable[..., Any]:
    def make_time(text: str, zone: str | None, fold: int) -> Any:
        made = kind.fromisoformat(text).replace(fold=fold)
        return made if zone is None else made.replace(tzinfo=zoneinfo.ZoneInfo(zone))

    return make_time


def _describe_tuple(value: tuple[Any, ...], place: str) -> Described:
    if type(value).__module__ == "torch" and type(value).__name__ == "Size":
        return Described("size", tuple(value))
    if not is_named_tuple(value):
        raise _not_storable(place, f"a {type(value).__name__}", "convert it with tuple()")
    fields: Any = type(value)
    return Described("named", tuple(value), (*_name_of(type(value)), list(fields._fields)))


def _make_named(items: Any, module: str, qualname: str, fields: Any) -> tuple[Any, ...]:
    """Return a named tuple of its class, if the program has imported it; else of a new class with these fields."""
    if not isinstance(items, tuple) or len(items) != len(fields) or not _are_names(fields):
        raise ValueError(f"{fields!r} are not the names of the elements of a tuple")
    found: Any = find_class(module, qualname)
    is_same = found is not None and issubclass(found, tuple) and vars(found).get("_fields") == tuple(fields)
    return tuple.__new__(found if is_same else _define_class(qualname.rpartition(".")[2], tuple(fields)), items)


def _describe_dataclass(value: Any, place: str) -> Described:
    fields = {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
    }
    if more := getattr(value, "__dict__", {}).keys() - fields:
        what = f"a {type(value).__name__} with {', '.join(sorted(more))}, which are no fields of this dataclass"
        raise _not_storable(place, what, "store dataclasses.asdict() of it")
    return Described("dataclass", fields, _name_of(type(value)))


def _make_dataclass(fields: Any, module: str, qualname: str) -> Any:
    """Return an instance of the class, if the program has imported it and it has these fields; else a namespace."""
    if type(fields) is not dict:
        raise TypeError("the fields of a dataclass are not a dict")
    found: Any = find_class(module, qualname)
    if (
        found is None
        or not dataclasses.is_dataclass(found)
        or {f.name for f in dataclasses.fields(found)} != {*fields}
    ):
        _check_names(fields)
        return type(qualname.rpartition(".")[2], (types.SimpleNamespace,), {})(**fields)
    made: Any = object.__new__(found)  # type: ignore[arg-type]
    for name, value in fields.items():
        object.__setattr__(made, name, value)  # the class may be frozen
    return made


def _describe_torch(value: Any, place: str) -> Described | None:
    name = type(value).__name__
    if type(value).__module__ in ("torch", "torch._C"):
        if name in _TORCH_NAMES:
            return Described(name, str(value).removeprefix("torch."))
        if name == "device":
            return Described(name, str(value))
        if name == "Generator":
            raise _not_storable(place, "a torch.Generator", "store its get_state()")
    described = described_subclass(value)
    return None if described is None else Described("subclass", *described)


def _make_torch_name(kind: str) -> Callable[[Any], Any]:
    def make_name(name: str) -> Any:
        import torch

        value = vars(torch).get(name)
        if not isinstance(value, getattr(torch, kind)):
            raise TypeError(f"torch has no {kind} {name!r}")
        return value

    return make_name


def _make_device(text: str) -> Any:
    import torch

    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _make_size(sizes: Any) -> Any:
    import torch

    return torch.Size(sizes)


def _make_deque(items: list[Any], maxlen: int | None) -> deque[Any]:
    if type(items) is not list:
        raise TypeError("the elements of a deque are not a list")
    return deque(items, maxlen)


def _make_defaultdict(items: dict[Any, Any], factory: str) -> defaultdict[Any, Any]:
    if type(items) is not dict:
        raise TypeError("the items of a defaultdict are not a dict")
    return defaultdict(_FACTORIES[factory], items)


def _make_subclass(plain: Any, module: str, qualname: str, size: Any, stride: Any) -> Any:
    return make_subclass(plain, find_class(module, qualname), f"{module}.{qualname}", size, stride)


_MAKERS: Final[Mapping[str, Callable[..., Any]]] = {
    **{kind: _make_torch_name(kind) for kind in _TORCH_NAMES},
    "size": _make_size,
    "device": _make_device,
    "datetime": _make_time(dt.datetime),
    "time": _make_time(dt.time),
    "deque": _make_deque,
    "defaultdict": _make_defaultdict,
    "numpy": _make_numpy,
    "named": _make_named,
    "enum": _make_member,
    "dataclass": _make_dataclass,
    "subclass": _make_subclass,
}


def _check_names(names: Any) -> None:
    if not all(isinstance(name, str) and name.isidentifier() and not name.startswith("__") for name in names):
        raise ValueError(f"{names!r} are not names")


def _are_names(fields: Any) -> bool:
    """Return whether `fields` are valid, distinct names of fields."""
    return (
        isinstance(fields, tuple | list)
        and len(fields) <= _MAX_FIELDS
        and all(isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) for name in fields)
        and not any(name.startswith("_") for name in fields)
        and len(set(fields)) == len(fields)
    )


@lru_cache(maxsize=256)
def _define_class(name: str, fields: tuple[str, ...]) -> Any:
    """Return a class like those of `collections.namedtuple`, which would evaluate text that contains the names."""
    signature = inspect.Signature(
        [inspect.Parameter(field, inspect.Parameter.POSITIONAL_OR_KEYWORD) for field in fields]
    )

    def new(cls: Any, *values: Any, **named: Any) -> Any:
        return tuple.__new__(cls, signature.bind(*values, **named).args)

    def as_dict(self: Any) -> Mapping[str, Any]:
        return dict(zip(fields, self, strict=True))

    def show(self: Any) -> str:
        return f"{name}({', '.join(f'{field}={value!r}' for field, value in zip(fields, self, strict=True))})"

    def as_plain(self: Any) -> tuple[Any, ...]:
        return tuple(self)

    methods = {
        "__slots__": (),
        "__new__": new,
        "__repr__": show,
        "__getnewargs__": as_plain,  # for copies
        "_fields": fields,
        "_make": classmethod(tuple.__new__),
        "_asdict": as_dict,
        "_replace": lambda self, **changes: type(self)(**{**as_dict(self), **changes}),
    }
    getters = {field: property(itemgetter(index)) for index, field in enumerate(fields)}
    return type(name, (tuple,), {**methods, **getters})
