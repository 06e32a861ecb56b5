"""What happens to a cluster in a soak: faults at random, each for a while, all from one seed."""

import os
import signal
import time
from collections import Counter
from contextlib import suppress

from tests.cluster.serving import flip
from tools.bench.origin import CUT, FLIP, REFUSE, SLOW, STALL, UNAVAILABLE, Fault

_MAX_FLIPS = 8


class Chaos:
    """Does one thing after the other to a cluster, and undoes what is due.

    Args:
        random: where chance comes from.
        network: of the nodes.
        origin: of the data.
        disks: SmallDisk by name of the node.
        mirrors: nodes that nobody reads on: there bytes may flip while the node runs.
        members: file with the list of the nodes, and its lines.

    Attributes:
        flipped: digests of objects of which a byte was flipped or lost, by name of the node.
        done: how often each thing was done.
    """

    def __init__(self, random, network, origin, disks, mirrors, members):
        self._random = random
        self._network = network
        self._origin = origin
        self._disks = disks
        self._mirrors = mirrors
        self._members, self._urls = members
        self._due = {}  # by what: when, and how to undo it
        self.flipped = {node.name: set() for node in network.nodes}
        self.done = Counter()
        self._kinds = [self.kill_process, self.kill_process, self.cut_power, self.flip_byte, self.flip_byte]
        self._kinds += [self.freeze, self.break_origin, self.break_origin, self.change_members]
        self._kinds += [self.fill_disk, self.fill_disk] if all(disk.is_mounted for disk in disks.values()) else []
        self._kinds += [self.slow, self.partition] if network.is_separate else []

    def step(self):
        """Undo what is due, and do one thing more."""
        for what in [what for what, (when, _) in self._due.items() if when <= time.monotonic()]:
            self._due.pop(what)[1]()
        kind = self._random.choice(self._kinds)
        self.done[kind.__name__] += 1
        kind(self._random.choice(self._network.nodes))

    def end(self):
        """Undo everything."""
        for _, undo in self._due.values():
            undo()
        self._due.clear()
        self._origin.resume()

    def kill_process(self, node):
        """Kill any process: a server, a job, a stager."""
        if pids := node.processes():
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(pids), signal.SIGKILL)

    def cut_power(self, node):
        """End a machine; when it comes back its disk is not what it was, and its boot is another one."""
        node.kill()
        cache = node.folder / "cache"
        for name in ("objects", "incoming"):
            files = sorted(path for path in (cache / name).rglob("*") if path.is_file() and path.suffix != ".parts")
            for path in self._random.sample(files, min(len(files), _MAX_FLIPS)):
                self._damage(node, path)
        (cache / "catalogue" / "boot").unlink(missing_ok=True)  # it says which boot the catalogue is of
        node.boot()

    def flip_byte(self, _node):
        """Change an object on the disk of a node that others read from."""
        node = self._random.choice(self._mirrors)
        files = sorted(path for path in (node.folder / "cache" / "objects").rglob("*") if path.is_file())
        if files:
            with suppress(FileNotFoundError):  # evicted meanwhile
                path = self._random.choice(files)
                self.flipped[node.name].add(path.name)
                flip(path, self._random.randrange(path.stat().st_size))

    def freeze(self, node):
        """Stop a machine for a while."""
        node.freeze()
        self._later("freeze", node, node.thaw)

    def slow(self, node):
        """Let little through to and from a machine for a while."""
        node.slow(self._random.choice([20e3, 200e3, 2e6]))
        self._later("slow", node, lambda: node.slow(None))

    def partition(self, _node):
        """Cut the network in two for a while; the origin is on one side, or on both."""
        nodes = self._random.sample(self._network.nodes, 4)
        right = nodes[2:] + ([self._network.origin_address] if self._random.random() < 0.5 else [])
        self._network.partition(nodes[:2], right)
        self._later("partition", None, self._network.heal)

    def fill_disk(self, node):
        """Let something else take the room on a disk for a while."""
        disk = self._disks[node.name]
        disk.fill(self._random.choice([0, 50_000, 500_000]))
        self._later("fill", node, disk.empty)

    def break_origin(self, _node):
        """Let some of the origin's answers be wrong, late or missing for a while."""
        share = self._random.choice([0.05, 0.3, 1.0])
        kinds = [Fault(UNAVAILABLE), Fault(REFUSE), Fault(CUT, 1000), Fault(FLIP, 5000), Fault(SLOW, rate=50e3)]
        kinds += [Fault(STALL, 2000)] if share < 0.1 else []
        fault = self._random.choice(kinds)
        chance = self._random.__class__(self._random.random())  # drawn from in the origin's thread
        self._origin.choose = lambda _exchange: fault if chance.random() < share else None
        self._later("origin", None, self._mend_origin)

    def change_members(self, _node):
        """Take some nodes off the list of all nodes for a while."""
        self._write_members(self._random.sample(self._urls, self._random.randint(1, len(self._urls))))
        self._later("members", None, lambda: self._write_members(self._urls))

    def _later(self, what, node, undo):
        self._due[what, node and node.name] = (time.monotonic() + self._random.uniform(0.5, 6), undo)

    def _mend_origin(self):
        self._origin.choose = None

    def _write_members(self, urls):
        new = self._members.with_suffix(".new")
        new.write_text("\n".join(urls))
        new.rename(self._members)

    def _damage(self, node, path):
        self.flipped[node.name].add(path.name)
        size = path.stat().st_size
        if size and self._random.random() < 0.7:
            flip(path, self._random.randrange(size))
        else:
            os.truncate(path, size // 2)
