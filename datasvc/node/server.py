"""Runs a node: listens, responds, and stops. For `datasvc serve`, and for the child process of a job (`embedded`).

When a node stops, it starts no new work, and gives the transfers in progress a grace period to end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable
from importlib.metadata import version

from aiohttp import web

from datasvc.cache.peers.membership import bracketed
from datasvc.errors import ConfigError
from datasvc.node.http.error_responses import log_briefly
from datasvc.node.service import Service
from datasvc.node.settings import NodeSettings

_logger = logging.getLogger(__name__)

# An idle connection is closed after this time; peers open a new one for the next request.
_IDLE_S = 60.0
_HANDSHAKE_S = 5.0
# After a response, the rest of the request's body is received and dropped for up to this time. Otherwise the client
# might not read the response.
_LINGERING_S = 1.0


def serve(settings: NodeSettings, ready: Callable[[str], None]) -> bool:
    """Run a node until SIGTERM or SIGINT; then refuse new work, and give transfers in progress time to end.

    Args:
        settings: settings of the node.
        ready: called with the node's URL once the node listens.

    Returns:
        Whether all threads have ended; if not, the caller must end the process without waiting for them.

    Raises:
        ConfigError: another process serves this cache, the address or the certificate cannot be used, or see
            `Service`.
        NotFoundError: an origin does not exist.
        UnavailableError: an origin does not respond; or the disk of the cache failed, which ended the node.
    """
    return asyncio.run(_serve_until_signal(settings, ready))


async def run_node(settings: NodeSettings, ready: Callable[[str], None], stop_requested: asyncio.Event) -> bool:
    """Like `serve`, but run the node until `stop_requested` is set."""
    # Loaded before the cache is opened, so that a wrong certificate has no side effect.
    context = settings.tls()
    service = Service(settings, stop_requested.set)
    try:
        await _respond_until(stop_requested, service, settings, context, ready)
    finally:
        ended = await asyncio.to_thread(service.close)
        _logger.info("stopped%s", "" if ended else ", with transfers in progress")
    if service.failure is not None:
        # A new process can open the catalogue again: end this one by the error; a service manager restarts it.
        raise service.failure
    return ended


async def _serve_until_signal(settings: NodeSettings, ready: Callable[[str], None]) -> bool:
    stop_requested = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_requested.set)
    return await run_node(settings, ready, stop_requested)


async def _respond_until(
    stop_requested: asyncio.Event,
    service: Service,
    settings: NodeSettings,
    context: ssl.SSLContext | None,
    ready: Callable[[str], None],
) -> None:
    runner = web.AppRunner(
        service.application(),
        access_log=None,
        logger=_http_logger(),
        lingering_time=_LINGERING_S,
        handler_cancellation=True,  # when a peer disconnects, its handler ends and releases the object
        keepalive_timeout=_IDLE_S,
        shutdown_timeout=settings.grace_s,
    )
    await runner.setup()
    try:
        listener = await _listen(service, runner, settings, context)
        url = _url(listener, is_secure=context is not None)
        ready(url)
        _logger.info("serving %s at %s, version %s", settings.folder, url, version("datasvc"))
        await stop_requested.wait()
        _logger.info("stopping: transfers in progress have %g s to end", settings.grace_s)
        service.stop()
        listener.close()
        service.close_pending()
        # `cleanup` waits up to the grace period for the other connections.
    finally:
        await runner.cleanup()


async def _listen(
    service: Service, runner: web.AppRunner, settings: NodeSettings, context: ssl.SSLContext | None
) -> asyncio.Server:
    assert runner.server is not None
    try:
        return await asyncio.get_running_loop().create_server(
            service.limit_connections(runner.server),
            settings.host,
            settings.port,
            ssl=context,
            ssl_handshake_timeout=_HANDSHAKE_S if context else None,
            reuse_address=True,  # a restarted node can listen while old connections are in TIME_WAIT
        )
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error}; choose another --port or --host"
        ) from error


def _http_logger() -> logging.Logger:
    logger = logging.getLogger("datasvc.node.http")
    logger.addFilter(log_briefly)  # adding it again does nothing
    return logger


def _url(listener: asyncio.Server, *, is_secure: bool) -> str:
    host, port = listener.sockets[0].getsockname()[:2]
    return f"{'https' if is_secure else 'http'}://{bracketed(host)}:{port}"
