"""`/objects/{digest}`: an object of this node's cache as a body, whole or from a byte on.

    GET  /objects/{digest}                      resident, or 404
    GET  /objects/{digest}?origin=URL&size=N    resident, or fetched first from that repository, if it is one of ours
    HEAD /objects/{digest}                      resident, or 404
    POST /objects/{digest}/check                read it again: {"found": "intact" | "corrupt" | "gone"}

An object that is fetched first is answered when it is here and verified; until then `/healthz` tells whoever waits
that the node lives. The bytes were verified when they arrived here; a peer verifies them again,
and has them checked where they turn out wrong: what has changed on this disk is put away, and given to nobody more.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from aiohttp import web

from datasvc.cache.scrub import Finding
from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.node.http.byte_range import UnsatisfiableRangeError, parse_range
from datasvc.node.http.error_responses import error_answer
from datasvc.node.transfers.fetching import Fetches
from datasvc.node.transfers.origins import Origins
from datasvc.node.transfers.residency import Residency
from datasvc.node.transfers.sending import Sender
from datasvc.repository import Digest, ObjectInfo
from datasvc.repository.objects.objects import parse_digest

_MAX_SIZE = 1 << 50


class ObjectRoutes:
    """Handlers of `/objects/`.

    Args:
        residency: what is here.
        fetches: what is on its way.
        origins: what it may come from.
        sender: of bodies.
        check: reads a resident object again; blocks.
    """

    def __init__(
        self,
        residency: Residency,
        fetches: Fetches,
        origins: Origins,
        sender: Sender,
        check: Callable[[Digest], Finding],
    ) -> None:
        self._residency = residency
        self._fetches = fetches
        self._origins = origins
        self._sender = sender
        self._check = check
        self._checking = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/objects/{digest}", self.get, allow_head=False),
            web.head("/objects/{digest}", self.head),
            web.post("/objects/{digest}/check", self.check),
        ]

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Answer a GET."""
        digest = _digest(request)
        async with self._residency.resident(digest) as path:
            if path is not None:
                return await self._answer(request, digest, str(path))
        if "origin" not in request.query:
            raise NotFoundError(f"object {digest} is not resident here; ?origin=URL&size=N lets this node fetch it")
        repository = self._origins.find(request.query["origin"])
        info = ObjectInfo(digest, _size(request))
        async with self._fetches.holding(info, repository) as fetched:
            return await self._answer(request, digest, str(fetched))

    async def head(self, request: web.Request) -> web.StreamResponse:
        """Answer a HEAD: whether the object is here, and its size."""
        digest = _digest(request)
        async with self._residency.resident(digest) as path:
            if path is None:
                raise NotFoundError(f"object {digest} is not resident here")
            answer = web.StreamResponse(headers=_headers(digest))
            answer.content_length = path.stat().st_size
            return answer

    async def check(self, request: web.Request) -> web.Response:
        """Answer a POST: what a look at the object's bytes found."""
        digest = _digest(request)
        async with self._checking:  # one at a time: whoever asks for many keeps no more than one thread busy
            return web.json_response({"found": await asyncio.to_thread(self._check, digest)})

    async def _answer(self, request: web.Request, digest: Digest, path: str) -> web.StreamResponse:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size_bytes = os.fstat(file).st_size
            try:
                found = parse_range(_range_header(request, digest), size_bytes)
            except UnsatisfiableRangeError as error:
                refusal = error_answer(416, str(error))
                refusal.headers["Content-Range"] = f"bytes */{size_bytes}"
                return refusal
            start, stop = found or (0, size_bytes)
            answer = web.StreamResponse(status=206 if found else 200, headers=_headers(digest))
            answer.content_length = stop - start
            if found:
                answer.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size_bytes}"
            async with self._sender.stream():
                await self._sender.send(request, answer, file, start, stop)
            return answer
        finally:
            os.close(file)


def _digest(request: web.Request) -> Digest:
    try:
        return parse_digest(request.match_info["digest"])
    except CorruptDataError as error:
        raise ConfigError(str(error)) from error


def _size(request: web.Request) -> int:
    text = request.query.get("size", "")
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) > _MAX_SIZE:
        raise ConfigError(f"?size={text[:40]} is no size of an object; expected its bytes, as its shard table says")
    return int(text)


def _headers(digest: Digest) -> dict[str, str]:
    return {
        "Accept-Ranges": "bytes",
        "Cache-Control": "immutable, private",
        "Content-Type": "application/octet-stream",
        "ETag": f'"{digest}"',
    }


def _range_header(request: web.Request, digest: Digest) -> str | None:
    condition = request.headers.get("If-Range")
    return request.headers.get("Range") if condition in (None, f'"{digest}"') else None
