"""Nodes as network, process and mount namespaces, joined by a bridge: a machine each, to what runs in them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.cluster.namespace import Namespace, RefusedError
from tests.cluster.node import Network, Node
from tests.cluster.program import Program
from tests.cluster.switch import MAX_NODES, Switch

_NO_STATION = "02:00:00:00:00:fe"
_ANSWERS_WITHIN_S = 5
# Only children of what enters are in the process namespace. A shell waits for one, and, unlike `nsenter`, is not
# stopped when that is: stopped, it could not bury its child, and the namespace could not end.
_WAITING = ("sh", "-c", '"$@"; exit $?', "sh")
# Says that it is inside, then becomes the program.
_BECOMING = ("sh", "-c", 'cd "$0" && echo >&0 && exec "$@" </dev/null')


class NamespaceNetwork(Network):
    """Nodes with a network of their own, and an origin's address that all of them reach.

    Args:
        folder: for the folders of the nodes.
        num_nodes: how many, at most 12.

    Raises:
        RefusedError: on `__enter__`.
    """

    kind = "network namespaces joined by a bridge"
    is_separate = True
    port = 8765  # below those that the system gives, in networks where nothing else runs

    def __init__(self, folder, num_nodes):
        assert num_nodes <= MAX_NODES
        self._switch = Switch()
        nodes = [NamespaceNode(number, folder / f"node-{number}", self._switch) for number in range(num_nodes)]
        super().__init__(nodes, "")

    def __enter__(self):
        self._switch.boot()
        self.origin_address = self._switch.address(1)
        super().__enter__()
        try:
            self._check_way()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self._switch.close()

    def _check_way(self):
        """Raise RefusedError where a node cannot reach this machine: a firewall may be in between."""
        with socket.create_server((self.origin_address, 0)) as listener:
            reach = f"import socket; socket.create_connection({listener.getsockname()!r}, {_ANSWERS_WITHIN_S})"
            program = self.nodes[0].start(sys.executable, "-I", "-S", "-c", reach)
            if program.wait() != 0:
                raise RefusedError(f"the nodes cannot reach this machine: {program.errors()}")

    def partition(self, *groups):
        """Let packets pass within groups only; what is in no group keeps all its ways.

        Args:
            groups: lists of nodes, or of `origin_address`. Nothing tells a node: what it sends is lost.
        """
        for group in groups:
            others = [each for other in groups if other is not group for each in other]
            for node in group:
                if isinstance(node, Node):
                    node.lose(*(each.address if isinstance(each, Node) else each for each in others))

    def heal(self):
        """Undo every `partition`."""
        for node in self.nodes:
            node.find_all()


class NamespaceNode(Node):
    """A node that is a machine to its programs: its own network, its own process ids, and this machine's files.

    Args:
        number: from 0.
        folder: its disk.
        switch: what it is plugged into.
    """

    def __init__(self, number, folder, switch):
        super().__init__(f"node-{number}", "", folder)
        self._number = number
        self._switch = switch
        self._lost = set()

    def boot(self):
        # A tmpfs that a test mounts later shows in the node too: mounts come in, and none gets out.
        self._space = Namespace("--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "slave")
        self.is_up = True
        self.address = self._switch.address(self._number + 2)
        self._switch.plug(self._port, self._space, self._number + 2)
        self.lose(*self._lost)

    def processes(self):
        own = os.readlink(f"/proc/{self._space.pid}/ns/pid_for_children")
        found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return [pid for pid in found if _is_in(pid, own) and _inner_pid(pid) != 1]

    def slow(self, rate):
        """Let `rate` bytes per second in and as many out, or everything where that is None."""
        self._space.limit("eth0", rate)
        self._switch.limit(self._port, rate)

    def lose(self, *addresses):
        """Send what goes to these addresses nowhere."""
        self._lost.update(addresses)
        if addresses and self.is_up:
            settled = f"lladdr {_NO_STATION} nud permanent dev eth0"
            self._space.configure(*(f"neighbour replace {address} {settled}" for address in addresses))

    def cut(self, *addresses):
        """Have no route to these addresses until the node is booted again: a connection to them fails at once."""
        self._space.configure(*(f"route add unreachable {address}" for address in addresses))

    def find_all(self):
        """Undo every `lose`."""
        if self._lost and self.is_up:
            self._space.configure(*(f"neighbour delete {address} dev eth0" for address in self._lost))
        self._lost.clear()

    @property
    def _port(self):
        return f"port-{self._number}"

    def entering(self, *words):
        """Return the command that runs `words` in this node; end it with a shell that waits, see `_WAITING`."""
        entrance = f"--pid=/proc/{self._space.pid}/ns/pid_for_children", f"--mount=/proc/{self._space.pid}/ns/mnt"
        net, *rest = self._space.entering(*words)
        return [net, "--no-fork", *entrance, *rest]

    def _start(self, command, errors, **options):
        started, written = os.pipe()
        with open(started, "rb") as stream:
            try:
                words = self.entering(*_WAITING, *_BECOMING, str(options["cwd"]), *command)
                entry = subprocess.Popen(words, **options | {"stdin": written})
            finally:
                os.close(written)
            stream.readline()
        # Its id in here is not the one out there, which its parent knows. Without children it has ended already.
        children = Path(f"/proc/{entry.pid}/task/{entry.pid}/children").read_text(encoding="ascii").split()
        return Program(entry, int(children[0]) if children else entry.pid, errors)

    def _power_off(self):
        # The link first: sockets of processes that end would tell the others, as no power cut does.
        self._switch.unplug(self._port)
        self._space.close()

    def _signal_all(self, number):
        # It fails where nothing runs, and then there is nothing to do.
        words = self.entering(*_WAITING, "sh", "-c", f"kill -{int(number)} -1")
        subprocess.run(words, check=False, stderr=subprocess.DEVNULL)


def _is_in(pid, namespace):
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == namespace
    except OSError:
        return False


def _inner_pid(pid):
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 1
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])
