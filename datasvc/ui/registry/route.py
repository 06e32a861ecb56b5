"""One route of the registry: its path, its parameters, its response, and the function that reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import ConfigError
from datasvc.ui.web.page import Parts, Query
from datasvc.ui.web.site import Site

PAGE_SIZE: Final = 100
MAX_PAGE_SIZE: Final = 1000
MAX_VERSION: Final = 10**9 - 1


@dataclass(frozen=True)
class RouteParameter:
    """A parameter in the address of a route.

    Attributes:
        name: its name.
        description: what it selects.
        schema: its JSON schema.
        is_required: whether the address must have it; those of the path always are.
    """

    name: str
    description: str
    schema: dict[str, Any]
    is_required: bool = False


PAGING: Final = (
    RouteParameter(
        "limit",
        "Greatest number of items.",
        {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE, "default": PAGE_SIZE},
    ),
    RouteParameter(
        "after", "The field `next` of the page before; without it, the first page.", {"type": "integer", "minimum": 0}
    ),
)


@dataclass(frozen=True)
class RegistryRoute:
    """A route.

    Attributes:
        path: path below `/v1`, such as "/models/{name}".
        name: identifier of the operation in the OpenAPI document.
        summary: what it returns.
        record: dataclass of the response.
        read: returns the record; called in a thread.
        query: parameters after "?".
        is_immutable: whether the address gives the same response for ever.
    """

    path: str
    name: str
    summary: str
    record: type
    read: Callable[[Site, Parts, Query], Any]
    query: Sequence[RouteParameter] = ()
    is_immutable: bool = False


def read_limit(query: Query) -> int:
    """Return the greatest number of items of a page. Raise ConfigError if it is out of range."""
    return query.number("limit", PAGE_SIZE, low=1, high=MAX_PAGE_SIZE)


def read_version(parts: Parts) -> int:
    """Return the version number in a path. Raise ConfigError if it is not a number."""
    text = parts["version"]
    if not (text.isascii() and text.isdecimal() and len(text) <= 12 and 1 <= int(text) <= MAX_VERSION):
        raise ConfigError(
            f"{text[:80]!r} is not the number of a version; expected such as /versions/3. A tag is at /tags/NAME"
        )
    return int(text)


def cut_page(items: Sequence[Any], query: Query) -> tuple[tuple[Any, ...], int | None]:
    """Return the items of the page that a query selects by their positions, and the start of the next page."""
    start, limit = query.number("after", 0), read_limit(query)
    stop = start + limit
    return tuple(items[start:stop]), stop if stop < len(items) else None
