"""Listen, answer, and stop in good order: `serve` is the whole life of a node's process."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import Callable

from aiohttp import web

from datasvc.errors import ConfigError
from datasvc.node.service import Service
from datasvc.node.settings import NodeSettings

# A connection that asks nothing for so long is closed; peers that go on ask again.
_IDLE_S = 60.0
_HANDSHAKE_S = 10.0


def serve(settings: NodeSettings, ready: Callable[[str], None]) -> bool:
    """Run a node until SIGTERM or SIGINT: then new work is refused, and transfers under way get a grace to end.

    Args:
        settings: of the node.
        ready: called with the node's URL once it listens.

    Returns:
        Whether all threads have ended; otherwise end the process without waiting for them.

    Raises:
        ConfigError: another process serves this cache, or the address cannot be used; or as `Cache`.
        NotFoundError, UnavailableError: an origin cannot be opened.
    """
    return asyncio.run(_serve_until_signal(settings, ready))


async def run_node(settings: NodeSettings, ready: Callable[[str], None], told_to_stop: asyncio.Event) -> bool:
    """Run a node until an event is set; otherwise as `serve`."""
    context = settings.tls()
    service = Service(settings)
    try:
        await _answer_until(told_to_stop, service, settings, context, ready)
    finally:
        ended = await asyncio.to_thread(service.close)
    return ended


async def _serve_until_signal(settings: NodeSettings, ready: Callable[[str], None]) -> bool:
    told_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop.set)
    return await run_node(settings, ready, told_to_stop)


async def _answer_until(
    told_to_stop: asyncio.Event,
    service: Service,
    settings: NodeSettings,
    context: ssl.SSLContext | None,
    ready: Callable[[str], None],
) -> None:
    runner = web.AppRunner(
        service.application(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=_IDLE_S,
        shutdown_timeout=settings.grace_s,
    )
    await runner.setup()
    try:
        listener = await _listen(service, runner, settings, context)
        ready(_url(listener, is_secure=context is not None))
        await told_to_stop.wait()
        service.stop()
        listener.close()
    finally:
        await runner.cleanup()


async def _listen(
    service: Service, runner: web.AppRunner, settings: NodeSettings, context: ssl.SSLContext | None
) -> asyncio.Server:
    assert runner.server is not None
    try:
        return await asyncio.get_running_loop().create_server(
            service.bound(runner.server),
            settings.host,
            settings.port,
            ssl=context,
            ssl_handshake_timeout=_HANDSHAKE_S if context else None,
            reuse_address=True,
        )
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error}; choose another --port or --host"
        ) from error


def _url(listener: asyncio.Server, *, is_secure: bool) -> str:
    host, port = listener.sockets[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_secure else 'http'}://{shown}:{port}"
