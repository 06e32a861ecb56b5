"""Changes that pages follow, and their stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

from aiohttp import web

_SILENCE_S: Final = 15.0


class Changes:
    """Wakes the tasks that wait for the next change of something. All calls must be in one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all tasks that wait now."""
        changed, self._next = self._next, asyncio.Event()
        changed.set()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        await self._next.wait()


async def stream_events(request: web.Request, events: AsyncIterator[Any]) -> web.StreamResponse:
    """Send JSON values as server-sent events, until there are no more or the browser closes the connection.

    Args:
        request: request of the browser.
        events: the values; each is an event without a name. After the last one, an event "end" is sent.
    """
    response = web.StreamResponse(
        # A proxy that gathers the response, as nginx does by default, would hold events back.
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )
    await response.prepare(request)
    # Some proxies close a connection that is silent for a minute, so a comment follows each silence.
    pending: asyncio.Future[Any] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait([pending], timeout=_SILENCE_S)
            if done:
                value, pending = pending.result(), None
                await response.write(f"data: {json.dumps(value)}\n\n".encode())
            else:
                await response.write(b": still here\n\n")
    except StopAsyncIteration:
        await response.write(b"event: end\ndata: {}\n\n")
        return response
    except ConnectionResetError:
        return response
    finally:
        if pending is not None:
            pending.cancel()
