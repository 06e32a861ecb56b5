"""The routes of pages: HTML, the JSON twin below `/api`, and errors as pages or JSON."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler
from jinja2 import Environment

from datasvc.errors import CorruptDataError, DatasvcError, UnavailableError
from datasvc.node.http.error_responses import status_of
from datasvc.sql_sandbox import QueryLimits, limited
from datasvc.ui.caches import KeptPages
from datasvc.ui.web.access import API, PARTS, REGISTRY, is_for_programs
from datasvc.ui.web.live import PARTS_HEADER, LivePage, RenderedParts, changed_parts, stream_states
from datasvc.ui.web.page import Page, Parts, Problem, Query, RawResponse
from datasvc.ui.web.rendering import render, render_problems
from datasvc.ui.web.seen_faults import collect_unreadable
from datasvc.ui.web.site import Load, Site

_YEAR_S: Final = 365 * 86400
_PATIENCE_S: Final = 5.0  # before a kept page is shown, or one that says what is waited for
_LATE_KEPT_S: Final = 60.0
_QUERY_TIME_S: Final = 10.0
_QUERY_MEMORY_BYTES: Final = 64 << 20
_QUERY_SPILLED_BYTES: Final = 1 << 30
_MAIN: Final = '<main id="main" tabindex="-1">'  # of `base.html`; problems are its first content
_PICTURE: Final = "/image/{column}"
# Pictures take long to decode: all that a page shows may not hold the threads of other pages.
_PICTURES: Final = ThreadPoolExecutor(4, "datasvc-ui-pictures")
_ELEMENT: Final = re.compile("[a-z-]{1,40}")

_LOG = logging.getLogger(__name__)


class PageRoutes:
    """Responds to the requests for pages.

    Args:
        site: what the pages read.
        environment: templates.
        pages: function of each page by path, such as "/datasets/{ref}".
        live_pages: how those that change are followed, by path.
    """

    def __init__(
        self,
        site: Site,
        environment: Environment,
        pages: Mapping[str, Load],
        live_pages: Mapping[str, LivePage],
    ) -> None:
        self._site = site
        self._environment = environment
        self._pages = pages
        self._live_pages = live_pages
        self._kept = KeptPages()
        self._rendered = RenderedParts()
        # Pages that are still read after another one was shown, by address: the next request waits for the same.
        self._late: dict[str, asyncio.Task[web.Response]] = {}

    def add_to(self, app: web.Application) -> None:
        """Add the routes of all pages and of their JSON twins."""
        for path, load in self._pages.items():
            threads = _PICTURES if path.endswith(_PICTURE) else None
            app.router.add_get(path, self.handler(partial(self._respond_html, load), threads))
            app.router.add_get(f"{API}{path}", self.handler(partial(self._respond_json, load), threads))
        for path, live in self._live_pages.items():
            app.router.add_get(f"{API}{path.rstrip('/')}/events", partial(stream_states, live, self._site))
            app.router.add_get(f"{PARTS}{path}", self.handler(partial(self._respond_parts, live)))

    def handler(self, respond: Callable[[web.Request], web.Response], threads: Executor | None = None) -> Handler:
        """Return the handler that calls `respond` in one of `threads`, with limits for the queries of the request."""

        async def handle(request: web.Request) -> web.StreamResponse:
            limits = QueryLimits(
                time_s=_QUERY_TIME_S, memory_bytes=_QUERY_MEMORY_BYTES, spilled_bytes=_QUERY_SPILLED_BYTES
            )

            def work() -> web.Response:
                try:
                    with limited(limits):
                        return respond(request)
                except StopIteration as error:
                    # A future cannot have this error: the request would wait for ever.
                    raise RuntimeError("a page raised StopIteration") from error
                except CorruptDataError as error:
                    self._site.faults.note(error, request.path_qs.removeprefix(API))
                    raise

            # Rendering too: the HTML or JSON of a large page takes as long as reading it.
            late = self._late.pop(request.path_qs, None) if _is_navigation(request) else None
            task = late or asyncio.create_task(_in_thread(threads, work))
            try:
                await asyncio.wait([task], timeout=_PATIENCE_S)
                if not task.done() and not is_for_programs(request.path):
                    reason = f"The store has not given this page within {_PATIENCE_S:g} s"
                    kept = self._kept_response(request, reason, "load it again later")
                    if kept is None and _is_navigation(request):
                        kept = self._waiting_response(request)
                    if kept is not None:
                        self._keep_late(request.path_qs, task)
                        return kept
                return await task
            except asyncio.CancelledError:
                # The reader has left, or the server stops.
                limits.stop()
                raise

        return handle

    def _keep_late(self, address: str, task: asyncio.Task[web.Response]) -> None:
        """Keep a page that is still read for the next request, for a while after its end."""

        def forget() -> None:
            if self._late.get(address) is task:
                del self._late[address]

        def end(ended: asyncio.Task[web.Response]) -> None:
            if not ended.cancelled() and (error := ended.exception()) is not None:
                _LOG.info("a page that came too late for its request has failed: %s", error)
            ended.get_loop().call_later(_LATE_KEPT_S, forget)

        self._late[address] = task
        task.add_done_callback(end)

    def _respond_html(self, load: Load, request: web.Request) -> web.Response:
        try:
            page = self._load(load, request)
        except UnavailableError as error:
            kept = self._kept_response(request, "The store does not respond", str(error))
            if kept is None:
                raise
            return kept
        if isinstance(page, RawResponse):
            return _content_response(page)
        text = self._render(request, page)
        self._kept.put(request.path_qs, text)
        return _html_response(text)

    def _respond_parts(self, live: LivePage, request: web.Request) -> web.Response:
        """Respond with the parts of a live page that the browser does not have."""
        state = live.state(self._site, dict(request.match_info))

        def render() -> str:
            page = self._load(live.load, request)
            assert isinstance(page, Page)
            return self._render(request, page)

        parts = self._rendered.get(request.path_qs, state.version, render)
        response = web.json_response(changed_parts(parts, request.headers.get(PARTS_HEADER, "")))
        response.enable_compression()
        return response

    def _respond_json(self, load: Load, request: web.Request) -> web.Response:
        page = self._load(load, request)
        if isinstance(page, RawResponse):
            return _content_response(page)
        values = {name: panel.values for name, panel in page.panels.items()}
        values["problems"] = [problem.to_dict() for problem in page.problems]
        name = request.query.get("panel")
        if name is None:
            return web.json_response(values)
        if name not in values:
            raise web.HTTPNotFound(text=f"this page has no panel {name[:80]!r}; it has {', '.join(values)}")
        return web.json_response(values[name])

    def _load(self, load: Load, request: web.Request) -> Page | RawResponse:
        parts: Parts = dict(request.match_info)
        with collect_unreadable() as unreadable:
            page = load(self._site, parts, Query(request.query))
        if isinstance(page, RawResponse):
            return page
        return replace(page, problems=(*map(Problem, unreadable.messages()), *page.problems))

    def _kept_response(self, request: web.Request, reason: str, advice: str) -> web.Response | None:
        """Return the last good page with a problem on top; None if there is none."""
        kept = self._kept.get(request.path_qs)
        if kept is None:
            return None
        html, age_s = kept
        problem = Problem(f"{reason}, so this page is {round(age_s)} s old: {advice}")
        # Texts are escaped, so the element occurs once.
        return _html_response(html.replace(_MAIN, f"{_MAIN}\n{render_problems(self._environment, [problem])}", 1))

    def _waiting_response(self, request: web.Request) -> web.Response:
        """Return a page that says what is read, and loads the page again by itself."""
        page = Page(
            template="waiting.html",
            title="Not read yet",
            section="",
            panels={},
            view={"url": self._site.url, "patience_s": _PATIENCE_S, "path": request.path_qs},
        )
        response = _html_response(self._render(request, page), HTTPStatus.ACCEPTED)
        response.headers["Refresh"] = f"{_PATIENCE_S:g}"
        return response

    def _render(self, request: web.Request, page: Page) -> str:
        address = request.path_qs.removeprefix(PARTS)
        return render(
            self._environment,
            page,
            address=address,
            api_address=f"{API}{address}",
            search=request.query.get("q", ""),
        )

    @web.middleware
    async def respond_to_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Convert errors to a page, below `/api` to `{"error": message}`, below `/v1` to the JSON of RFC 9457."""
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
        except Exception as error:  # noqa: BLE001 - the top of a request
            # A defect of ours ends this page alone.
            _LOG.exception("%s has failed", request.path)
            text = (
                f"this page has failed ({type(error).__name__}: {error}); please report it with the server's output"
            )
            return self._error_response(request, HTTPStatus.INTERNAL_SERVER_ERROR, text)

    def _error_response(self, request: web.Request, status: int, message: str) -> web.Response:
        if request.path.startswith(f"{API}/"):
            return web.json_response({"error": message}, status=status)
        if request.path.startswith(f"{REGISTRY}/"):
            problem = {"title": HTTPStatus(status).phrase, "status": status, "detail": message}
            return web.json_response(problem, status=status, content_type="application/problem+json")
        # htmx replaces the element that it names; a message in place of it is better than no change.
        target = request.headers.get("HX-Target", "")
        page = Page(
            template="error.html",
            title=HTTPStatus(status).phrase,
            section="",
            panels={},
            view={
                "message": message,
                "url": self._site.url,
                "target": target if _ELEMENT.fullmatch(target) else "message",
            },
        )
        return _html_response(self._render(request, page), status)


async def _in_thread(threads: Executor | None, work: Callable[[], web.Response]) -> web.Response:
    """Like `asyncio.to_thread`, in threads of an executor; None: those of pages."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(threads, context.run, work)


def _is_navigation(request: web.Request) -> bool:
    """Return whether a browser loads a page into a window, and not an image or a part of a page."""
    return "text/html" in request.headers.get("Accept", "") and "HX-Request" not in request.headers


def _html_response(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, content_type="text/html", status=status)


def _content_response(content: RawResponse) -> web.Response:
    caching = f"private, max-age={_YEAR_S}, immutable" if content.is_immutable else "no-store"
    headers: dict[str, Any] = {"Cache-Control": caching}
    return web.Response(body=content.body, content_type=content.media_type, headers=headers)
