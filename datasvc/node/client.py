"""HTTP client of a node: its status for `datasvc top`, staging for `datasvc stage --node`, and what it has."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from datasvc import errors
from datasvc.cache.peers.membership import parse_node
from datasvc.cache.peers.peer_source import tls_context
from datasvc.cache.peers.placement import choose_shards
from datasvc.errors import ConfigError, DatasvcError, NotFoundError, UnavailableError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, Repository
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.versions.dataset import open_dataset
from datasvc.threads import map_in_threads

_TIMEOUT_S: Final = 10.0
_START_TIMEOUT_S: Final = 120.0
# Requests for the state of a job before `stage` gives up; the pauses double.
_POLL_ATTEMPTS: Final = 5
_MAX_RESPONSE_BYTES: Final = 64 << 20
_MAX_ERROR_BYTES: Final = 64 << 10
_MAX_ASKED: Final = 1000  # shards of a version that a node is asked for
_REQUESTS_AT_ONCE: Final = 8
_RUNNING: Final = ("waiting", "running")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handles a redirect as an error: a request that follows it would send the token to another host."""

    def redirect_request(self, *_request: Any) -> None:
        return None


class _NamedConnection(http.client.HTTPSConnection):
    """A connection to a server whose certificate has the name `tls_name`, instead of the server's host name."""

    def __init__(self, *arguments: Any, context: ssl.SSLContext, tls_name: str, **options: Any) -> None:
        super().__init__(*arguments, context=context, **options)
        self._tls_context, self._tls_name = context, tls_name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls_context.wrap_socket(self.sock, server_hostname=self._tls_name)


class _NamedHttpsHandler(urllib.request.HTTPSHandler):
    """Opens `_NamedConnection`s."""

    def __init__(self, context: ssl.SSLContext, tls_name: str) -> None:
        super().__init__(context=context)
        self._open = partial(_NamedConnection, context=context, tls_name=tls_name)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._open, request)


class NodeClient:
    """Client of one node.

    Args:
        url: base URL of the node.
        token: bearer token of the node; None if it requires none.
        ca_file: CA certificates for the node; None: those of the system.
        tls_name: name in the node's certificate; None: the host name in `url`.

    Raises:
        ConfigError: `url` is not a valid node URL, or the certificates cannot be read.
    """

    def __init__(
        self, url: str, *, token: str | None = None, ca_file: Path | None = None, tls_name: str | None = None
    ) -> None:
        self._url = parse_node(url)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        context = tls_context(ca_file)
        https = _NamedHttpsHandler(context, tls_name) if tls_name else urllib.request.HTTPSHandler(context=context)
        # No proxies: a node is in the local network, and a proxy would receive the token.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https, _NoRedirects())

    def status(self) -> dict[str, Any]:
        """Return the status document.

        Raises:
            ConfigError: the node rejects the token, or the server is not a node.
            UnavailableError: the node does not respond.
        """
        document = self._request("GET", "/status")
        if "cache" not in document:
            raise ConfigError(f"{self._url} is not a node of datasvc: its response is not a status document")
        return document

    def clock_s(self) -> float:
        """Return the time of the node's clock, in whole seconds since 1970. Needs no token.

        Raises:
            ConfigError: the server is not a node.
            UnavailableError: the node does not respond, or is stopping.
        """
        with self._response(urllib.request.Request(f"{self._url}/healthz")) as response:  # noqa: S310 - http(s)
            date = response.headers["Date"]
        try:
            return parsedate_to_datetime(date or "").timestamp()
        except ValueError as error:
            raise ConfigError(f"{self._url} is not a node of datasvc: its response has no date") from error

    def has_object(self, digest: Digest, origin: str) -> bool:
        """Return whether an object of the repository `origin` is resident. Raise the errors of `status`."""
        path = f"/objects/{digest}?{urllib.parse.urlencode({'origin': redact_url(origin)})}"
        request = urllib.request.Request(f"{self._url}{path}", headers=self._headers, method="HEAD")  # noqa: S310 - http(s)
        try:
            with self._response(request):
                return True
        except NotFoundError:
            return False

    def stage(
        self,
        ref: str,
        *,
        repo: str | None = None,
        split: str | None = None,
        progress: Progress = NO_PROGRESS,
        poll_s: float = 0.5,
    ) -> dict[str, Any]:
        """Stage a data set on the node, and wait until its job has ended; an interrupt cancels the job.

        Args:
            ref: data set, as for `datasvc stage`.
            repo: URL of its repository, which must be one of the node's; None: the only one of the node.
            split: only this split; None: all splits.
            progress: counts the bytes that are resident on the node, by source.
            poll_s: time between two requests for the state of the job.

        Returns:
            The document of the job: `ref`, `total_bytes`, `bytes` by source, `seconds`.

        Raises:
            ConfigError, NotFoundError: the node rejects the token, does not have the repository, the data set or the
                split, or is not a node.
            UnavailableError: the node does not respond, or has too many jobs.
            DatasvcError: the job failed, with the error that the node reports, or was cancelled by another client.
        """
        wanted = {"ref": ref, "repo": repo, "split": split}
        job = self._request("POST", "/stage", {name: value for name, value in wanted.items() if value is not None})
        progress.begin(job["total_bytes"])
        reported: Counter[str] = Counter()  # bytes that `progress` has counted, by source
        try:
            while True:
                for source, size_bytes in job["bytes"].items():
                    progress.advance(size_bytes - reported[source], source=source)
                    reported[source] = size_bytes
                if job["state"] not in _RUNNING:
                    break
                job = self._poll(job["id"], poll_s)
        except KeyboardInterrupt:
            self._request("DELETE", f"/stage/{job['id']}")
            raise
        if job["state"] == "cancelled":
            raise DatasvcError(f"staging {ref} on {self._url} was cancelled; what has arrived stays in its cache")
        if job["state"] != "done":
            raise _error_class(job["error_kind"])(f"staging {ref} on {self._url} failed: {job['error']}")
        return job

    def _poll(self, job_id: str, poll_s: float) -> dict[str, Any]:
        """Return the document of a job after a pause. The job runs on, so a lost request does not end the command."""
        for attempt in range(1, _POLL_ATTEMPTS + 1):
            time.sleep(poll_s * 2 ** (attempt - 1))
            try:
                return self._request("GET", f"/stage/{job_id}")
            except UnavailableError as error:
                if attempt == _POLL_ATTEMPTS:
                    raise UnavailableError(
                        f"{error}; {attempt} requests in a row failed. The staging may still run there: the same "
                        "command finds what has arrived"
                    ) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _request(self, method: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        """Return the JSON object of a response. Raise the errors of `stage`, but not those of a job."""
        content = None if body is None else json.dumps(body).encode()
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}{path}", content, headers, method=method)  # noqa: S310 - http(s)
        # A request with a body starts a job: before the answer, the node reads a version from the repository.
        with self._response(request, _TIMEOUT_S if body is None else _START_TIMEOUT_S) as response:
            answer = response.read(_MAX_RESPONSE_BYTES)
        try:
            document = json.loads(answer)
        except ValueError as error:
            raise ConfigError(f"{self._url} is not a node of datasvc: its response is not JSON") from error
        if not isinstance(document, dict):
            raise ConfigError(f"{self._url} is not a node of datasvc: its response is not a JSON object")
        return document

    @contextmanager
    def _response(self, request: urllib.request.Request, timeout_s: float = _TIMEOUT_S) -> Iterator[Any]:
        """Yield a response; raise the error of `_response_error` for its status, UnavailableError without one."""
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise self._response_error(error) from error
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self._url} does not respond: {error}") from error

    def _response_error(self, error: urllib.error.HTTPError) -> DatasvcError:
        """Return the error for a response with an error status."""
        # ConfigError and NotFoundError: the user must correct something. Otherwise, a later request may succeed.
        if error.code == http.client.UNAUTHORIZED:
            return ConfigError(f"{self._url} rejects the token; give its token with --token-file")
        message = f"{self._url} responds {error.code} {error.reason}"
        # If the response has no message in JSON, report only the status and its reason.
        with suppress(OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            message += f": {json.loads(error.read(_MAX_ERROR_BYTES))['error']}"
        kinds = {http.client.BAD_REQUEST: ConfigError, http.client.NOT_FOUND: NotFoundError}
        return kinds.get(error.code, UnavailableError)(message)


def find_resident(repository: Repository, ref: str, nodes: Mapping[str, NodeClient]) -> dict[str, Any]:
    """Return as JSON values how many shards and bytes of a version are resident on each node, most first.

    Of more than 1,000 shards, evenly spaced ones are asked for, and the result says how many.

    Args:
        repository: repository of the data set.
        ref: the version.
        nodes: clients of the nodes, by URL.

    Raises:
        ConfigError: a node rejects the token, or is not a node. A node that does not respond has an `error` instead.
        NotFoundError, CorruptDataError, UnavailableError: see `open_dataset`.
    """
    dataset = open_dataset(repository, ref)
    num_shards, asked = choose_shards(dataset, _MAX_ASKED)
    found: list[dict[str, Any]] = []
    for url, client in nodes.items():
        try:
            answers = map_in_threads(partial(client.has_object, origin=repository.url), asked, _REQUESTS_AT_ONCE)
            resident = [size for size, is_there in zip(asked.values(), answers, strict=True) if is_there]
        except UnavailableError as error:
            found.append({"node": url, "shards": 0, "bytes": 0, "share": 0.0, "error": str(error)})
        else:
            share = sum(resident) / max(sum(asked.values()), 1)
            found.append({"node": url, "shards": len(resident), "bytes": sum(resident), "share": round(share, 4)})
    found.sort(key=lambda node: -node["bytes"])
    return {"dataset": dataset.title, "num_shards": num_shards, "num_asked": len(asked), "nodes": found}


def _error_class(name: str) -> type[DatasvcError]:
    """Return the class in `datasvc.errors` with this name, or `DatasvcError` if there is no such error."""
    kind = getattr(errors, str(name), None)
    return kind if isinstance(kind, type) and issubclass(kind, DatasvcError) else DatasvcError
