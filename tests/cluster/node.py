"""One node of the cluster, whatever it is made of: an address, a folder, and programs that run there."""

import abc
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster.program import TIMEOUT_S

ROOT = Path(__file__).parents[2]


class Node(abc.ABC):
    """A machine as its programs see it. Its folder outlives it, as a disk does.

    Args:
        name: of the node, such as "node-0".
        address: what its programs bind to and others connect to.
        folder: its disk; new programs start in it.
    """

    def __init__(self, name, address, folder):
        folder.mkdir()
        self.name = name
        self.address = address
        self.folder = folder
        self.is_up = False
        self._numbers = itertools.count(1)
        self._programs = []

    def start(self, *command, environ=None):
        """Start a program in this node; its own process, in its own session.

        Args:
            command: its words. A first word of `sys.executable` runs our interpreter.
            environ: what to add to this process's environment.

        Returns:
            The running Program.
        """
        assert self.is_up, f"{self.name} is down"
        errors = self.folder / f"{next(self._numbers)}-{Path(str(command[0])).name}.err"
        with open(errors, "wb") as stream:
            program = self._start(
                [str(word) for word in command],
                errors,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                start_new_session=True,
            )
        self._programs.append(program)
        return program

    def run(self, *command, environ=None, timeout_s=TIMEOUT_S):
        """Run a program to its end; returns what it printed. Raises AssertionError where it fails or hangs."""
        return self.start(*command, environ=environ).finish(timeout_s)

    def datasvc(self, *words, environ=None):
        """Start the command line of datasvc in this node; returns the running Program."""
        return self.start(sys.executable, "-m", "datasvc.cli.main", *words, environ=environ)

    def kill(self):
        """Take the power away: every process of this node is gone when this returns. Harmless where it is down."""
        if self.is_up:
            self.is_up = False
            self._power_off()
            for program in self._programs:
                program.close()
            self._programs.clear()

    @abc.abstractmethod
    def boot(self):
        """Bring the node up, at first or after `kill`, with the same address and folder."""

    @abc.abstractmethod
    def processes(self):
        """Return the process ids, as seen from here, of what runs in this node."""

    def freeze(self):
        """Stop every process of this node: connections to it stay, and soon nothing answers."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self):
        """Let every process of this node go on."""
        self._signal_all(signal.SIGCONT)

    @abc.abstractmethod
    def _start(self, command, errors, **options):
        """Start `command` with `Popen`'s options; returns a Program."""

    @abc.abstractmethod
    def _power_off(self):
        """End every process of this node, and return when they are gone."""

    @abc.abstractmethod
    def _signal_all(self, number):
        """Send a signal to every process of this node at once."""


class Network:
    """Some nodes and the way between them, from `__enter__` to `__exit__`.

    Attributes:
        kind: what the nodes are made of, for people.
        nodes: list of Node.
        origin_address: what an origin outside of the nodes binds to so that they reach it.
        port: at which a server may listen in each node.
        is_separate: whether each node has a network of its own, so that `partition` and `slow` exist.
    """

    kind = ""
    is_separate = False

    def __init__(self, nodes, origin_address):
        self.nodes = nodes
        self.origin_address = origin_address

    def __enter__(self):
        try:
            for node in self.nodes:
                node.boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error):
        for node in self.nodes:
            node.kill()
