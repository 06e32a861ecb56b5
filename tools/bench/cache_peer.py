"""One peer to one node on loopback, verified and published, beside a loop of bare pread and sendall."""

from __future__ import annotations

import argparse
import itertools
import socket
import subprocess
import sys
import time
from pathlib import Path

from cache_nodes import serve_node
from cache_store import Store
from report import Report, alternate

from datasvc.cache import Cache
from datasvc.cache.peers.membership import FixedMembership
from datasvc.cache.peers.peers import Peers
from datasvc.cache.peers.placement import rank_nodes
from datasvc.repository import ObjectInfo

_BUFFER_BYTES = 4 << 20

SEND = """
import os, socket, sys
buffer = memoryview(bytearray(int(sys.argv[1])))
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    with connection:
        for path in sys.argv[2:]:
            file = os.open(path, os.O_RDONLY)
            offset = 0
            while count := os.preadv(file, [buffer], offset):
                connection.sendall(buffer[:count])
                offset += count
            os.close(file)
"""


def run_bare(paths: list[Path]) -> float:
    """Send the files from another process and drop what arrives; returns seconds."""
    command = [sys.executable, "-c", SEND, str(_BUFFER_BYTES), *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        buffer = bytearray(_BUFFER_BYTES)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            started = time.perf_counter()
            while connection.recv_into(buffer):
                pass
            return time.perf_counter() - started


def measure(folder: Path, photos: Path, arguments: argparse.Namespace) -> Report:
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
        contestants = {f"verified and published, {n} at once": (lambda n=n: run_ours(n)) for n in (1, 8)}
        contestants["pread + sendall"] = lambda: run_bare(paths)  # type: ignore[arg-type]
        seconds = alternate(contestants, arguments.repeats)
    report = Report(f"Transfer of {data_bytes / 1e6:.0f} MB in {len(infos)} shards from a peer on loopback")
    for name, values in seconds.items():
        report.add_row(name, "GB/s", [data_bytes / 1e9 / value for value in values])
    *ours, bare = seconds
    for name in ours:
        report.add_ratio(f"{name} / {bare}", seconds[bare], seconds[name])
    return report


def _owner_of_all(url: str, infos: list[ObjectInfo]) -> Peers:
    """Return peers of a node whose own address is such that the peer at `url` owns all objects."""
    digests = [info.digest for info in infos]
    # No node connects to the node's own address, so it may be any name. Some ports of the peer need very many tries.
    names = (f"http://node{number}:1" for number in itertools.count())
    own = next(name for name in names if all(rank_nodes(digest, [url, name])[0] == url for digest in digests))
    return Peers(FixedMembership([url, own], local_url=own))
