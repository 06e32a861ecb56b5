"""Nodes of one machine: what leaves the origin with peers and without, and how fast one peer gives to another."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from datasvc.cache import Cache
from datasvc.cache.peers.membership import FixedMembership
from datasvc.cache.peers.peer_source import TOKEN_VARIABLE
from datasvc.cache.peers.peers import Peers
from datasvc.cache.peers.placement import rank_nodes
from datasvc.repository import ObjectInfo, Objects
from tools.bench import fresh
from tools.bench.cache_store import NAME, Store
from tools.bench.origin import Limits, OriginProcess
from tools.bench.runner import ROOT, Options, Report, call_command, column, environment, run_rounds

NODES = 4
LATENCY_S = 0.02
_POLL_S = 0.02
_BUFFER_BYTES = 4 << 20


class ServedNode:
    """One `datasvc serve`, from `__enter__` of `serve_node` on."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seconds = 0.0  # of the last job
        self._job = ""

    def start_staging(self) -> None:
        """Begin to stage the photos."""
        self._job = self._ask("/stage", {"ref": NAME})["id"]

    def wait(self) -> dict[str, int]:
        """Return the bytes by kind, once all are there."""
        while (job := self._ask(f"/stage/{self._job}"))["state"] in ("waiting", "running"):
            time.sleep(_POLL_S)
        assert job["state"] == "done", job
        self.seconds = job["seconds"]
        found: dict[str, int] = job["bytes"]
        return found

    def _ask(self, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        token = os.environ.get(TOKEN_VARIABLE)
        authorization = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(  # noqa: S310 - a node on loopback
            self.url + path, data, {"Content-Type": "application/json", **authorization}
        )
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def serve_node(
    folder: Path, repository: str, budget: int, port: int = 0, peers: str = "", host: str = "127.0.0.1"
) -> Iterator[ServedNode]:
    """Run a node while the block runs; on another address than loopback, with the token of the environment."""
    words = ["--cache", folder, "--repo", repository, "--budget", budget, "--port", port, "--grace", 1, "--json"]
    words += ["--host", host, "--log-level", "warning"]
    words += ["--peers", peers, "--url", f"http://{host}:{port}"] if peers else []
    command = [sys.executable, "-m", "datasvc.cli.main", "serve", *map(str, words)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield ServedNode(json.loads(process.stdout.readline())["url"])
    finally:
        process.terminate()
        process.communicate()


def measure_nodes(folder: Path, photos: Path, options: Options) -> Report:
    """Return wall times and origin bytes of four nodes that stage the same data at once."""
    store = Store.of_photos(photos, folder, shard_bytes=16 << 20)
    infos = store.split.table.shards()
    data_bytes = sum(info.size_bytes for info in infos)

    def run(with_peers: bool) -> dict[str, float]:
        with store.fresh_folder() as target:
            seconds = stage_all(origin, target, data_bytes, with_peers=with_peers)
        paths = origin.counts()["paths"]
        left = sum(paths.get(f"/{Objects.path(info.digest)}", 0) for info in infos)
        return {"seconds": seconds, "left": left}

    with store.origin(Limits(None, options.total_rate, LATENCY_S)) as origin:
        arms = {"with peers": partial(run, True), "each from the origin": partial(run, False)}
        found = run_rounds(arms, options.repeats)
    report = Report(
        f"{NODES} nodes stage {data_bytes / 1e6:.0f} MB at once from {options.total_rate / 1e6:.0f} MB/s in all",
        "All nodes and the origin share this machine's cores. Bytes are of shards; each node reads the table too.",
    )
    seconds = {name: column(values, "seconds") for name, values in found.items()}
    report.add_rows("s", seconds)
    report.add_ratio("time with peers / each from the origin", *seconds.values())
    for name, values in found.items():
        report.add_ratio(f"origin bytes / data, {name}", column(values, "left"), [data_bytes] * len(values))
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


def measure_peer(folder: Path, photos: Path, options: Options) -> Report:
    """Return GB/s of a node that takes all from its only peer."""
    store = Store.of_photos(photos, folder, shard_bytes=64 << 20)
    split = store.split
    infos = split.table.shards()
    data_bytes = sum(info.size_bytes for info in infos)
    paths = [store.repository.objects.local_path(info.digest) for info in infos]
    assert None not in paths

    def run_ours(threads: int) -> float:
        with store.fresh_folder() as target, Cache(target / "cache", budget=2 * data_bytes, peers=peers) as cache:
            started = time.perf_counter()
            found = cache.stage([split], num_threads=threads)
            seconds = time.perf_counter() - started
        assert found.peer_bytes == data_bytes, found
        return seconds

    with store.fresh_folder() as target, serve_node(target / "peer", store.repository.url, 2 * data_bytes) as node:
        node.start_staging()
        node.wait()
        peers = _owner_of_all(node.url, infos)
        arms = {f"verified and published, {n} at once": (lambda n=n: run_ours(n)) for n in (1, 8)}
        arms["pread + sendall"] = lambda: run_bare(paths)  # type: ignore[arg-type]
        seconds = run_rounds(arms, options.repeats)
    report = Report(f"Transfer of {data_bytes / 1e6:.0f} MB in {len(infos)} shards from a peer on loopback")
    report.add_rows("GB/s", seconds, lambda value: data_bytes / 1e9 / value)
    *ours, bare = seconds
    for name in ours:
        report.add_ratio(f"{name} / {bare}", seconds[bare], seconds[name])
    return report


def run_bare(paths: list[Path]) -> float:
    """Send the files from another process and drop what arrives; returns seconds."""
    command = call_command(fresh.send_files, paths, _BUFFER_BYTES)
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        buffer = bytearray(_BUFFER_BYTES)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            started = time.perf_counter()
            while connection.recv_into(buffer):
                pass
            return time.perf_counter() - started


def _owner_of_all(url: str, infos: list[ObjectInfo]) -> Peers:
    """Return peers of a node whose own address is such that the peer at `url` owns all objects."""
    digests = [info.digest for info in infos]
    # No node connects to the node's own address, so it may be any name. Some ports of the peer need very many tries.
    names = (f"http://node{number}:1" for number in itertools.count())
    own = next(name for name in names if all(rank_nodes(digest, [url, name])[0] == url for digest in digests))
    return Peers(FixedMembership([url, own], local_url=own))
