"""`/stage`: start, watch and cancel staging jobs, which fetch a data set into the node's cache.

POST   /stage  {"repo": URL, "ref": "pets@1", "split": "train"}    202, the job; "repo" and "split" are optional
GET    /stage                                                      all jobs
GET    /stage/{id}                                                 one job: state, bytes, seconds, error
DELETE /stage/{id}                                                 cancel a job
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from aiohttp import web

from datasvc.errors import ConfigError, UnavailableError
from datasvc.node.transfers.origins import Origins
from datasvc.node.transfers.staging_jobs import StageJob, StageJobs
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.versions.dataset import choose_split, open_dataset

_FIELDS: Final = frozenset({"repo", "ref", "split"})
_BODY_TIMEOUT_S = 10.0  # so that a slow client cannot keep a request open


class StageRoutes:
    """Handlers of `/stage`, for data sets of the repositories in `origins`."""

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
        """Start a job. If the reference does not resolve, this request fails, and no job is made."""
        body = await _read_body(request)
        job = await asyncio.to_thread(self._start, body["ref"], body.get("repo"), body.get("split"))
        return web.json_response(job.describe(), status=202, headers={"Location": f"/stage/{job.id}"})

    async def list(self, _request: web.Request) -> web.Response:
        """List the jobs."""
        return web.json_response({"jobs": [job.describe() for job in self._jobs.all()]})

    async def show(self, request: web.Request) -> web.Response:
        """Show a job."""
        return web.json_response(self._jobs.find(request.match_info["id"]).describe())

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a job; the objects that have arrived stay resident."""
        job = self._jobs.find(request.match_info["id"])
        job.cancel()
        return web.json_response(job.describe())

    def _start(self, ref: str, repo: str | None, split: str | None) -> StageJob:
        dataset = open_dataset(self._origins.find(repo), ref)
        # Remove credentials from the URL, because `/stage` shows the labels to every client.
        labels = {"repo": redact_url(dataset.repository.url), "ref": str(dataset.resolved), "split": split or ""}
        return self._jobs.start(choose_split(dataset, split), labels)


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
