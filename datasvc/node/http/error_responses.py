"""Map exceptions of all handlers to JSON error responses, and check the bearer token."""

from __future__ import annotations

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from datasvc.errors import (
    CacheFullError,
    ConfigError,
    CorruptDataError,
    DatasvcError,
    NotFoundError,
    UnavailableError,
)
from datasvc.node.http.auth import is_authorized

# The status of the first class that matches. A peer that gets any of these tries another source.
_STATUS: Final[tuple[tuple[type[DatasvcError], int], ...]] = (
    (CacheFullError, 507),
    (NotFoundError, 404),
    (ConfigError, 400),
    (CorruptDataError, 502),
    (UnavailableError, 503),
    (DatasvcError, 500),
)
# Paths without a token, for load balancers and kubelets; `/healthz` reveals only whether the node runs.
_OPEN_PATHS: Final = frozenset({"/healthz"})


def status_of(error: DatasvcError) -> int:
    """Return the HTTP status for an error."""
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def error_response(status: int, message: str) -> web.Response:
    """Return `{"error": message}`."""
    return web.json_response({"error": message}, status=status)


@web.middleware
async def respond_to_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert exceptions of a handler to error responses."""
    try:
        return await handler(request)
    except DatasvcError as error:
        return error_response(status_of(error), str(error))
    except web.HTTPException as error:
        response = error_response(error.status, error.reason)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


def check_token(token: str | None) -> Middleware:
    """Return a middleware that requires the bearer token `token`; None: no token is required."""

    @web.middleware
    async def checking(request: web.Request, handler: Handler) -> web.StreamResponse:
        # Checked before all else: without the token, a response must not reveal whether a path exists.
        if request.path in _OPEN_PATHS or is_authorized(request.headers.get("Authorization"), token):
            return await handler(request)
        response = error_response(401, "this node requires a token: Authorization: Bearer TOKEN")
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    return checking
