"""The routes of pages: HTML, the JSON twin below `/api`, and errors as pages."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler
from jinja2 import Environment

from datasvc.errors import DatasvcError, UnavailableError
from datasvc.node.http.error_responses import status_of
from datasvc.ui.web.page import Load, Page, Panel, Problem, Query, RawResponse
from datasvc.ui.web.rendering import render
from datasvc.ui.web.site import Site

API: Final = "/api"
_MAX_KEPT_PAGES: Final = 64
_YEAR_S: Final = 365 * 86400


class PageRoutes:
    """Responds to the requests for pages.

    Args:
        site: what the pages read.
        environment: templates.
        pages: function of each page by path, such as "/datasets/{ref}".
    """

    def __init__(self, site: Site, environment: Environment, pages: Mapping[str, Load]) -> None:
        self._site = site
        self._environment = environment
        self._pages = pages
        # Shown if the store does not respond. By address, the last used ones last, with the time in seconds.
        self._last_good: OrderedDict[str, tuple[Page, float]] = OrderedDict()

    def add_to(self, app: web.Application) -> None:
        """Add the routes of all pages and of their JSON twins."""
        for path, load in self._pages.items():
            app.router.add_get(path, self._html_handler(load))
            app.router.add_get(f"{API}{path}", self._json_handler(load))

    def _html_handler(self, load: Load) -> Handler:
        async def respond(request: web.Request) -> web.StreamResponse:
            try:
                page = await self._load(load, request)
            except UnavailableError as error:
                page = self._old_page(request, error)
            if isinstance(page, RawResponse):
                return _content_response(page)
            return self._page_response(request, page)

        return respond

    def _json_handler(self, load: Load) -> Handler:
        async def respond(request: web.Request) -> web.StreamResponse:
            page = await self._load(load, request)
            if isinstance(page, RawResponse):
                return _content_response(page)
            name = request.query.get("panel")
            if name is None:
                return web.json_response({name: panel.values for name, panel in page.panels.items()})
            if name not in page.panels:
                raise web.HTTPNotFound(text=f"this page has no panel {name[:80]!r}; it has {', '.join(page.panels)}")
            return web.json_response(page.panels[name].values)

        return respond

    async def _load(self, load: Load, request: web.Request) -> Page | RawResponse:
        page = await asyncio.to_thread(load, self._site, dict(request.match_info), Query(request.query))
        if isinstance(page, Page):
            address = request.path_qs.removeprefix(API)
            self._last_good[address] = page, time.time()
            self._last_good.move_to_end(address)
            if len(self._last_good) > _MAX_KEPT_PAGES:
                self._last_good.popitem(last=False)
        return page

    def _old_page(self, request: web.Request, error: UnavailableError) -> Page:
        """Return the last good values of a page with a problem on top; raise `error` if there are none."""
        if request.path_qs not in self._last_good:
            raise error
        page, loaded = self._last_good[request.path_qs]
        age_s = round(time.time() - loaded)
        problem = Problem(f"The store does not respond, so this page is {age_s} s old: {error}")
        return Page(**{**vars(page), "problems": (problem, *page.problems)})

    def _page_response(self, request: web.Request, page: Page, status: int = 200) -> web.Response:
        text = render(
            self._environment,
            page,
            address=request.path_qs,
            api_address=f"{API}{request.path_qs}",
            search=request.query.get("q", ""),
        )
        return web.Response(text=text, content_type="text/html", status=status)

    @web.middleware
    async def respond_to_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Convert errors to a page, or below `/api` to `{"error": message}`."""
        try:
            return await handler(request)
        except DatasvcError as error:
            return self._error_response(request, status_of(error), str(error))
        except web.HTTPException as error:
            if error.status < HTTPStatus.BAD_REQUEST:
                raise
            headers = {name: error.headers[name] for name in ("Allow", "WWW-Authenticate") if name in error.headers}
            response = self._error_response(request, error.status, error.text or error.reason)
            response.headers.update(headers)
            return response

    def _error_response(self, request: web.Request, status: int, message: str) -> web.Response:
        if request.path.startswith(f"{API}/"):
            return web.json_response({"error": message}, status=status)
        page = Page(
            template="error.html",
            title=HTTPStatus(status).phrase,
            section="",
            panels={"error": Panel({"error": message})},
            view={"status": status, "message": message, "url": self._site.url},
        )
        return self._page_response(request, page, status)


def _content_response(content: RawResponse) -> web.Response:
    caching = f"private, max-age={_YEAR_S}, immutable" if content.is_immutable else "no-store"
    headers: dict[str, Any] = {"Cache-Control": caching}
    return web.Response(body=content.body, content_type=content.media_type, headers=headers)
