"""Network namespaces of this machine as nodes.

Needs root, iproute2 (`ip`, `tc`) and util-linux (`unshare`, `nsenter`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager


@contextmanager
def bridged_nodes(rates: Sequence[float | None]) -> Iterator[list[tuple[int, str]]]:
    """Yield a process in the namespace of each node, and the node's address; a bridge joins the nodes.

    Args:
        rates: bytes per second of the link of each node in each direction, headers included; None: not limited.
    """
    with ExitStack() as stack:
        switch = start_node(stack)
        run_on(switch, "ip", "link", "add", "name", "bridge", "type", "bridge")
        run_on(switch, "ip", "link", "set", "dev", "bridge", "up")
        nodes = []
        for number, rate in enumerate(rates):
            node, port, address = start_node(stack), f"port-{number}", f"10.77.1.{number + 1}"
            link = ["type", "veth", "peer", "name", "eth0", "netns", str(node)]
            run_on(switch, "ip", "link", "add", "name", port, *link)
            run_on(switch, "ip", "link", "set", "dev", port, "master", "bridge", "up")
            run_on(node, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            run_on(node, "ip", "link", "set", "dev", "eth0", "up")
            if rate is not None:
                limit_rate(node, "eth0", rate)
                limit_rate(switch, port, rate)
            nodes.append((node, address))
        yield nodes


def start_node(stack: ExitStack) -> int:
    """Return a process in a new namespace, which ends with `stack`. Exit if the machine refuses namespaces."""
    # It lasts as long as its input is open, so nothing is left behind however this program ends.
    command = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(holder.communicate)
    assert holder.stdout is not None
    if holder.stdout.readline() != "up\n":
        sys.exit("this machine refuses network namespaces; run as root, with iproute2 and util-linux")
    return holder.pid


def limit_rate(node: int, device: str, bytes_per_s: float) -> None:
    """Let a device send `bytes_per_s`, headers included."""
    queue = ["tbf", "rate", f"{round(bytes_per_s * 8)}bit", "burst", "128kb", "limit", "512kb"]
    run_on(node, "tc", "qdisc", "replace", "dev", device, "root", *queue)


def run_on(node: int, *words: str) -> None:
    """Run a command in the namespace of a process."""
    subprocess.run([*inside(node), *words], check=True)


def inside(node: int) -> list[str]:
    """Return the start of a command that runs the rest of it in the namespace of a process."""
    return ["nsenter", f"--net=/proc/{node}/ns/net"]
