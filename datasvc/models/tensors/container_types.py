"""Types in a state that JSON lacks: ordered dicts, named tuples, and tensors that share their memory (tied tensors).

In a skeleton they are marks around the plain value: `{"$ordered": DICT}`, `{"$named": [MODULE, QUALNAME, FIELDS,
TUPLE]}`, and `{"$tensor": NAME, "$tied": FIRST}` for a tensor with the memory of the tensor FIRST. In a state object
they are a list beside the plain tree. Releases that do not read the list restore plain dicts and tuples.
"""

from __future__ import annotations

import inspect
import keyword
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_MAX_FIELDS: Final = 1 << 12


def untyped(skeleton: Any) -> Any:
    """Return the skeleton of the plain dict or tuple in that of an ordered dict or a named tuple; else `skeleton`."""
    if isinstance(skeleton, dict):
        if "$ordered" in skeleton:
            return skeleton["$ordered"]
        if isinstance(skeleton.get("$named"), list) and skeleton["$named"]:
            return skeleton["$named"][-1]
    return skeleton


def typed_as(skeleton: Any, plain: Any) -> Any:
    """Return `plain`, a plain dict or tuple, with the type that `skeleton` has; see `untyped`."""
    if isinstance(skeleton, dict):
        if "$ordered" in skeleton:
            return {"$ordered": plain}
        if "$named" in skeleton:
            return {"$named": [*skeleton["$named"][:-1], plain]}
    return plain


def tied_tensors(skeleton: Any) -> dict[str, str]:
    """Return the tied tensors in a skeleton: the name of the first tensor with this memory, by name of the other."""
    tied, parts = {}, [skeleton]
    while parts:
        part = parts.pop()
        # What a damaged state has instead is an error of `unflatten`.
        if isinstance(part, dict) and [*part] == ["$tensor", "$tied"] and {*map(type, part.values())} == {str}:
            tied[part["$tensor"]] = part["$tied"]
        elif isinstance(part, dict):
            parts.extend(part.values())
        elif isinstance(part, list):
            parts.extend(part)
    return tied


def mark_tied(leaves: Iterable[tuple[dict[str, Any], torch.Tensor]]) -> None:
    """Mark tensors with the same elements of the same memory in their skeletons, `{"$tensor": NAME}`, as tied."""
    import torch

    first_names: dict[Any, str] = {}
    for leaf, tensor in leaves:
        # Of other classes, such as DTensor, the address of the memory does not tell which elements a tensor has.
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            continue
        if tensor.is_meta or tensor.is_quantized or tensor.is_nested or not tensor.numel():
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = first_names.setdefault((*place, tensor.is_conj(), tensor.is_neg()), leaf["$tensor"])
        if first != leaf["$tensor"]:
            leaf["$tied"] = first


def is_named_tuple(value: tuple[Any, ...]) -> bool:
    """Return whether a tuple has a name for each of its elements, as those of `collections.namedtuple`."""
    fields = getattr(type(value), "_fields", None)
    return isinstance(fields, tuple) and len(fields) == len(value) and _are_names(fields)


def mark_named(value: tuple[Any, ...], plain: Any) -> dict[str, Any]:
    """Return the skeleton of a named tuple; `plain` is that of its elements, as a plain tuple."""
    named: Any = type(value)
    return {"$named": [named.__module__, named.__qualname__, list(named._fields), plain]}


def make_named(module: Any, qualname: Any, fields: Any, items: Any) -> tuple[Any, ...]:
    """Return a named tuple of its class, if the program has imported it; else of a new class with these fields.

    Nothing is imported, and no code of the class runs: the names may come from an untrusted file.

    Raises ValueError or TypeError: the names are not valid.
    """
    if not isinstance(items, tuple) or len(items) != len(fields) or not _are_names(fields):
        raise ValueError(f"{fields!r} are not the names of the elements of a tuple")
    if not isinstance(module, str) or not isinstance(qualname, str):
        raise TypeError("the name of a class is not a text")
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        # Not `getattr`, which may run code of the module.
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    is_same = isinstance(found, type) and issubclass(found, tuple) and vars(found).get("_fields") == tuple(fields)
    named = found if is_same else _define_class(qualname.rpartition(".")[2], tuple(fields))
    return tuple.__new__(named, items)


def split_types(skeleton: Any) -> tuple[Any, list[list[Any]]]:
    """Return a skeleton without types, and a list of [PATH, KIND, ...] for JSON; see docs/reference/formats.md."""
    types: list[list[Any]] = []
    return _split(skeleton, (), types), types


def join_types(tree: Any, types: Iterable[Sequence[Any]]) -> Any:
    """Return the skeleton of a `split_types` result; `tree` is changed. Types of an unknown kind are left out.

    Raises ValueError, KeyError, IndexError, TypeError or AttributeError: a type does not fit the tree.
    """
    root = [tree]
    pairs: dict[int, dict[Any, Any]] = {}  # the pairs of each "$dict" by key, by its id; `tree` keeps the ids alive
    # The deepest first: then no path leads through a value that has a type already.
    for path, kind, *details in sorted(types, key=lambda item: -len(item[0])):
        node: Any = root
        slot: Any = 0
        for key in path:
            node, slot = _slot(node[slot], key, pairs)
        value = node[slot]
        if kind == "tied":
            (first,) = details
            if not isinstance(first, str) or list(value) != ["$tensor"]:
                raise ValueError(f"{path} is not a tensor, but is tied to another one")
            value["$tied"] = first
        elif kind == "ordered":
            if not isinstance(value, dict) or any(mark in value for mark in ("$tensor", "$tuple", "$ordered")):
                raise ValueError(f"{path} is not a dict, but has an order")
            node[slot] = {"$ordered": value}
        elif kind == "named":
            if list(value) != ["$tuple"]:
                raise ValueError(f"{path} is not a tuple, but has names")
            node[slot] = {"$named": [*details, value]}
    return root[0]


def _slot(value: Any, key: Any, pairs: dict[int, dict[Any, Any]]) -> tuple[Any, Any]:
    """Return the container and the key or index in it of a child of a plain dict, list or tuple in a skeleton."""
    if type(key) not in (str, int):
        raise TypeError(f"{key!r} is neither a key nor an index")
    if isinstance(value, dict) and "$tuple" in value:
        value = value["$tuple"]
    if isinstance(value, dict) and "$dict" in value:
        if id(value) not in pairs:
            pairs[id(value)] = {pair[0]: pair for pair in value["$dict"]}
        return pairs[id(value)][key], 1
    if isinstance(value, list) and not 0 <= key < len(value):
        raise IndexError(f"a list of {len(value)} has no element {key}")
    return value, key


def _split(value: Any, path: tuple[Any, ...], types: list[list[Any]]) -> Any:
    if isinstance(value, list):
        return [_split(item, (*path, index), types) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        if "$tied" in value:
            types.append([list(path), "tied", value["$tied"]])
        return {"$tensor": value["$tensor"]}
    if "$ordered" in value:
        types.append([list(path), "ordered"])
        return _split(value["$ordered"], path, types)
    if "$named" in value:
        *described, plain = value["$named"]
        types.append([list(path), "named", *described])
        return _split(plain, path, types)
    if "$tuple" in value:
        return {"$tuple": _split(value["$tuple"], path, types)}
    if "$dict" in value:
        return {"$dict": [[key, _split(item, (*path, key), types)] for key, item in value["$dict"]]}
    return {key: _split(item, (*path, key), types) for key, item in value.items()}


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
