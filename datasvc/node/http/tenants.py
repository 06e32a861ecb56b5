"""Tenants of a node: tokens of their own, each bound to a quota of the cache and to repositories that it may read.

A tenant gets an object only if one of its repositories has it, even if the object is resident because another tenant
has read it. The token of the node itself is not bound: nodes have it for each other, and operators for `/status`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from aiohttp import web

from datasvc.errors import NotFoundError
from datasvc.node.http.auth import is_authorized
from datasvc.node.transfers.fetching import Fetches
from datasvc.node.transfers.origins import Origins
from datasvc.node.transfers.staging_jobs import StageJobs
from datasvc.repository import Digest
from datasvc.repository.store.redaction import redact_url

_MAX_REMEMBERED: Final = 1 << 16  # objects of which it is known that a repository has them


class NodeAccess:
    """What the token of a request gives access to.

    Args:
        tenant: name of the tenant; None: the token of the node.
        origins: repositories that may be read.
        fetches: fetches whose objects are charged to the tenant.
        jobs: staging jobs of the tenant.
    """

    def __init__(self, tenant: str | None, origins: Origins, fetches: Fetches, jobs: StageJobs) -> None:
        self.tenant, self.origins, self.fetches, self.jobs = tenant, origins, fetches, jobs
        # Remembers objects that were found: each range of an object is a request.
        self._check = lru_cache(_MAX_REMEMBERED)(self._check_object)

    def check_object(self, digest: Digest, origin: str | None) -> None:
        """Raise NotFoundError if the tenant must not read an object. Reads the repository: call it in a thread.

        Args:
            digest: the object.
            origin: repository that the request names; a tenant must name one that has the object.
        """
        self._check(digest, origin)

    def _check_object(self, digest: Digest, origin: str | None) -> None:
        repository = self.origins.find(origin)
        if repository.objects.size(digest) is None:
            raise NotFoundError(f"object {digest} is not in {redact_url(repository.url)}")


class NodeAccesses:
    """Finds the access of a request by its token.

    Args:
        token: token of the node; None: no token is required, and there are no tenants.
        whole: access with the token of the node.
        tenants: access by token.

    Attributes:
        needs_token: whether a request needs a token.
    """

    def __init__(self, token: str | None, whole: NodeAccess, tenants: Mapping[str, NodeAccess]) -> None:
        self.needs_token = token is not None
        self._token = token
        self._whole = whole
        self._tenants = dict(tenants)

    def all(self) -> list[NodeAccess]:
        """Return the access with the token of the node, and those of the tenants."""
        return [self._whole, *self._tenants.values()]

    def find(self, request: web.Request) -> NodeAccess | None:
        """Return the access of a request; None if its token is wrong or missing."""
        header = request.headers.get("Authorization")
        # Compare with every token, so that the duration does not reveal which ones exist.
        found = [access for token, access in self._tenants.items() if is_authorized(header, token)]
        return self._whole if is_authorized(header, self._token) else next(iter(found), None)

    def of(self, request: web.Request) -> NodeAccess:
        """Return the access of a request that `check_access` has let pass."""
        access = self.find(request)
        assert access is not None
        return access
