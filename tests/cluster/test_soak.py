"""Minutes of everything at once: jobs, servers and staging on four nodes while all that can break does, at random.

DATASVC_SOAK_S says for how long, DATASVC_SOAK_SEED which faults; the seed is printed.
"""

import json
import os
import random
import secrets
import signal
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress

import pytest

from datasvc.cache import Cache
from datasvc.cache.catalogue.quotas import Quota
from datasvc.repository import Repository
from datasvc.repository.store.ranges import Timeouts
from tests.cluster.chaos import Chaos
from tests.cluster.content import make_dataset
from tests.cluster.disk import BudgetWatcher, SmallDisk, files_of
from tests.cluster.program import TIMEOUT_S
from tests.cluster.reader import EXIT_OF_OURS
from tests.cluster.serving import CACHE, Serving
from tests.cluster.store import FileStore
from tests.said import say
from tools.bench.origin import Limits, Origin

SOAK_S = float(os.environ.get("DATASVC_SOAK_S", "60"))
SMALL, LARGE = 3_000_000, 7_500_000  # half of one data set, and less than both
DISK = LARGE + 3_000_000  # the catalogue's room, and some
NUMBERS = {"pets": range(300), "cats": [*range(150), *range(1000, 1150)]}
NOT_LISTED = "which is not in the list of nodes"
# Connections that fell silent before all was mended are given up first.
ENDS_S = Timeouts().silence_s + TIMEOUT_S
# By chaos, with its machine, or told to stop before it could listen or after it had ended.
KILLED = {-signal.SIGKILL, -signal.SIGTERM}


class Job:
    """A job of one node that reads a data set over and over, restarted whenever it ends."""

    def __init__(self, serving, node, ref, name="job"):
        self._serving, self._node, self._ref = serving, node, ref
        self._program = None
        self._name = name
        self._reports = []
        self.ends = Counter()

    def tend(self, seed):
        """Start it where it does not run."""
        if self._program is None or self._program.has_ended(timeout_s=0):
            self.wait()
            report = self._node.folder / f"report-{self._name}-{self._ref}-{len(self._reports)}"
            self._reports.append(report)
            options = ["--seed", seed, "--epochs", 2, "--report", report]
            self._program = self._serving.read(self._node, self._ref, *options)

    def tell_to_stop(self):
        """Have it end after its batch, for which it may wait as long as a silent origin is waited for."""
        if self._program is not None:
            self._program.send_signal(signal.SIGTERM)

    def check(self):
        """Every sample that was ever served was right, and every epoch that was finished whole; returns how many."""
        num_epochs = 0
        for report in filter(os.path.exists, self._reports):
            for line in report.read_text().splitlines():
                with suppress(json.JSONDecodeError):  # killed while it wrote
                    found = json.loads(line)
                    assert found["wrong"] == [], (report, found["wrong"])
                    assert sorted(found["numbers"]) == list(NUMBERS[self._ref])
                    num_epochs += 1
        return num_epochs

    def wait(self):
        """Wait for its end, and note how it ended."""
        if self._program is not None:
            status = self._program.wait(ENDS_S)
            assert status in {0, EXIT_OF_OURS, *KILLED}, (status, self._program.errors())
            kind = self._program.errors().rpartition("\n")[2] if status == EXIT_OF_OURS else ""
            self.ends[kind.partition(":")[0] or status] += 1
            self._program.close()
            self._program = None


@contextmanager
def small_disk(node):
    """Give a node's cache a disk of its own."""
    node.kill()  # where mounts do not propagate, a machine sees those only that were there when it booted
    with SmallDisk(node.folder / CACHE, DISK) as disk:
        node.boot()
        yield disk
        node.kill()


def ends_of(server):
    """Return how a server that ended by itself may have: none starts off the list, or when the origin is silent."""
    return {2 if NOT_LISTED in server.errors() else 5, *KILLED}


def tend_servers(serving, budgets):
    """Start every server that is gone, and check what it died of."""
    for node, budget in budgets.items():
        server = serving.servers.get(node.name)
        if server is not None and server.has_ended(timeout_s=0):
            status = server.wait()
            assert status in ends_of(server), (status, server.errors())
            server.close()
            server = None
        if server is None:
            serving.start(node, budget=str(budget))


def ask_to_stage(serving, node, ref):
    """Ask for staging where that is possible now."""
    with suppress(OSError, AssertionError, ValueError):
        serving.post_stage(node, ref, timeout_s=1)


def check_disk(node, budget, flipped):
    """Scrub a node's cache, and compare its books with its disk; returns how many bad objects lay there."""
    folder = node.folder / CACHE
    with Cache(folder, budget=budget) as cache:
        found = cache.scrub()
        assert set(found.corrupt) <= flipped
        # What a killed fetch left waits for whoever wants the object next. Now it goes, unless somebody is at it.
        cache.set_quota("soak", Quota(maximum_bytes=budget))
        status = cache.status()
        assert status.jobs[1:] == ()
        assert (status.reserved_bytes, list((folder / "incoming").iterdir())) == (0, [])
        on_disk = sum(files_of(folder).values())
        assert status.resident_bytes + status.quarantined_bytes == on_disk <= budget
    return len(found.corrupt)


class Soak:
    """The cluster, its jobs, and what happens to them.

    Args:
        network: of the nodes, which are up.
        folder: for the origin and the list of nodes.
        chance: where all that is random comes from.
        stack: takes what has to be ended.
    """

    def __init__(self, network, folder, chance, stack):
        self.nodes = network.nodes
        self._chance = chance
        repository = Repository.create(str(folder / "repo"))
        for name, numbers in NUMBERS.items():
            make_dataset(repository, name, numbers)
        store = stack.enter_context(FileStore(folder))
        origin = stack.enter_context(Origin(store.url, Limits(latency_s=0.01), host=network.origin_address))
        disks = {node.name: stack.enter_context(small_disk(node)) for node in self.nodes}
        members = folder / "members"
        self.serving = Serving(network, f"{origin.url}/repo", members=f"file:{members}")
        urls = [self.serving.url(node) for node in self.nodes]
        members.write_text("\n".join(urls))
        readers, self._mirrors = self.nodes[:2], self.nodes[2:]
        self.budgets = {**dict.fromkeys(readers, SMALL), **dict.fromkeys(self._mirrors, LARGE)}
        self.jobs = [Job(self.serving, node, ref) for node in readers for ref in NUMBERS]
        self.chaos = Chaos(chance, network, origin, disks, self._mirrors, (members, urls))

    def step(self):
        """Let everything run that should, and one thing more go wrong."""
        tend_servers(self.serving, self.budgets)
        for job in self.jobs:
            job.tend(self._chance.randrange(100))
        ask_to_stage(self.serving, self._chance.choice(self._mirrors), self._chance.choice([*NUMBERS]))
        self.chaos.step()
        time.sleep(self._chance.uniform(0, 1))

    def start_servers(self):
        """Start all servers."""
        tend_servers(self.serving, self.budgets)
        self.serving.wait_until_ready()

    def stop(self):
        """Mend all that is broken, and let everything end in good order."""
        self.chaos.end()
        for job in self.jobs:
            job.tell_to_stop()
        for job in self.jobs:
            job.wait()
        for node in self.nodes:
            server = self.serving.servers[node.name]
            status = self.serving.stop(node)
            assert status in {0, *ends_of(server)}, (status, server.errors())

    def check_is_as_new(self):
        """With what is left a job on every node reads everything, and all is right."""
        self.start_servers()
        for node in self.nodes:
            job = Job(self.serving, node, "pets", name="last")
            job.tend(seed=1)
            job.wait()
            assert job.check() == 2
        assert [self.serving.stop(node) for node in self.nodes] == [0] * len(self.nodes)


@pytest.mark.long
@pytest.mark.timeout(SOAK_S + 240)
def test_whatever_breaks_no_sample_is_wrong_no_byte_over_budget_and_nothing_is_left(network, tmp_path):
    seed = int(os.environ.get("DATASVC_SOAK_SEED", secrets.randbits(32)))
    say(f"soak of {SOAK_S:g} s with DATASVC_SOAK_SEED={seed}")
    with ExitStack() as stack:
        soak = Soak(network, tmp_path, random.Random(seed), stack)
        soak.start_servers()
        caches = {node.folder / CACHE: budget for node, budget in soak.budgets.items()}
        deadline = time.monotonic() + SOAK_S
        with BudgetWatcher(caches) as watcher:
            while time.monotonic() < deadline:
                soak.step()
            soak.stop()
        assert watcher.over == {}
        assert [node.processes() for node in soak.nodes] == [[]] * 4
        num_bad = [check_disk(node, budget, soak.chaos.flipped[node.name]) for node, budget in soak.budgets.items()]
        num_epochs = sum(job.check() for job in soak.jobs)
        say(f"{dict(soak.chaos.done)}; jobs ended {dict(sum((job.ends for job in soak.jobs), Counter()))}")
        say(f"{num_epochs} whole epochs, {watcher.num_looks} looks at disks, {num_bad} bad objects left for a scrub")
        soak.check_is_as_new()
        assert [node.processes() for node in soak.nodes] == [[]] * 4
