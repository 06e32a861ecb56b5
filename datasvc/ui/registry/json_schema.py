"""JSON schemas and JSON values of dataclasses, for the OpenAPI document and the responses that it describes."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final, Union, cast, get_args, get_origin, get_type_hints

_SCALARS: Final[Mapping[Any, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def schema_of(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a type; that of a dataclass is added to `schemas`, and the result refers to it.

    Args:
        kind: a dataclass, `str`, `int`, `float`, `bool`, None, `Any`, or a mapping, tuple, union or `Annotated` of
            such types; the text of an `Annotated` is the description.
        schemas: schemas of dataclasses by name.
    """
    if is_dataclass(kind):
        return _reference(cast("type", kind), schemas)
    if kind is Any:
        return {}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return {**schema_of(arguments[0], schemas), "description": arguments[1]}
    if origin in {Union, types.UnionType}:
        return {"anyOf": [schema_of(argument, schemas) for argument in arguments]}
    if origin is tuple:
        return {"type": "array", "items": schema_of(arguments[0], schemas)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], schemas)}
    return {"type": _SCALARS[kind]}


def json_of(value: Any) -> Any:
    """Return the JSON value of a dataclass, and of mappings and sequences of them."""
    if is_dataclass(value):
        return {field.name: json_of(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): json_of(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [json_of(each) for each in value]
    return value


def _reference(kind: type, schemas: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in schemas:
        hints = get_type_hints(kind, include_extras=True)
        schemas[kind.__name__] = {
            "type": "object",
            "description": (kind.__doc__ or "").partition("\n")[0],
            "properties": {name: schema_of(hint, schemas) for name, hint in hints.items()},
            "required": list(hints),
        }
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
