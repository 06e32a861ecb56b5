"""Four nodes of one machine, cold: what leaves the origin, and how long it takes with peers and without."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cache_store import NAME, Store, environment
from origin import Limits, OriginProcess
from report import ROOT, Report, alternate

from datasvc.repository import Objects

NODES = 4
LATENCY_S = 0.02
_POLL_S = 0.02


class ServedNode:
    """One `datasvc serve`, from `__enter__` of `serve_node` on."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._job = ""

    def start_staging(self) -> None:
        """Begin to stage the photos."""
        self._job = self._ask("/stage", {"ref": NAME})["id"]

    def wait(self) -> dict[str, int]:
        """Return the bytes by kind, once all are there."""
        while (job := self._ask(f"/stage/{self._job}"))["state"] in ("waiting", "running"):
            time.sleep(_POLL_S)
        assert job["state"] == "done", job
        found: dict[str, int] = job["bytes"]
        return found

    def _ask(self, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 - a node on loopback
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def serve_node(folder: Path, repository: str, budget: int, port: int = 0, peers: str = "") -> Iterator[ServedNode]:
    """Run a node on loopback while the block runs."""
    words = ["--cache", folder, "--repo", repository, "--budget", budget, "--port", port, "--grace", 1, "--json"]
    words += ["--peers", peers, "--url", f"http://127.0.0.1:{port}"] if peers else []
    command = [sys.executable, "-m", "datasvc.cli.main", "serve", *map(str, words)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield ServedNode(json.loads(process.stdout.readline())["url"])
    finally:
        process.terminate()
        process.communicate()


def measure(folder: Path, photos: Path, arguments: argparse.Namespace) -> Report:
    """Return wall times and origin bytes of four nodes that stage the same data at once."""
    store = Store.of_photos(photos, folder, shard_bytes=16 << 20)
    infos = store.split.table.shards()
    data_bytes = sum(info.size_bytes for info in infos)
    ways = {"with peers": True, "each from the origin": False}
    left: dict[str, list[float]] = {name: [] for name in ways}

    def run(name: str) -> float:
        with store.fresh_folder() as target:
            seconds = stage_all(origin, target, data_bytes, with_peers=ways[name])
        paths = origin.counts()["paths"]
        left[name].append(sum(paths.get(f"/{Objects.path(info.digest)}", 0) for info in infos))
        return seconds

    with store.origin(Limits(None, arguments.total_rate, LATENCY_S)) as origin:
        seconds = alternate({name: (lambda name=name: run(name)) for name in ways}, arguments.repeats)
    report = Report(
        f"{NODES} nodes stage {data_bytes / 1e6:.0f} MB at once from {arguments.total_rate / 1e6:.0f} MB/s in all",
        "All nodes and the origin share this machine's cores. Bytes are of shards; each node reads the table too.",
    )
    for name, values in seconds.items():
        report.add_row(name, "s", values)
    with_peers, alone = ways
    report.add_ratio("time with peers / each from the origin", seconds[with_peers], seconds[alone])
    for name, values in left.items():
        report.add_ratio(f"origin bytes / data, {name}", values, [data_bytes] * len(values))
    return report


def stage_all(origin: OriginProcess, folder: Path, data_bytes: int, *, with_peers: bool) -> float:
    """Stage on fresh nodes, all at once; returns seconds."""
    ports = _free_ports(NODES)
    peers = ",".join(f"http://127.0.0.1:{port}" for port in ports) if with_peers else ""
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(serve_node(folder / str(port), origin.url, 2 * data_bytes, port, peers))
            for port in ports
        ]
        origin.forget()
        started = time.perf_counter()
        for node in nodes:
            node.start_staging()
        for node in nodes:
            assert sum(node.wait().values()) == data_bytes
        return time.perf_counter() - started


def _free_ports(count: int) -> Sequence[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
