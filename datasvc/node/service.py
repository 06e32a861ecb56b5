"""Create and close the parts of a node: cache, origins, peers, staging jobs, and the web application.

`server` runs the application. This module ensures that only one process serves a cache.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from datasvc.cache import Cache, CacheStatus
from datasvc.cache.catalogue.object_locks import open_lock_file
from datasvc.cache.catalogue.tables import UnusableCatalogueError
from datasvc.cache.peers.membership import parse_membership
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError
from datasvc.loaders.decode.serving import DecodeServer
from datasvc.node.http.connection_limit import BoundedConnections
from datasvc.node.http.error_responses import check_access, respond_to_errors, stop_after_failure
from datasvc.node.http.metrics import CONTENT_TYPE, render_metrics
from datasvc.node.http.routes import DecodeRoutes, ObjectRoutes, StageRoutes
from datasvc.node.http.tenants import NodeAccess, NodeAccesses
from datasvc.node.settings import NodeSettings
from datasvc.node.transfers.fetching import Fetches
from datasvc.node.transfers.origins import Origins
from datasvc.node.transfers.sending import Sender
from datasvc.node.transfers.staging_jobs import StageJobs

_MAX_BODY_BYTES = 64 << 10  # of a request
_LOCK_NAME = "serve.lock"


class Service:
    """The parts of a node. Create it in a running event loop, and close it.

    Args:
        settings: settings of the node.
        request_stop: called in the event loop when the node cannot go on.

    Attributes:
        failure: why the node cannot go on; None if it can.

    Raises:
        ConfigError: another process serves this cache, or see `Cache` and `parse_membership`.
        NotFoundError: an origin does not exist.
        UnavailableError: an origin or the list of peers cannot be read.
    """

    def __init__(self, settings: NodeSettings, request_stop: Callable[[], None]) -> None:
        self.failure: UnusableCatalogueError | None = None
        self._settings = settings
        self._request_stop = request_stop
        self._is_stopping = False
        self._connections: BoundedConnections | None = None
        self._peers = _peers(settings)
        self._origins = Origins(settings.repositories, rate_bytes_s=settings.origin_rate_bytes_s)
        with ExitStack() as opening:
            self._cache = opening.enter_context(
                Cache(settings.folder, budget=settings.budget, tenant=settings.tenant)
            )
            opening.enter_context(_lock_for_serving(settings.folder))
            self._loop = asyncio.get_running_loop()
            whole = self._open_access(opening, None, settings.tenant, self._origins)
            tenants = {
                tenant.token: self._open_access(
                    opening, tenant.name, tenant.name, self._origins.only(tenant.repositories)
                )
                for tenant in settings.tenants
            }
            self._closing = opening.pop_all()  # all parts are open: `close` closes them
        self._accesses = NodeAccesses(settings.token, whole, tenants)
        self._decoding = DecodeServer(settings.decode_threads) if settings.decode_threads else None
        self._sender = Sender(settings.peer_rate_bytes_s, count=partial(self._cache.count, "served_bytes"))
        self._started_s = time.monotonic()

    def _open_access(self, opening: ExitStack, tenant: str | None, charged: str, origins: Origins) -> NodeAccess:
        """Return the access of a tenant, whose caches `opening` closes; None: of the node's own token."""
        folder = self._settings.folder
        # Two handles of the same cache: staging may read from peers, but fetches for peers read only from the origin,
        # see `fetching`.
        cache, staging = (
            opening.enter_context(Cache(folder, tenant=charged, peers=peers)) for peers in (None, self._peers)
        )
        return NodeAccess(tenant, origins, Fetches(cache), StageJobs(staging, stop_node=self._fail_from_thread))

    def application(self) -> web.Application:
        """Return the application of all routes."""
        # The first middleware runs first: access is checked before anything else.
        access = check_access(self._accesses, own_hosts(self._settings), self._authorize)
        middlewares: list[Middleware] = [access, respond_to_errors, stop_after_failure(self._fail)]
        application = web.Application(middlewares=middlewares, client_max_size=_MAX_BODY_BYTES)
        application.add_routes(ObjectRoutes(self._accesses, self._sender, self._cache.check).routes())
        application.add_routes(StageRoutes(self._accesses).routes())
        if self._decoding is not None:
            application.add_routes(DecodeRoutes(self._decoding).routes())
        application.add_routes(
            [
                web.get("/healthz", self._get_health),
                web.get("/livez", self._get_liveness),
                web.get("/status", self._get_status),
                web.get("/metrics", self._get_metrics),
            ]
        )
        return application

    def describe(self) -> dict[str, Any]:
        """Return the document of `/status`, `/metrics` and `datasvc top`. Call this in a thread, because it blocks.

        Raises:
            UnavailableError: the catalogue of the cache does not respond.
        """
        connections = self._connections
        traffic = {
            "num_connections": connections.num_open if connections else 0,
            "num_refused_connections": connections.num_refused if connections else 0,
            "max_connections": self._settings.max_connections,
            "num_fetches": sum(access.fetches.num_in_progress for access in self._accesses.all()),
        }
        reports = {} if self._peers is None else self._peers.report()
        return {
            "version": version("datasvc"),
            "process": os.getpid(),
            "up_s": round(time.monotonic() - self._started_s, 3),
            "cache": describe_cache(self._cache.status()),
            "disk": describe_disk(self._settings.folder),
            "serving": {**asdict(self._sender.sent), **traffic},
            "peers": {url: asdict(report) for url, report in reports.items()},
            "jobs": [job.describe() for access in self._accesses.all() for job in access.jobs.all()],
            **({} if self._decoding is None else {"decoding": self._decoding.describe()}),
        }

    def limit_connections(self, server: web.Server) -> BoundedConnections:
        """Return the protocol factory of `server` with the limit of connections."""
        self._connections = BoundedConnections(server, self._settings.max_connections)
        return self._connections

    def close_pending(self) -> None:
        """Close the connections that have sent no request. Call it in the event loop."""
        if self._connections is not None:
            self._connections.close_pending()

    def stop(self) -> None:
        """Report "stopping" in `/healthz`, cancel jobs, and fail reads that wait for bandwidth; sending continues."""
        self._is_stopping = True
        for access in self._accesses.all():
            access.jobs.cancel_all()
        self._origins.close()

    def close(self) -> bool:
        """Release everything, after waiting up to `grace_s` for fetches and jobs in progress.

        Returns:
            Whether all threads have ended. If not, the cache stays open for them until the process ends.
        """
        # Stop first, so that no new transfer starts while those in progress end.
        self.stop()
        self._sender.close()
        parts = [part for access in self._accesses.all() for part in (access.fetches, access.jobs)]
        deadline_s = time.monotonic() + self._settings.grace_s
        have_ended = [part.close(max(0.0, deadline_s - time.monotonic())) for part in parts]
        if self._decoding is not None:
            have_ended.append(self._decoding.close(max(0.0, deadline_s - time.monotonic())))
        if all(have_ended):
            self._closing.close()
        return all(have_ended)

    def _authorize(self, request: web.Request) -> None:
        if self._connections is not None:
            self._connections.authorize(request)

    def _fail_from_thread(self, error: UnusableCatalogueError) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: UnusableCatalogueError) -> None:
        self.failure = error
        self._request_stop()

    async def _get_liveness(self, _request: web.Request) -> web.Response:
        # 200 while it stops, too: a kubelet that restarted it then would cut the transfers that it completes.
        return web.json_response({"status": "alive"})

    async def _get_health(self, _request: web.Request) -> web.Response:
        status, text = (503, "stopping") if self._is_stopping else (200, "ok")
        return web.json_response({"status": text}, status=status)

    async def _get_status(self, _request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(self.describe))

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        body = await asyncio.to_thread(lambda: render_metrics(self.describe()))
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def own_hosts(settings: NodeSettings) -> frozenset[str]:
    """Return the names and addresses under which a node is requested, in lower case."""
    hosts = {settings.host.lower(), socket.gethostname().lower()}
    if settings.own_url is not None:
        hosts.add(urlsplit(settings.own_url).hostname or "")
    return frozenset(hosts)


def _peers(settings: NodeSettings) -> Peers | None:
    if settings.peers is None:
        return None
    peer_settings = PeerSettings(token=settings.token, ca_file=settings.ca_file, tls_name=settings.tls_name)
    return Peers(parse_membership(settings.peers, local_url=settings.own_url), peer_settings)


@contextmanager
def _lock_for_serving(folder: Path) -> Iterator[None]:
    """Lock a cache folder inside the block, so that only one process serves it. The lock ends with its process."""
    path = folder / _LOCK_NAME
    try:
        descriptor = open_lock_file(path)
    except OSError as error:
        raise ConfigError(f"cannot lock {path}: {error}; check the permissions of the cache folder") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise ConfigError(
                f"process {holder} already serves the cache {folder} (it has locked {_LOCK_NAME}); stop it first, or "
                "use another cache folder"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"cannot lock {path}: {error}; put the cache on a local disk with file locks"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # The file stays: if it were removed, two servers could lock two files of the same name.
        os.close(descriptor)


def describe_cache(status: CacheStatus) -> dict[str, Any]:
    """Return a cache's status as JSON values."""
    return {**asdict(status), "jobs": [job._asdict() for job in status.jobs]}


def describe_disk(folder: Path) -> dict[str, int]:
    """Return the size of the disk of a folder, and its free bytes."""
    usage = shutil.disk_usage(folder)
    return {"total_bytes": usage.total, "free_bytes": usage.free}
