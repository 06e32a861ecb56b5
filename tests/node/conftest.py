"""Nodes as tests talk to them: over real sockets, with plain HTTP clients."""

import asyncio
import http.client
import json
import subprocess
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

import pytest

from datasvc.cache import Cache
from datasvc.node.server import run_node
from datasvc.node.settings import NodeSettings
from datasvc.repository import Repository
from tests.support.ports import reserved_ports

OBJECT_BYTES = 100_000


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class RunningNode:
    """A node in a thread of the test."""

    def __init__(self, **settings):
        self.settings = NodeSettings(**{"port": 0, **settings})
        self.ended = None
        self.error = None
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()
        if self.error is not None:
            raise self.error

    def _run(self):
        async def run():
            self._loop = asyncio.get_running_loop()
            return await run_node(self.settings, self._set_url, self._stop)

        try:
            self.ended = asyncio.run(run())
        except Exception as error:
            self.error = error
        finally:
            self._ready.set()

    def _set_url(self, url):
        self.url = url
        self._ready.set()

    def stop(self):
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        return self.ended

    def wait(self):
        """Wait until the node has ended by itself."""
        self._thread.join()

    def connect(self):
        url = urlsplit(self.url)
        return http.client.HTTPConnection(url.hostname, url.port, timeout=30)

    def ask(self, method, path, body=None, **headers):
        connection = self.connect()
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and "Content-Type" not in headers:
            headers["Content-Type"] = "application/json"
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def get(self, path, **headers):
        return self.ask("GET", path, **headers)

    def get_object(self, info, origin=None, **headers):
        query = "" if origin is None else f"?{urlencode({'origin': origin.url, 'size': info.size_bytes})}"
        return self.get(f"/objects/{info.digest}{query}", **headers)

    def wait_for(self, is_so):
        """Ask for the status until `is_so` of it; the time limit of the test ends what never is."""
        while not is_so(status := self.get("/status").json):
            pass
        return status


@contextmanager
def two_nodes(folder, repository):
    """Yield two nodes of one list, which read from a repository."""
    with reserved_ports(2) as ports, ExitStack() as stack:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        nodes = []
        for url, port in zip(urls, ports, strict=True):
            settings = {"folder": folder / f"cache{len(nodes)}", "budget": "10MB", "repositories": (str(repository),)}
            nodes.append(RunningNode(port=port, peers=",".join(urls), own_url=url, **settings))
            stack.callback(nodes[-1].stop)
        yield nodes


def ended(node, job_id):
    """Return a job when it has ended; the time limit of the test ends one that never does."""
    while (job := node.get(f"/stage/{job_id}").json)["state"] in ("waiting", "running"):
        pass
    return job


def staged(node):
    """Stage "pets" on a node; returns the job, ended."""
    return ended(node, node.ask("POST", "/stage", {"ref": "pets"}).json["id"])


@pytest.fixture
def origin(tmp_path):
    """A repository with six objects; returns it, their names and sizes, and their bytes."""
    repository = Repository.create(str(tmp_path / "origin"))
    contents = [bytes([number]) * OBJECT_BYTES for number in range(6)]
    return repository, [repository.objects.put(content) for content in contents], contents


@pytest.fixture
def run(tmp_path):
    """Start nodes that end with the test."""
    nodes = []

    def start(name="cache", **settings):
        settings = {"folder": tmp_path / name, "budget": "10MB", **settings}
        nodes.append(RunningNode(**settings))
        return nodes[-1]

    yield start
    for node in nodes:
        node.stop()


@pytest.fixture
def node(run, origin):
    """A node that reads from `origin`, with its first two objects resident."""
    repository, infos, _ = origin
    running = run(repositories=(repository.url,))
    with Cache(running.settings.folder) as cache:
        for info in infos[:2]:
            cache.acquire(info, repository)
            cache.release(info.digest)
    return running


@pytest.fixture
def certificate(tmp_path):
    files = tmp_path / "node.pem", tmp_path / "node.key"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    command = ["openssl", "req", *kind, *subject, "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files
