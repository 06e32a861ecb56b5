"""Live pages: a stream of events that reports changes, and the parts of a page that have changed.

A browser holds one connection for the events of a page. After each event it asks for the parts, with the digests of
those that it has, and gets the others. All readers of a page share one rendering of each of its states.
"""

from __future__ import annotations

import asyncio
import hashlib
import html as html_module
import json
import re
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from datasvc.errors import DatasvcError, NotFoundError
from datasvc.ui.web.page import Parts

if TYPE_CHECKING:
    from datasvc.ui.web.site import Load, Site

PARTS_HEADER: Final = "Datasvc-Parts"
"""Header of a request for parts: what the page has, as `ID=DIGEST` separated by spaces; without a digest: wanted."""
_PAUSE_S: Final = 0.5
_SILENCE_S: Final = 15.0
_MAX_STATES: Final = 8  # of which each may take half a megabyte
# Texts and attributes are escaped, so tags are found without a parser. Each live part is a `div`.
_LIVE: Final = re.compile(r"<div\b[^>]*\bdata-live\b[^>]*>")
_DIV: Final = re.compile(r"<(/?)div\b")
_ID: Final = re.compile(r'\bid="([^"]*)"')
_SERIES: Final = re.compile(r'\bdata-series="([^"]*)"')


@dataclass(frozen=True)
class PageState:
    """The state of a live page.

    Attributes:
        version: text that differs whenever the live parts of the page do.
        shape: text that differs when other parts than the live ones do: the whole page must be loaded again.
        is_over: whether the page will not change any more.
    """

    version: str
    shape: str = ""
    is_over: bool = False


@dataclass(frozen=True)
class LivePage:
    """How a page is followed.

    Attributes:
        state: returns its present state; cheap, called about twice a second for each reader.
        load: returns the page, or a page that has its live parts only.
    """

    state: Callable[[Site, Parts], PageState]
    load: Load


@dataclass(frozen=True)
class LivePart:
    """A part of a page, by its element.

    Attributes:
        digest: of its content.
        content: `{"html": text}`; of a chart that a script draws, `{"series": JSON}` instead.
    """

    digest: str
    content: Mapping[str, str]


@dataclass
class _RenderedState:
    parts: Mapping[str, LivePart] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class RenderedParts:
    """The parts of the last states of live pages, each rendered once for all readers. Thread-safe."""

    def __init__(self) -> None:
        self._states: OrderedDict[tuple[str, str], _RenderedState] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, address: str, version: str, render: Callable[[], str]) -> Mapping[str, LivePart]:
        """Return the live parts of a page by the id of their element.

        Args:
            address: address of the page.
            version: version of its state.
            render: returns the HTML of this state, or of a newer one. Its errors are raised.
        """
        with self._lock:
            state = self._states.setdefault((address, version), _RenderedState())
            self._states.move_to_end((address, version))
            while len(self._states) > _MAX_STATES:
                self._states.popitem(last=False)
        with state.lock:
            if state.parts is None:
                state.parts = split_parts(render())
            return state.parts


def split_parts(html: str) -> dict[str, LivePart]:
    """Return the live parts of a page by the id of their element, in the order of the page."""
    parts = {}
    for start in _LIVE.finditer(html):
        name = _ID.search(start[0])
        assert name is not None, "a live part has an id"
        if (series := _SERIES.search(start[0])) is not None:
            content = {"series": html_module.unescape(series[1])}
        else:
            content = {"html": html[start.end() : _end_of_div(html, start.end())]}
        parts[html_module.unescape(name[1])] = LivePart(_digest(content), content)
    return parts


def changed_parts(parts: Mapping[str, LivePart], header: str) -> dict[str, Any]:
    """Return the response to a request for parts: those that the page wants and has with another content.

    Args:
        parts: live parts of the page.
        header: value of `PARTS_HEADER`.
    """
    present = dict(item.partition("=")[::2] for item in header.split())
    changed = {
        name: {"digest": part.digest, **part.content}
        for name, part in parts.items()
        if name in present and present[name] != part.digest
    }
    return {"parts": changed, "ids": list(parts)}


async def stream_states(live: LivePage, site: Site, request: web.Request) -> web.StreamResponse:
    """Send an event whenever the state of a page has changed; end when it is over."""
    parts: Parts = dict(request.match_info)
    first = await asyncio.to_thread(live.state, site, parts)

    async def states() -> AsyncIterator[tuple[str, Any]]:
        # The first event tells a page that was loaded before the stream began to load its parts again.
        state: PageState | str = first
        yield "message", _event_of(first)
        while isinstance(state, str) or not state.is_over:
            await asyncio.sleep(_PAUSE_S)
            new: PageState | str
            try:
                new = await asyncio.to_thread(live.state, site, parts)
            except NotFoundError:
                return  # deleted, for example by `gc`
            except DatasvcError as error:
                new = str(error)  # the store may respond again; until then the page keeps its values
            if new != state:
                state = new
                yield ("failing", {"error": state}) if isinstance(state, str) else ("message", _event_of(state))

    return await _stream_events(request, states())


def _event_of(state: PageState) -> dict[str, str]:
    return {"version": state.version, "shape": state.shape}


async def _stream_events(request: web.Request, events: AsyncIterator[tuple[str, Any]]) -> web.StreamResponse:
    """Send names with JSON values as server-sent events, until there are no more or the browser ends the connection.

    After the last one, an event "end" is sent.
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
                (name, value), pending = pending.result(), None
                await response.write(f"event: {name}\ndata: {json.dumps(value)}\n\n".encode())
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


def _end_of_div(html: str, start: int) -> int:
    """Return where the content of a `div` ends that starts at `start`."""
    depth = 1
    for tag in _DIV.finditer(html, start):
        depth += -1 if tag[1] else 1
        if not depth:
            return tag.start()
    raise AssertionError("a live part has an end")


def _digest(content: Mapping[str, str]) -> str:
    return hashlib.blake2b("".join(content.values()).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
