"""Runs the page's server: `datasvc ui`. It only reads, so it can be stopped at any time."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from aiohttp import web

from datasvc.cache.peers.membership import bracketed
from datasvc.drawing import style_sheet
from datasvc.drawing.colours import NUM_COLOURS, colour_values
from datasvc.errors import ConfigError, DatasvcError, NotFoundError
from datasvc.node.http.connection_limit import BoundedConnections
from datasvc.repository import Repository
from datasvc.ui.pages import (
    audit,
    cluster,
    compare,
    dataset,
    diff,
    home,
    lineage,
    model,
    planner,
    run_comparison,
    runs,
    samples,
    search,
)
from datasvc.ui.pages.sample_records import batches, certificates, signals
from datasvc.ui.registry.routes import add_registry
from datasvc.ui.settings import UiSettings
from datasvc.ui.web.access import ACCESS, LOGIN_PATH, STATIC_PATH, Access
from datasvc.ui.web.live import LivePage
from datasvc.ui.web.rendering import make_environment
from datasvc.ui.web.routes import PageRoutes
from datasvc.ui.web.seen_faults import catch_unreadable
from datasvc.ui.web.site import Load, Site

# Function of each page by path. Its JSON twin has the same path below `/api`.
PAGES: Final[Mapping[str, Load]] = {
    "/": home.load,
    "/search": search.load,
    "/datasets": home.load_datasets,
    "/datasets/{ref}": dataset.load,
    "/datasets/{ref}/certificates/{certificate}": certificates.load,
    "/diff/{old}/{new}": diff.load,
    "/datasets/{ref}/samples/{split}": samples.load_page,
    "/datasets/{ref}/samples/{split}/{position}": samples.load_sample,
    "/datasets/{ref}/samples/{split}/{position}/image/{column}": samples.load_image,
    "/models": home.load_models,
    "/models/{ref}": model.load,
    "/lineage/{ref}": lineage.load,
    "/audit/{ledger}": audit.load,
    "/compare": compare.load,
    "/compare/{a}/{b}": compare.load,
    "/runs": runs.load_list,
    "/runs/compare": run_comparison.load,
    "/runs/{name}/{id}": runs.load,
    "/runs/{name}/{id}/batch": batches.load,
    "/runs/{name}/{id}/batch/image/{column}": batches.load_image,
    "/runs/{name}/{id}/signals/{signal}": signals.load,
    "/cluster": cluster.load,
    "/planner": planner.load,
}
LIVE_PAGES: Final[Mapping[str, LivePage]] = {
    "/": LivePage(home.state_of, home.load_live),
    "/cluster": LivePage(cluster.state_of, cluster.load),
    "/runs/{name}/{id}": LivePage(runs.state_of, runs.load),
}
_STATIC: Final = Path(__file__).with_name("static")
_PAGES_AT_ONCE: Final = 16
_MAX_CONNECTIONS: Final = 256  # a browser opens six, and one for each live page
_MAX_ADDRESS_BYTES: Final = 32 << 10  # the Planner's has the costs of a profile
_GRACE_S: Final = 2.0
_OPENING_S: Final = 2.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def make_app(site: Site) -> web.Application:
    """Return the web application of all pages."""
    environment = make_environment()
    routes = PageRoutes(site, environment, PAGES, LIVE_PAGES)
    access = Access(site.settings.token, site.settings.host)
    app = web.Application(middlewares=[routes.respond_to_errors, access.middleware()])
    app.on_response_prepare.append(access.add_headers)
    app.cleanup_ctx.append(partial(_follow_nodes, site))
    app[ACCESS] = access
    routes.add_to(app)
    add_registry(app, site, routes)
    app.router.add_post(LOGIN_PATH, access.login)

    async def show_login(request: web.Request) -> web.Response:
        text = environment.get_template("login.html").render(next=request.query.get("next", "/"))
        return web.Response(text=text, content_type="text/html")

    async def show_drawing_styles(_: web.Request) -> web.Response:
        return web.Response(text=_drawing_styles(), content_type="text/css")

    app.router.add_get(LOGIN_PATH, show_login)
    app.router.add_get(f"{STATIC_PATH}drawing.css", show_drawing_styles)
    app.router.add_static(STATIC_PATH, _STATIC)
    return app


async def _follow_nodes(site: Site, _: web.Application) -> AsyncIterator[None]:
    """Read the nodes while the server runs."""
    task = asyncio.create_task(site.nodes.run())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def serve(settings: UiSettings, ready: Callable[[str], None]) -> None:
    """Serve the pages until SIGTERM or SIGINT. The process ends then: soon after the first one, at once by a second.

    Args:
        settings: settings of the server.
        ready: called with the address of the page once the server listens.

    Raises:
        ConfigError: the address, or the URL of the repository, cannot be used.
        NotFoundError: there is no repository. A store that does not answer is no error here: the pages show it.
    """
    _check_repository(settings.repository)
    asyncio.run(_serve_until_signal(settings, ready))


async def run_ui(settings: UiSettings, ready: Callable[[str], None], stop_requested: asyncio.Event) -> None:
    """Like `serve`, but until `stop_requested` is set."""
    site = Site(settings)
    # The default has one thread for each processor and four more: a few slow pages would stop all others.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_PAGES_AT_ONCE, "datasvc-ui"))
    app = make_app(site)
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.5,
        max_line_size=_MAX_ADDRESS_BYTES,
        max_field_size=_MAX_ADDRESS_BYTES,  # htmx sends the address in a header
    )
    await runner.setup()
    try:
        with catch_unreadable():
            assert runner.server is not None
            connections = BoundedConnections(runner.server, _MAX_CONNECTIONS)
            app[ACCESS].connections = connections
            listener = await _listen(connections, settings)
            try:
                host, port = listener.sockets[0].getsockname()[:2]
                ready(f"http://{bracketed(host)}:{port}/")
                await stop_requested.wait()
            finally:
                listener.close()
                connections.close_pending()
    finally:
        await runner.cleanup()


def _drawing_styles() -> str:
    """Return the style sheet of drawings, and their colours as the variables `--c0` to `--c7` for scripts."""
    light, dark = (
        " ".join(f"--c{number}: {colour_values(f'c{number}')[column]};" for number in range(NUM_COLOURS))
        for column in (0, 1)
    )
    variables = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return f"{variables}\n{style_sheet()}"


async def _serve_until_signal(settings: UiSettings, ready: Callable[[str], None]) -> None:
    stop_requested = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        # Python waits for all threads at its end, and one of them may wait for a store that does not respond. The
        # server only reads, so it can end without them.
        timer = threading.Timer(_GRACE_S, os._exit, (0,))
        timer.daemon = True
        timer.start()
        stop_requested.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    await run_ui(settings, ready, stop_requested)


def _check_repository(url: str) -> None:
    """Raise ConfigError or NotFoundError if it is soon clear that there is no repository at `url`."""
    errors: list[DatasvcError] = []

    def open_repository() -> None:
        try:
            Repository.open(url, read_only=True)
        except DatasvcError as error:
            errors.append(error)

    # A thread that may be left behind: the pages are there for a store that does not respond too.
    opening = threading.Thread(target=open_repository, daemon=True)
    opening.start()
    opening.join(_OPENING_S)
    if errors and isinstance(errors[0], ConfigError | NotFoundError):
        raise errors[0]


async def _listen(connections: BoundedConnections, settings: UiSettings) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(connections, settings.host, settings.port, reuse_address=True)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error}; choose another --port or --host"
        ) from error
