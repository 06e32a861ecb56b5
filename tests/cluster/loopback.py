"""Nodes as processes of this machine, each with an address of its own on loopback: where no more is allowed.

A killed node refuses connections where a real one would be silent. There is one network, so none of it can be cut.
"""

import os
import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.cluster.node import Network, Node
from tests.cluster.program import Program, wait_for_end
from tests.support.ports import reserved_ports

_FIRST_HOST = 11


class LoopbackNetwork(Network):
    """Nodes at 127.0.0.11 and following, and the origin at 127.0.0.1.

    Args:
        folder: for the folders of the nodes.
        num_nodes: how many.
    """

    kind = "processes with addresses of their own on loopback"

    def __init__(self, folder, num_nodes):
        hosts = enumerate(range(_FIRST_HOST, _FIRST_HOST + num_nodes))
        super().__init__(
            [LoopbackNode(f"node-{number}", f"127.0.0.{host}", folder / f"node-{number}") for number, host in hosts],
            "127.0.0.1",
        )
        self._reserved = ExitStack()

    def __enter__(self):
        (self.port,) = self._reserved.enter_context(reserved_ports(1))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._reserved.close()


class LoopbackNode(Node):
    """A node whose processes are the sessions that it started. What leaves its session is lost from sight."""

    def boot(self):
        self.is_up = True

    def processes(self):
        sessions = {program.pid for program in self._programs}
        return [pid for pid in _running() if _session(pid) in sessions]

    def _start(self, command, errors, **options):
        process = subprocess.Popen(command, **options)
        return Program(process, process.pid, errors)

    def _power_off(self):
        # A process may fork while the others are killed, so what is left is looked for until nothing is.
        while pids := self.processes():
            for pid in pids:
                _kill_and_wait(pid)

    def _signal_all(self, number):
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _running():
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    yield int(entry.name)


def _session(pid):
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _kill_and_wait(pid):
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            wait_for_end(descriptor)
        finally:
            os.close(descriptor)
