"""`/stage`: start, watch and cancel staging jobs.

POST   /stage  {"repo": URL, "ref": "pets@1", "split": "train"}    202, the job; "repo" and "split" may be left out
GET    /stage                                                      all jobs
GET    /stage/{id}                                                 one: state, bytes, seconds, error
DELETE /stage/{id}                                                 cancel it
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from aiohttp import web

from datasvc.errors import ConfigError, UnavailableError
from datasvc.node.transfers.origins import Origins
from datasvc.node.transfers.staging_jobs import StageJob, StageJobs
from datasvc.repository.store.storage import redact_url
from datasvc.shards.versions.dataset import choose_split, open_dataset

_FIELDS: Final = frozenset({"repo", "ref", "split"})
_BODY_TIMEOUT_S = 10.0


class StageRoutes:
    """Handlers of `/stage`.

    Args:
        jobs: of the node.
        origins: what may be staged from.
    """

    def __init__(self, jobs: StageJobs, origins: Origins) -> None:
        self._jobs = jobs
        self._origins = origins

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/stage", self.start),
            web.get("/stage", self.list),
            web.get("/stage/{id}", self.show),
            web.delete("/stage/{id}", self.cancel),
        ]

    async def start(self, request: web.Request) -> web.Response:
        """Start a job; a reference that cannot be resolved is answered at once."""
        wanted = await _read_body(request)
        job = await asyncio.to_thread(self._start, wanted["ref"], wanted.get("repo"), wanted.get("split"))
        return web.json_response(job.describe(), status=202, headers={"Location": f"/stage/{job.id}"})

    async def list(self, _request: web.Request) -> web.Response:
        """List the jobs."""
        return web.json_response({"jobs": [job.describe() for job in self._jobs.all()]})

    async def show(self, request: web.Request) -> web.Response:
        """Show a job."""
        return web.json_response(self._jobs.find(request.match_info["id"]).describe())

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a job; what has arrived stays resident."""
        job = self._jobs.find(request.match_info["id"])
        job.cancel()
        return web.json_response(job.describe())

    def _start(self, ref: str, repo: str | None, split: str | None) -> StageJob:
        dataset = open_dataset(self._origins.find(repo), ref)
        what = {"repo": redact_url(dataset.repository.url), "ref": str(dataset.resolved), "split": split or ""}
        return self._jobs.start(choose_split(dataset, split), what)


async def _read_body(request: web.Request) -> dict[str, str]:
    # Pages in a browser on this machine may send any other type without asking.
    if request.content_type != "application/json":
        raise ConfigError("expected a body of type application/json")
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            body: Any = json.loads(await request.read())
    except TimeoutError as error:
        raise UnavailableError("the body did not arrive") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict) or not all(isinstance(each, str) for each in body.values()):
        raise ConfigError('expected an object of strings, such as {"ref": "pets@1"}')
    if unknown := sorted(body.keys() - _FIELDS):
        raise ConfigError(f"unknown: {', '.join(unknown)[:200]}; expected {', '.join(sorted(_FIELDS))}")
    if "ref" not in body:
        raise ConfigError('the body names no data set: expected such as {"ref": "pets@1"}')
    return body
