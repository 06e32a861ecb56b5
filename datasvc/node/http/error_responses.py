"""What goes wrong, as answers of HTTP: our errors and aiohttp's become JSON, once, for all handlers."""

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

# The first that fits. A peer that gets any of them asks another source.
_STATUS: Final[tuple[tuple[type[DatasvcError], int], ...]] = (
    (CacheFullError, 507),
    (NotFoundError, 404),
    (ConfigError, 400),
    (CorruptDataError, 502),
    (UnavailableError, 503),
    (DatasvcError, 500),
)
# Looked at by load balancers and kubelets, which have no token; it says nothing.
OPEN_PATHS: Final = frozenset({"/healthz"})


def status_of(error: DatasvcError) -> int:
    """Return the HTTP status that tells of an error."""
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def error_answer(status: int, message: str) -> web.Response:
    """Return `{"error": message}`."""
    return web.json_response({"error": message}, status=status)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what a handler raises."""
    try:
        return await handler(request)
    except DatasvcError as error:
        return error_answer(status_of(error), str(error))
    except web.HTTPException as error:
        answer = error_answer(error.status, error.reason)
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer


def check_token(token: str | None) -> Middleware:
    """Return a middleware that lets in only who knows `token`; everybody where it is None."""

    @web.middleware
    async def checking(request: web.Request, handler: Handler) -> web.StreamResponse:
        # Before anything else is looked at: without the token not even a bad path is told from a good one.
        if request.path in OPEN_PATHS or is_authorized(request.headers.get("Authorization"), token):
            return await handler(request)
        answer = error_answer(401, "this node asks for a token: Authorization: Bearer TOKEN")
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    return checking
