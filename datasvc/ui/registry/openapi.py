"""The OpenAPI document of the registry, made from its routes."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final, Union, cast, get_args, get_origin, get_type_hints

from datasvc.ui.registry.records import ProblemDetails
from datasvc.ui.registry.route import MAX_VERSION, RegistryRoute, RouteParameter
from datasvc.ui.web.access import REGISTRY

VERSION: Final = "1.0"  # of the routes and their fields: the second number grows with each addition
_PARTS: Final = {
    "name": RouteParameter("name", "Name of a data set, model or run.", {"type": "string"}),
    "tag": RouteParameter("tag", "Name of a tag.", {"type": "string"}),
    "version": RouteParameter(
        "version", "Number of a version.", {"type": "integer", "minimum": 1, "maximum": MAX_VERSION}
    ),
    "id": RouteParameter("id", "Identifier of a run, such as 20261123-221830-3fa9c1.", {"type": "string"}),
}
_ETAG: Final = {"ETag": {"description": "Changes with the response.", "schema": {"type": "string"}}}


_SCALARS: Final[Mapping[Any, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def openapi_document(routes: Iterable[RegistryRoute]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of `routes` as JSON values."""
    schemas: dict[str, Any] = {}
    problem = schema_of(ProblemDetails, schemas)
    paths = {f"{REGISTRY}{route.path}": {"get": _operation(route, schemas)} for route in routes}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "datasvc registry",
            "version": VERSION,
            "description": "Data sets, models, versions, tags, lineage and runs of one repository. Read-only.",
        },
        # A server on the loopback requires no token.
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {
                "problem": {
                    "description": "An error: 400 for a request that is not valid, 401 without the token, 404 "
                    "for what does not exist or is removed, 502 for damaged data, 503 if the store does not respond.",
                    "content": {"application/problem+json": {"schema": problem}},
                },
                "same": {"description": "The response still has the ETag of `If-None-Match`.", "headers": _ETAG},
            },
        },
    }


def _operation(route: RegistryRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", route.path)
    in_path = [{**_parameter(_PARTS[name]), "in": "path", "required": True} for name in names]
    lifetime = "It never changes." if route.is_immutable else "Ask again with its ETag in `If-None-Match`."
    return {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.path.split("/")[1]],
        "parameters": [*in_path, *({**_parameter(each), "in": "query"} for each in route.query)],
        "responses": {
            "200": {
                "description": f"{route.summary}. {lifetime}",
                "headers": _ETAG,
                "content": {"application/json": {"schema": schema_of(route.record, schemas)}},
            },
            "304": {"$ref": "#/components/responses/same"},
            "default": {"$ref": "#/components/responses/problem"},
        },
    }


def _parameter(parameter: RouteParameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "description": parameter.description,
        "schema": parameter.schema,
        "required": parameter.is_required,
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
