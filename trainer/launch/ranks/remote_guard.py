"""The guard of a rank on another host: runs the rank, and terminates it when the launcher orders this or is lost.

The launcher sends this source over standard input to a bare interpreter, so it uses only Python's standard library.
After the source, the launcher sends one line of JSON, the order to start, and later lines `signal N` and
`end SECONDS`. The end of standard input means that the launcher or the connection is lost. The guard reports on
standard error: `started PID`, `ended RETURNCODE`, `refused STATUS REASON`. Each report begins with a mark that the
order contains.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Execute the orders of the launcher until the end of standard input."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # A handler that does nothing, because the rank would inherit SIG_IGN.
        signal.signal(ignored, lambda *_: None)
    order = json.loads(sys.stdin.buffer.readline())

    def report(text: str) -> None:
        # One write, so that output of the rank cannot split the line. It fails if the launcher is lost.
        with contextlib.suppress(OSError):
            os.write(2, f"{order['mark']}{text}\n".encode())

    try:
        process = start(order)
    except (OSError, ValueError) as error:
        # The statuses of a shell: 127 for a program that does not exist, 126 for one that cannot be started.
        report(f"refused {127 if isinstance(error, FileNotFoundError) else 126} {error}")
        return
    report(f"started {process.pid}")
    has_ended = threading.Event()
    threading.Thread(target=watch, args=(process.pid, report, has_ended), daemon=True).start()
    grace_s = order["grace_s"]
    try:
        grace_s = follow_orders(process.pid, grace_s)
    finally:
        # Even after an error, the rank must not outlive its guard.
        end_group(process.pid, has_ended, grace_s)


def start(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the command with its variables, in the folder of the launcher.

    Args:
        order: first order of the launcher, see `RemoteRankProcess._first_order`.

    Raises:
        OSError: the program cannot be started.
        ValueError: the folder does not exist here, or no address of the launcher is reachable.
    """
    environ = {**os.environ, **order["environ"]}
    if order["master_addresses"]:
        environ["MASTER_ADDR"], local_address = choose_address(order["master_addresses"], int(environ["MASTER_PORT"]))
        # By default Gloo uses the address that the host name resolves to, which is often a loopback address.
        interface = find_interface(local_address)
        if interface is not None:
            environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    num_threads = len(os.sched_getaffinity(0)) // order["num_neighbours"]
    environ.setdefault("OMP_NUM_THREADS", str(max(1, num_threads)))
    try:
        os.chdir(order["folder"])
    except OSError as error:
        raise ValueError(f"cannot open the launcher's folder {order['folder']} on this host: {error}") from None
    return subprocess.Popen(  # noqa: S603 - running the user's command is the purpose
        order["command"], env=environ, stdin=subprocess.DEVNULL, start_new_session=True
    )


def choose_address(addresses: list[str], port: int, timeout_s: float = 5.0) -> tuple[str, str]:
    """Return the first address at which the launcher's store is reachable, and the local address of that connection.

    Raises:
        ValueError: no address is reachable.
    """
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=timeout_s) as connection:
            return address, connection.getsockname()[0]
    raise ValueError(
        f"cannot reach the launcher's port {port} at {', '.join(addresses)} from this host; "
        "name the interface to use with --network-interface, or open the port"
    )


def find_interface(address: str) -> str | None:
    """Return the network interface that has this address; None if none has it, and for a loopback address."""
    if address.startswith("127."):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                if address_of_interface(name, probe) == address:
                    return name
    return None


def address_of_interface(name: str, probe: socket.socket) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        OSError: the interface does not exist, or has no IPv4 address.
    """
    # The answer is a `struct ifreq`: 16 bytes for the name, then a `sockaddr_in`, whose bytes 4 to 7 are the address.
    get_address = 0x8915  # SIOCGIFADDR
    answer = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def watch(pid: int, report: Callable[[str], None], has_ended: threading.Event) -> None:
    """Report the end of the command without reaping it, so that its group keeps its number."""
    returncode = wait_for_end(pid)
    has_ended.set()
    report(f"ended {returncode}")


def wait_for_end(pid: int) -> int:
    """Wait for the end of a child without reaping it, and return its return code; negative for a signal."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def follow_orders(pid: int, grace_s: float) -> float:
    """Forward signals until the launcher orders the end or is lost; return the seconds from SIGTERM to SIGKILL."""
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):
            # The launcher died in the middle of a line.
            break
        command, number = line.split()
        if command == b"end":
            return float(number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.kill if command == b"notify" else os.killpg)(pid, int(number))
    return grace_s


def end_group(pid: int, has_ended: threading.Event, grace_s: float) -> None:
    """Terminate the process group: SIGTERM, SIGKILL after `grace_s`, then reap the command."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)
    has_ended.wait(grace_s)
    # Also if the command has ended, because its children may not have.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
