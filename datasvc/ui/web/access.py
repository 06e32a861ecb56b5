"""Who may read the pages: a token in a header or in a strict cookie, and a check of the host; security headers."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from http import HTTPStatus
from typing import Final
from urllib.parse import urlencode

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from datasvc.node.http.auth import is_authorized, is_own_host
from datasvc.node.http.connection_limit import FIRST_HEAD_S, BoundedConnections

LOGIN_PATH: Final = "/login"
STATIC_PATH: Final = "/static/"
API: Final = "/api"  # before the path of a page: its JSON twin
PARTS: Final = f"{API}/parts"  # before the path of a live page: the parts of it that have changed
REGISTRY: Final = "/v1"  # before the paths of the registry
_HEADERS: Final = {
    # Scripts, styles and images come from this server only; no inline script or style runs, whatever a template has.
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def is_for_programs(path: str) -> bool:
    """Return whether the responses of a path are JSON, also those of errors."""
    return path.startswith((f"{API}/", f"{REGISTRY}/"))


class Access:
    """Checks requests. In `connections`, those that have sent a request with access are counted; others are closed.

    Args:
        token: token that users need; None: none, but the `Host` header must name this machine's loopback.
        host: address that the server listens on.
    """

    def __init__(self, token: str | None, host: str) -> None:
        self._token = token
        self._host = host
        self.connections: BoundedConnections | None = None
        # A cookie of this process: it is no use after a restart, and does not reveal the token.
        self._session = secrets.token_urlsafe(32)

    def middleware(self) -> Middleware:
        """Return the middleware that refuses requests without access."""

        @web.middleware
        async def checking(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self._token is None and not is_own_host(request.headers.get("Host", ""), {self._host}):
                # DNS rebinding: another site's name points to this machine, and its page reads ours.
                raise web.HTTPMisdirectedRequest(
                    text=f"this page is not {request.headers.get('Host', '')[:80]!r}; "
                    "use the address that `datasvc ui` prints, or a token"
                )
            if _is_foreign(request):
                # Without a token, an image of any page in the browser could otherwise start a query here.
                raise web.HTTPForbidden(
                    text="this address was requested by the page of another site; open it yourself"
                )
            if not self._is_open(request.path) and not self._is_allowed(request):
                if is_for_programs(request.path):
                    raise web.HTTPUnauthorized(
                        text="the page requires a token: Authorization: Bearer TOKEN",
                        headers={"WWW-Authenticate": "Bearer"},
                    )
                raise web.HTTPSeeOther(f"{LOGIN_PATH}?{urlencode({'next': request.path_qs})}")
            if self.connections is not None and self._is_allowed(request):
                self.connections.authorize(request)
            return await handler(request)

        return checking

    async def add_headers(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Add the headers of all responses, also of errors and streams, before they are sent."""
        if self.connections is not None and not self.connections.is_authorized(request):
            response.force_close()  # so that strangers hold no connections
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        response.headers.setdefault("Cache-Control", "no-store")

    async def login(self, request: web.Request) -> web.StreamResponse:
        """Set the cookie if the form has the token, and lead to its page `next`. Raise HTTPForbidden otherwise."""
        try:
            form = await asyncio.wait_for(request.post(), FIRST_HEAD_S)  # a form is sent at once
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        given = str(form.get("token", ""))
        if not is_authorized(f"Bearer {given}", self._token):
            raise web.HTTPForbidden(text="this is not the token of this page; see --token-file of `datasvc ui`")
        response = web.Response(
            status=HTTPStatus.SEE_OTHER, headers={"Location": _own_page(str(form.get("next", "")))}
        )
        response.set_cookie(_cookie_name(request), self._session, httponly=True, samesite="Strict", path="/")
        return response

    def _is_open(self, path: str) -> bool:
        return path == LOGIN_PATH or path.startswith(STATIC_PATH)

    def _is_allowed(self, request: web.Request) -> bool:
        if is_authorized(request.headers.get("Authorization"), self._token):
            return True
        cookie = request.cookies.get(_cookie_name(request), "")
        return hmac.compare_digest(cookie.encode("utf-8", "surrogateescape"), self._session.encode())


ACCESS: Final = web.AppKey("access", Access)


def _is_foreign(request: web.Request) -> bool:
    """Return whether a page of another origin requests an address, other than by a link that opens it in a window.

    Browsers send these headers, and pages cannot change them. Programs do not send them.
    """
    if request.headers.get("Sec-Fetch-Site", "none") in {"none", "same-origin"}:
        return False
    # A frame is a navigation too, with another destination.
    opens = (request.method, request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest"))
    return opens != ("GET", "navigate", "document")


def _own_page(address: str) -> str:
    """Return the address of a page of this server; "/" if it may be another site's."""
    # A browser takes "//host" and "/\\host" for another host, and removes control characters before.
    is_own = address.startswith("/") and not address.startswith(("//", "/\\"))
    return address if is_own and address.isascii() and address.isprintable() else "/"


def _cookie_name(request: web.Request) -> str:
    """Return the name of the cookie. Cookies belong to a host, whatever the port: each server there has its own."""
    address = request.transport.get_extra_info("sockname") if request.transport else None
    return f"datasvc_page_{address[1]}" if isinstance(address, tuple) else "datasvc_page"
