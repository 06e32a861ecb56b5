"""The objects of this node's cache, whole or ranges of them, its staging jobs, and its decoding for loaders.

    GET  /objects/{digest}                      the object if it is resident, otherwise 404
    GET  /objects/{digest}?origin=URL&size=N    the object, fetched if needed from URL, an origin of this node; not
                                                fetched with &fetch=0
    HEAD /objects/{digest}                      its size if it is resident, otherwise 404
    POST /objects/{digest}/check                verify it again: {"found": "intact" | "corrupt" | "gone"}

With the token of a tenant, all these need `origin`: one of its repositories, which has the object.

If the object must be fetched, the response starts when it is complete and verified. Until then, the peer that waits
checks with `/healthz` that the node is running. A peer verifies the bytes again, and requests a check if they are
wrong. An object that is damaged on this disk is quarantined and no longer served.

    POST   /stage  {"repo": URL, "ref": "pets@1", "split": "train"}    202, the job; "repo" and "split" are optional
    GET    /stage                                                      all jobs
    GET    /stage/{id}                                                 one job: state, bytes, seconds, error
    DELETE /stage/{id}                                                 cancel a job; what has arrived stays resident

With `decode_threads`, it decodes images for the loaders of other machines, for every token, since it reads nothing:

    GET  /decode                                its threads, and the number of images so far
    POST /decode                                pixels of the images in the body, see `datasvc.loaders.decode.serving`
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web

from datasvc.cache.status import Finding
from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.loaders.decode.serving import MAX_REQUEST_BYTES, DecodeServer
from datasvc.node.http.error_responses import error_response
from datasvc.node.http.tenants import NodeAccess, NodeAccesses
from datasvc.node.transfers.sending import Sender
from datasvc.node.transfers.staging_jobs import StageJob
from datasvc.repository import Digest, ObjectInfo
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.versions.dataset import choose_split, open_dataset
from datasvc.shards.views.reference import ViewedDataset

_MAX_SIZE = 1 << 50  # bytes; no object is larger
_RANGE = re.compile(r"bytes[ \t]*=[ \t]*(\d*)-(\d*)[ \t]*", re.IGNORECASE | re.ASCII)
# A position with more digits is beyond any object, and int() of megabytes of digits is slow.
_MAX_DIGITS = 19


_FIELDS: Final = frozenset({"repo", "ref", "split"})
_PIXELS: Final = "application/octet-stream"
_BODY_TIMEOUT_S = 10.0  # so that a slow client cannot keep a request open


class UnsatisfiableRangeError(ValueError):
    """The range is beyond the end of the object; the response is 416."""


class ObjectRoutes:
    """Handlers of `/objects/`.

    Args:
        accesses: finds the access of a request, which has the repositories and the fetches.
        sender: sender of response bodies.
        check: verifies a resident object again; it blocks, and is called in a thread.
    """

    def __init__(
        self,
        accesses: NodeAccesses,
        sender: Sender,
        check: Callable[[Digest], Finding],
    ) -> None:
        self._accesses = accesses
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
        """Handle a GET."""
        digest = _digest(request)
        access = await self._checked_access(request, digest)
        async with access.fetches.resident(digest) as path:
            if path is not None:
                return await self._respond(request, digest, str(path))
        if "origin" not in request.query or request.query.get("fetch") == "0":
            raise NotFoundError(
                f"object {digest} is not resident here; add ?origin=URL&size=N, so that this node fetches it"
            )
        repository = access.origins.find(request.query["origin"])
        info = ObjectInfo(digest, _size(request))
        async with access.fetches.acquire(info, repository) as fetched:
            return await self._respond(request, digest, str(fetched))

    async def head(self, request: web.Request) -> web.StreamResponse:
        """Handle a HEAD: whether the object is resident, and its size."""
        digest = _digest(request)
        access = await self._checked_access(request, digest)
        async with access.fetches.resident(digest) as path:
            if path is None:
                raise NotFoundError(f"object {digest} is not resident here")
            response = web.StreamResponse(headers=_headers(digest))
            response.content_length = path.stat().st_size
            return response

    async def check(self, request: web.Request) -> web.Response:
        """Handle a POST: verify the object's bytes again."""
        digest = _digest(request)
        await self._checked_access(request, digest)
        async with self._checking:  # one at a time, so that many requests occupy at most one thread
            return web.json_response({"found": await asyncio.to_thread(self._check, digest)})

    async def _checked_access(self, request: web.Request, digest: Digest) -> NodeAccess:
        """Return the access of a request. Raise NotFoundError: it is that of a tenant who may not read the object."""
        access = self._accesses.of(request)
        if access.tenant is not None:
            await asyncio.to_thread(access.check_object, digest, request.query.get("origin"))
        return access

    async def _respond(self, request: web.Request, digest: Digest, path: str) -> web.StreamResponse:
        # The file is open until the response is sent: its bytes stay readable even if it is moved to the quarantine.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size_bytes = os.fstat(file).st_size
            try:
                byte_range = parse_range(_range_header(request, digest), size_bytes)
            except UnsatisfiableRangeError as error:
                refusal = error_response(416, str(error))
                refusal.headers["Content-Range"] = f"bytes */{size_bytes}"
                return refusal
            start, stop = byte_range or (0, size_bytes)
            response = web.StreamResponse(status=206 if byte_range else 200, headers=_headers(digest))
            response.content_length = stop - start
            if byte_range:
                response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size_bytes}"
            async with self._sender.stream():
                await self._sender.send(request, response, file, start, stop)
            return response
        finally:
            os.close(file)


def _digest(request: web.Request) -> Digest:
    try:
        return parse_digest(request.match_info["digest"])
    except CorruptDataError as error:
        # The request is wrong (400); a CorruptDataError would mean damaged data (502).
        raise ConfigError(str(error)) from error


def _size(request: web.Request) -> int:
    text = request.query.get("size", "")
    # Limit the digits before int(), which is slow for megabytes of digits.
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) > _MAX_SIZE:
        raise ConfigError(f"?size={text[:40]} is not a valid size; expected the object's bytes from its shard table")
    return int(text)


def _headers(digest: Digest) -> dict[str, str]:
    return {
        "Accept-Ranges": "bytes",
        "Cache-Control": "immutable, private",
        "Content-Type": "application/octet-stream",
        "ETag": f'"{digest}"',
    }


def _range_header(request: web.Request, digest: Digest) -> str | None:
    """Return the `Range` header; None if there is none, or if its condition `If-Range` is not for this object."""
    condition = request.headers.get("If-Range")
    return request.headers.get("Range") if condition in (None, f'"{digest}"') else None


def parse_range(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Return the half-open `(start, stop)` of a `Range` header (RFC 9110, section 14) for an object of `size_bytes`.

    Returns:
        None for a response with the whole object: there is no header, or one that a server must ignore (another
        unit, several ranges, invalid syntax).

    Raises:
        UnsatisfiableRangeError: no byte of the object is in the range.
    """
    match = _RANGE.fullmatch(header or "")
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if max(len(first), len(last)) > _MAX_DIGITS:
        return None
    # Without a first byte, the header requests the last bytes of the object.
    if not first:
        start, stop = max(0, size_bytes - int(last)), size_bytes
    else:
        start, stop = int(first), min(size_bytes, int(last) + 1) if last else size_bytes
        if last and int(last) < int(first):  # not a valid range
            return None
    if start >= size_bytes or start >= stop:
        raise UnsatisfiableRangeError(f"the range {header!r} has no byte of an object of {size_bytes} bytes")
    return start, stop


class StageRoutes:
    """Handlers of `/stage`, for data sets of the repositories that a request has access to."""

    def __init__(self, accesses: NodeAccesses) -> None:
        self._accesses = accesses

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/stage", self.start),
            web.get("/stage", self.list),
            web.get("/stage/{id}", self.show),
            web.delete("/stage/{id}", self.cancel),
        ]

    async def start(self, request: web.Request) -> web.Response:
        """Start a job. If the reference does not resolve, this request fails, and no job is made."""
        body = await _read_body(request)
        job = await asyncio.to_thread(
            self._start, self._accesses.of(request), body["ref"], body.get("repo"), body.get("split")
        )
        return web.json_response(job.describe(), status=202, headers={"Location": f"/stage/{job.id}"})

    async def list(self, request: web.Request) -> web.Response:
        """List the jobs; of a tenant, its own."""
        return web.json_response({"jobs": [job.describe() for job in self._accesses.of(request).jobs.all()]})

    async def show(self, request: web.Request) -> web.Response:
        """Show a job."""
        return web.json_response(self._accesses.of(request).jobs.find(request.match_info["id"]).describe())

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a job; the objects that have arrived stay resident."""
        job = self._accesses.of(request).jobs.find(request.match_info["id"])
        job.cancel()
        return web.json_response(job.describe())

    def _start(self, access: NodeAccess, ref: str, repo: str | None, split: str | None) -> StageJob:
        dataset = open_dataset(access.origins.find(repo), ref)
        # A condition would read the data set in this process, and write to the repository.
        if isinstance(dataset, ViewedDataset) and not dataset.is_stored:
            raise ConfigError(
                f"{ref} has a condition, and a node stages stored views only: store it with `datasvc view`, then "
                "give NAME[VIEW]"
            )
        # Remove credentials from the URL, because `/stage` shows the labels to every client.
        labels = {"repo": redact_url(dataset.repository.url), "ref": dataset.title, "split": split or ""}
        return access.jobs.start(choose_split(dataset, split), labels)


async def _read_body(request: web.Request) -> dict[str, str]:
    # Refuse other types: a web page in a browser on this machine could send some of them to the node. Before it sends
    # JSON, the browser asks the node for permission (a CORS preflight), which the node does not give.
    if request.content_type != "application/json":
        raise ConfigError("expected a body of type application/json")
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            body: Any = json.loads(await request.read())
    except TimeoutError as error:
        raise UnavailableError(f"the body did not arrive within {_BODY_TIMEOUT_S:g} s; send it again") from error
    except (ValueError, RecursionError, web.RequestPayloadError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict) or not all(isinstance(value, str) for value in body.values()):
        raise ConfigError('expected an object of strings, such as {"ref": "pets@1"}')
    # Refuse unknown fields, because ignoring a misspelled one would stage other data than intended.
    if unknown := sorted(body.keys() - _FIELDS):
        raise ConfigError(f"unknown fields: {', '.join(unknown)[:200]}; expected {', '.join(sorted(_FIELDS))}")
    if "ref" not in body:
        raise ConfigError('the body has no "ref"; expected a data set, such as {"ref": "pets@1"}')
    return body


class DecodeRoutes:
    """Handlers of `/decode`."""

    def __init__(self, server: DecodeServer) -> None:
        self._server = server
        # Bodies are in memory, so no more are read than can be decoded soon.
        self._reading = asyncio.Semaphore(2 * server.num_threads)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get("/decode", self.show), web.post("/decode", self.decode)]

    async def show(self, _request: web.Request) -> web.Response:
        """Show the threads, and the images decoded so far."""
        return web.json_response(self._server.describe())

    async def decode(self, request: web.Request) -> web.Response:
        """Decode the images in the body."""
        # As in `_read_body`: a web page in a browser on this machine cannot send this type without asking.
        # The header itself, because `content_type` is this type without one.
        if request.headers.get("Content-Type") != _PIXELS:
            raise ConfigError(f"expected a body of type {_PIXELS}")
        size_bytes = request.content_length
        if size_bytes is None or size_bytes > MAX_REQUEST_BYTES:
            raise ConfigError(f"expected a body with a Content-Length of at most {MAX_REQUEST_BYTES} bytes")
        await self._reading.acquire()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                body = await request.content.readexactly(size_bytes)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            self._reading.release()
            raise UnavailableError(f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from error
        except BaseException:
            self._reading.release()
            raise
        # A client may leave. Its images are in memory until they are decoded, so they count until then.
        answering = asyncio.ensure_future(self._server.answer(body))
        answering.add_done_callback(self._end)
        return web.Response(body=await asyncio.shield(answering), content_type=_PIXELS)

    def _end(self, answering: asyncio.Future[bytes]) -> None:
        self._reading.release()
        if not answering.cancelled():
            answering.exception()  # reads the error, or asyncio would log it if the client has left
