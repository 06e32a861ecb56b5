"""Runs one rank on a host far from the launcher, and ends it when the launcher is gone or says so.

Sent over standard input to a bare interpreter there, so it needs nothing installed but Python's standard library.
Standard input then goes on with one line of JSON, the order, and lines `signal N` and `end SECONDS`. Its end
means that the launcher, or the way to it, is gone. The guard answers on standard error, after a mark that the order
gives: `started PID`, `ended RETURNCODE`, `refused STATUS REASON`.
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
    """Obeys the launcher until it has no more to say."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Not SIG_IGN, which the rank would inherit.
        signal.signal(ignored, lambda *_: None)
    order = json.loads(sys.stdin.buffer.readline())

    def report(text: str) -> None:
        # In one write, so that no line of the rank gets between; the launcher may be gone.
        with contextlib.suppress(OSError):
            os.write(2, f"{order['mark']}{text}\n".encode())

    try:
        process = start(order)
    except (OSError, ValueError) as error:
        report(f"refused {127 if isinstance(error, FileNotFoundError) else 126} {error}")
        return
    report(f"started {process.pid}")
    has_ended = threading.Event()
    threading.Thread(target=watch, args=(process.pid, report, has_ended), daemon=True).start()
    grace_s = order["grace_s"]
    try:
        grace_s = obey(process.pid, grace_s)
    finally:
        end_group(process.pid, has_ended, grace_s)


def start(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Starts the command with its variables, where the launcher runs.

    Raises:
        OSError: the folder or the program is not there.
        ValueError: no address of the launcher answers.
    """
    environ = {**os.environ, **order["environ"]}
    if order["master_addresses"]:
        environ["MASTER_ADDR"], own = choose_address(order["master_addresses"], int(environ["MASTER_PORT"]))
        # Gloo would take what the host's name means here, which is often a loopback address.
        interface = find_interface(own)
        if interface is not None:
            environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    share = len(os.sched_getaffinity(0)) // order["num_neighbours"]
    environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    try:
        os.chdir(order["folder"])
    except OSError as error:
        raise ValueError(f"cannot go to the launcher's folder {order['folder']} on this host: {error}") from None
    return subprocess.Popen(  # noqa: S603 - running the user's command is the purpose
        order["command"], env=environ, stdin=subprocess.DEVNULL, start_new_session=True
    )


def choose_address(addresses: list[str], port: int, timeout_s: float = 5.0) -> tuple[str, str]:
    """The first address at which the launcher's store answers, and the one of this host on the way to it.

    Raises:
        ValueError: none does.
    """
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=timeout_s) as way:
            return address, way.getsockname()[0]
    raise ValueError(
        f"cannot reach the launcher's port {port} at {', '.join(addresses)} from this host; "
        "name the interface to use with --network-interface, or open the port"
    )


def find_interface(address: str) -> str | None:
    """The network interface that has this address; None for the loopback one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in [] if address.startswith("127.") else socket.if_nameindex():
            with contextlib.suppress(OSError):
                if address_of_interface(name, probe) == address:
                    return name
    return None


def address_of_interface(name: str, probe: socket.socket) -> str:
    """The IPv4 address of a network interface.

    Raises:
        OSError: there is no such interface, or it has none.
    """
    get_address = 0x8915  # SIOCGIFADDR
    answer = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def watch(pid: int, report: Callable[[str], None], has_ended: threading.Event) -> None:
    """Reports the end of the command, which stays a zombie: its group keeps its number."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    has_ended.set()
    report(f"ended {end.si_status if end.si_code == os.CLD_EXITED else -end.si_status}")


def obey(pid: int, grace_s: float) -> float:
    """Passes signals on until the launcher says to end, or is gone; seconds to leave between the two signals."""
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):
            # The launcher died while it spoke.
            break
        word, number = line.split()
        if word == b"end":
            return float(number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, int(number))
    return grace_s


def end_group(pid: int, has_ended: threading.Event, grace_s: float) -> None:
    """SIGTERM, time to obey, SIGKILL."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)
    has_ended.wait(grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
