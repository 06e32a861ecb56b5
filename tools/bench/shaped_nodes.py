"""Two nodes on this machine, as network namespaces joined by a link of limited bandwidth, and ranks on them.

Needs root, iproute2 (`ip`, `tc`) and util-linux (`unshare`, `nsenter`). Ranks of one node reach each other over its
own loopback, which is not limited.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from report import ROOT

NUM_NODES = 2
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PORT = 29471  # no other program can have it: the namespaces are new


@contextmanager
def shaped_nodes(bytes_per_s: float) -> Iterator[list[int]]:
    """Return a process in the namespace of each node; each node may send `bytes_per_s` to the other one.

    Exits with a message where the machine refuses namespaces.
    """
    with ExitStack() as stack:
        holders = []
        for _ in range(NUM_NODES):
            # It lasts as long as its input is open, so nothing is left behind however this program ends.
            command = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"]
            holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(holder.communicate)
            assert holder.stdout is not None
            if holder.stdout.readline() != "up\n":
                sys.exit("this machine refuses network namespaces; run as root, with iproute2 and util-linux")
            holders.append(holder.pid)
        first, second = holders
        _run(first, "ip", "link", "add", "name", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second))
        for node, address in zip(holders, _ADDRESSES, strict=True):
            _run(node, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            _run(node, "ip", "link", "set", "dev", "eth0", "up")
            queue = ["tbf", "rate", f"{round(bytes_per_s * 8)}bit", "burst", "128kb", "limit", "512kb"]
            _run(node, "tc", "qdisc", "replace", "dev", "eth0", "root", *queue)
        yield holders


def run_ranks(nodes: Sequence[int], ranks_per_node: int, program: Path, arguments: Sequence[str]) -> Iterator[str]:
    """Run a program on every rank, one thread each, and return the lines that rank 0 prints, as they come."""
    size = len(nodes) * ranks_per_node
    shared = {"MASTER_ADDR": _ADDRESSES[0], "MASTER_PORT": str(_PORT), "WORLD_SIZE": str(size)}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks_per_node), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(size):
        node, local_rank = divmod(rank, ranks_per_node)
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "PYTHONPATH": str(ROOT)}
        # The ranks must not find this folder's trainer.py where they import the package: -P.
        command = [*_inside(nodes[node]), sys.executable, "-P", str(program), *arguments]
        ranks.append(
            subprocess.Popen(
                command, env={**os.environ, **shared, **own}, stdout=None if rank else subprocess.PIPE, text=True
            )
        )
    try:
        assert ranks[0].stdout is not None
        yield from ranks[0].stdout
        if any(rank.wait() for rank in ranks):
            sys.exit("a rank has failed; its error is above")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _run(node: int, *words: str) -> None:
    subprocess.run([*_inside(node), *words], check=True)


def _inside(node: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{node}/ns/net"]
