"""What a node is made of, put together and taken apart: cache, origins, peers, jobs, and the web application."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from datasvc.cache import Cache
from datasvc.cache.peers.membership import parse_membership
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.node.folder_lock import only_server_of
from datasvc.node.http.connection_limit import BoundedConnections
from datasvc.node.http.error_responses import answer_errors, check_token
from datasvc.node.http.metrics import CONTENT_TYPE, render_metrics
from datasvc.node.http.object_routes import ObjectRoutes
from datasvc.node.http.stage_routes import StageRoutes
from datasvc.node.settings import NodeSettings
from datasvc.node.status import StatusSource
from datasvc.node.transfers.fetching import Fetches
from datasvc.node.transfers.origins import Origins
from datasvc.node.transfers.residency import Residency
from datasvc.node.transfers.sending import Sender
from datasvc.node.transfers.staging_jobs import StageJobs

_MAX_BODY_BYTES = 64 << 10


class Service:
    """A node's parts. Make it where an event loop runs, and close it.

    Args:
        settings: of the node.

    Raises:
        ConfigError: another process serves this cache; or as `Cache` and `parse_membership`.
        NotFoundError, UnavailableError: an origin or the peers cannot be found.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._is_stopping = False
        self._connections: BoundedConnections | None = None
        self._peers = _peers(settings)
        self._origins = Origins(settings.repositories, rate_bytes_s=settings.origin_rate_bytes_s)
        with ExitStack() as opening:
            cache = opening.enter_context(Cache(settings.folder, budget=settings.budget, tenant=settings.tenant))
            opening.enter_context(only_server_of(settings.folder))
            # What is staged may come from peers. What peers ask for may not, see `fetching`.
            staging = opening.enter_context(Cache(settings.folder, tenant=settings.tenant, peers=self._peers))
            self._closing = opening.pop_all()
        self._cache = cache
        self._jobs = StageJobs(staging)
        self._residency = Residency(cache)
        self._fetches = Fetches(cache)
        self._sender = Sender(settings.peer_rate_bytes_s, count=partial(cache.count, "served_bytes"))
        self._status = StatusSource(cache, self._jobs, self._sender.sent, self._traffic, self._peer_reports)

    def application(self) -> web.Application:
        """Return the application of all routes."""
        middlewares: list[Middleware] = [check_token(self._settings.token), answer_errors]
        application = web.Application(middlewares=middlewares, client_max_size=_MAX_BODY_BYTES)
        objects = ObjectRoutes(self._residency, self._fetches, self._origins, self._sender, self._cache.check)
        application.add_routes(objects.routes())
        application.add_routes(StageRoutes(self._jobs, self._origins).routes())
        application.add_routes(
            [
                web.get("/healthz", self._answer_health),
                web.get("/status", self._answer_status),
                web.get("/metrics", self._answer_metrics),
            ]
        )
        return application

    def bound(self, server: web.Server) -> BoundedConnections:
        """Return what makes the connections of `server`."""
        self._connections = BoundedConnections(server, self._settings.max_connections)
        return self._connections

    def stop(self) -> None:
        """Let `/healthz` say so, jobs end, and reads that wait for their turn fail; what is being sent goes on."""
        self._is_stopping = True
        self._jobs.cancel_all()
        self._origins.close()

    def close(self) -> bool:
        """Let go of everything, after a grace for what is under way.

        Returns:
            Whether all threads have ended. Otherwise the cache stays open below them, until the process ends.
        """
        self.stop()
        self._sender.close()
        self._residency.close()
        ended = [each.close(self._settings.grace_s) for each in (self._fetches, self._jobs)]
        if all(ended):
            self._closing.close()
        return all(ended)

    async def _answer_health(self, _request: web.Request) -> web.Response:
        status, text = (503, "stopping") if self._is_stopping else (200, "ok")
        return web.json_response({"status": text}, status=status)

    async def _answer_status(self, _request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(self._status.describe))

    async def _answer_metrics(self, _request: web.Request) -> web.Response:
        body = await asyncio.to_thread(render_metrics, self._status.describe)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    def _traffic(self) -> dict[str, int]:
        connections = self._connections
        return {
            "num_connections": connections.num_open if connections else 0,
            "num_refused_connections": connections.num_refused if connections else 0,
            "max_connections": self._settings.max_connections,
            "num_fetches": self._fetches.num_under_way,
        }

    def _peer_reports(self) -> dict[str, Any]:
        reports = {} if self._peers is None else self._peers.report()
        return {url: asdict(report) for url, report in reports.items()}


def _peers(settings: NodeSettings) -> Peers | None:
    if settings.peers is None:
        return None
    talk = PeerSettings(token=settings.token, ca_file=settings.ca_file, tls_name=settings.tls_name)
    return Peers(parse_membership(settings.peers, own=settings.own_url), talk)
