"""`datasvc serve` in the nodes of a cluster, and how tests talk to it."""

import http.client
import json
import os
import signal
import sys
from urllib.parse import urlsplit

from blake3 import blake3

from tests.cluster.program import TIMEOUT_S

TOKEN = "known-to-all-nodes-of-a-test"
CACHE = "cache"


class Serving:
    """A cluster whose nodes serve, or can.

    Args:
        network: of nodes that are up.
        origin_url: of the repository as nodes see it.
        environ: what programs in nodes need to know of the origin.
        members: text for `--peers`; default a fixed list of all nodes.
    """

    def __init__(self, network, origin_url, *, environ=None, members=None):
        self.nodes = network.nodes
        self.origin_url = origin_url
        self.environ = {"DATASVC_TOKEN": TOKEN, **(environ or {})}
        self._port = network.port
        self.members = members or ",".join(map(self.url, self.nodes))
        self.servers = {}
        self._starting = {}

    def url(self, node):
        """Return a node's base URL."""
        return f"http://{node.address}:{self._port}"

    def start(self, node, *options, budget="1GB", token=TOKEN):
        """Start the server of a node, without waiting for it."""
        words = ["serve", "--cache", CACHE, "--repo", self.origin_url, "--budget", budget, "--host", node.address]
        words += ["--port", self._port, "--peers", self.members, "--url", self.url(node), "--grace", 2, *options]
        server = node.datasvc(*words, environ={**self.environ, "DATASVC_TOKEN": token})
        self.servers[node.name] = server
        self._starting[node.name] = server

    def wait_until_ready(self):
        """Return once every server that was started listens."""
        while self._starting:
            self._starting.popitem()[1].read_line("serving ")

    def stop(self, node):
        """Tell a node's server to stop, and return its status."""
        server = self.servers.pop(node.name)
        server.send_signal(signal.SIGTERM)
        return server.wait()

    def read(self, node, ref="pets", *options):
        """Start `reader.py` in a node; returns the running Program."""
        words = [sys.executable, "-m", "tests.cluster.reader", "--repo", self.origin_url, "--ref", ref]
        words += ["--cache", CACHE, "--peers", self.members, "--own", self.url(node), *options]
        return node.start(*words, environ=self.environ)

    def post_stage(self, node, ref="pets", **options):
        """Ask a node's server to stage; returns the job's id."""
        return self.ask(node, "POST", "/stage", {"ref": ref}, **options)["id"]

    def wait_for_job(self, node, job_id):
        """Return a staging job once it has ended; the time limit of the test ends what never does."""
        while (job := self.ask(node, "GET", f"/stage/{job_id}"))["state"] in ("waiting", "running"):
            pass
        return job

    def stage_on(self, nodes, ref="pets"):
        """Stage on some nodes at once through their servers; returns their jobs, ended."""
        jobs = [(node, self.post_stage(node, ref)) for node in nodes]
        return [self.wait_for_job(*job) for job in jobs]

    def status(self, node):
        """Return the status document of a node's server."""
        return self.ask(node, "GET", "/status")

    def ask(self, node, method, path, body=None, timeout_s=TIMEOUT_S):
        """Return what a node's server answers, decoded. Raises AssertionError where it is an error."""
        url = urlsplit(self.url(node))
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = json.loads(answer.read())
        finally:
            connection.close()
        assert answer.status < 300, (path, answer.status, content)
        return content


def object_path(node, digest):
    """Return where an object lies in a node's cache."""
    return node.folder / CACHE / "objects" / digest[:2] / digest


def resident_digests(node):
    """Return what lies in a node's cache, hashed here and now: right digests only, and none that is wrong."""
    found = set()
    for path in (node.folder / CACHE / "objects").rglob("*"):
        if path.is_file():
            assert blake3(path.read_bytes()).hexdigest() == path.name, f"{path} is wrong"
            found.add(path.name)
    return found


def flip(path, offset=None):
    """Invert a byte of a file in place, by default in its middle: whoever has it mapped sees it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 if offset is None else offset)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0xFF]))


def make_gate(node):
    """Make the pipe that a reader in this node waits at, see `reader.py`; returns it."""
    gate = node.folder / "gate"
    os.mkfifo(gate)
    return gate
