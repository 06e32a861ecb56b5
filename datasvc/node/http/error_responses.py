"""Map exceptions of all handlers to JSON error responses, and check who may send a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from datasvc.cache.catalogue.tables import UnusableCatalogueError
from datasvc.errors import (
    BusyError,
    CacheFullError,
    ConfigError,
    CorruptDataError,
    DatasvcError,
    NotFoundError,
    UnavailableError,
)
from datasvc.node.http.auth import is_own_host
from datasvc.node.http.tenants import NodeAccesses

# An error gets the status of the first class here that it is an instance of. A peer that gets any of these statuses
# tries another source.
_STATUS: Final[tuple[tuple[type[DatasvcError], int], ...]] = (
    (CacheFullError, 507),
    (NotFoundError, 404),
    (ConfigError, 400),
    (CorruptDataError, 502),
    (UnavailableError, 503),
    (BusyError, 503),
    (DatasvcError, 500),
)
# Load balancers and kubelets request these paths without a token. They reveal only whether the node runs.
_OPEN_PATHS: Final = frozenset({"/healthz", "/livez"})
_OPERATOR_PATHS: Final = frozenset({"/status", "/metrics"})


def status_of(error: DatasvcError) -> int:
    """Return the HTTP status for an error."""
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def error_response(status: int, message: str) -> web.Response:
    """Return `{"error": message}`."""
    return web.json_response({"error": message}, status=status)


def stop_after_failure(stop: Callable[[UnusableCatalogueError], None]) -> Middleware:
    """Return a middleware that calls `stop` when the catalogue of the cache cannot be used any more."""

    @web.middleware
    async def checking(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except UnusableCatalogueError as error:
            stop(error)
            raise

    return checking


@web.middleware
async def respond_to_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert exceptions of a handler to error responses."""
    try:
        return await handler(request)
    except DatasvcError as error:
        return error_response(status_of(error), str(error))
    except web.HTTPException as error:
        response = error_response(error.status, error.reason)
        if "Allow" in error.headers:  # a response 405 must have this header
            response.headers["Allow"] = error.headers["Allow"]
        return response


def check_access(
    accesses: NodeAccesses, own_hosts: Collection[str], authorize: Callable[[web.Request], None]
) -> Middleware:
    """Return a middleware that refuses requests without access.

    Args:
        accesses: returns what the token of a request gives access to. If no token is required, the `Host` header must
            name this machine. This check prevents DNS rebinding: the author of a web page lets the page's host name
            point to this machine, and the page sends requests to the node from a browser on it.
        own_hosts: names and addresses of this node in the `Host` header, besides those of the loopback.
        authorize: called with each request that has access.
    """

    @web.middleware
    async def checking(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _OPEN_PATHS:
            response = await handler(request)
            # The connection does not count towards the limit of authorized ones, so it must end with this request.
            response.force_close()
            return response
        # Check access before the handler runs: without access, a response must not reveal whether a path exists.
        access = accesses.find(request)
        if access is None:
            refusal = error_response(401, "this node requires a token: Authorization: Bearer TOKEN")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            refusal.force_close()  # so that the connection does not count towards the limits any longer
            return refusal
        host = request.headers.get("Host")
        # A browser always sends `Host`, so a request without this header is not from a web page.
        if not accesses.needs_token and host is not None and not is_own_host(host, own_hosts):
            refusal = error_response(
                421, f"this node is not {host[:80]!r}; use the address that `datasvc serve` prints, or a token"
            )
            refusal.force_close()
            return refusal
        if access.tenant is not None and request.path in _OPERATOR_PATHS:
            return error_response(403, f"{request.path} needs the token of the node: it has facts of all tenants")
        authorize(request)
        return await handler(request)

    return checking


def log_briefly(record: logging.LogRecord) -> bool:
    """Shorten aiohttp's message about a request that is not valid HTTP to one line, without a traceback.

    A filter for aiohttp's logger. Any client can cause many of these messages.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
        lines = getattr(error, "message", "").splitlines()
        text = lines[0][:200] if lines else ""
        record.msg, record.args = "%s: %s: %s", (record.getMessage(), type(error).__name__, ascii(text))
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True
