"""One of three nodes is dead, stuck, slow, full, lies or is a stranger: the others notice, and go round it."""

import json
import re
import sys
import threading

import pytest

from datasvc.cache.peers.placement import rank_nodes
from datasvc.repository import Repository
from tests.cluster.content import bytes_of, make_dataset, objects_of
from tests.cluster.serving import Serving, flip, make_gate, object_path, resident_digests
from tests.cluster.store import FileStore
from tools.bench.origin import CUT, FLIP, REFUSE, UNAVAILABLE, Fault, Limits, Origin

# Answers every request for an object with as many bytes as are asked for, all of them wrong.
LIAR = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

class Liar(BaseHTTPRequestHandler):
    def do_GET(self):
        size = int(parse_qs(urlsplit(self.path).query).get("size", ["2"])[0])
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.write(bytes(size))

server = ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Liar)
print("lying", flush=True)
server.serve_forever()
"""


class Cluster(Serving):
    """Node `bad`, about which something is wrong, and the others, which stage; with their data set and origin."""

    def __init__(self, network, origin, split):
        super().__init__(network, f"{origin.url}/repo")
        self.nodes = network.nodes[:3]
        self.members = ",".join(map(self.url, self.nodes))
        self.good, self.bad = self.nodes[:2], self.nodes[2]
        self.origin, self.split = origin, split
        self.size_bytes = bytes_of(split)
        owned = [
            digest
            for digest in objects_of(split)
            if rank_nodes(digest, self.members.split(","))[0] == self.url(self.bad)
        ]
        self.share_bytes = sum(objects_of(split)[digest] for digest in owned)  # of the bad node

    def start_good(self):
        for node in self.good:
            self.start(node)
        self.wait_until_ready()
        self.origin.forget()

    def start_all(self, **options_of_bad):
        self.start(self.bad, **options_of_bad)
        self.start_good()

    def stage_on_good(self):
        """Stage on the good nodes at once, and check that they have everything, right; returns the origin's bytes."""
        jobs = self.stage_on(self.good)
        assert [(job["state"], job["error"]) for job in jobs] == [("done", None)] * 2
        for node in self.good:
            assert resident_digests(node) == objects_of(self.split).keys()
        return sum(each.num_bytes for each in self.origin.exchanges() if is_shard(each, self.split))

    def complaints(self, what):
        """Return how often the good nodes complained of the bad one."""
        return sum(self.status(node)["peers"][self.url(self.bad)][what] for node in self.good)


def is_shard(exchange, split):
    """Return whether an exchange is of a shard, not of a table or an entry."""
    return exchange.path.rpartition("/")[2] in objects_of(split)


@pytest.fixture
def cluster(network, tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    split = make_dataset(repository, "pets", range(300))
    with (
        FileStore(tmp_path) as store,
        Origin(store.url, Limits(latency_s=0.01), host=network.origin_address) as origin,
    ):
        yield Cluster(network, origin, split)


@pytest.mark.slow
def test_a_dead_node_costs_the_origin_nothing(cluster):
    cluster.bad.kill()
    cluster.start_good()
    assert cluster.stage_on_good() == cluster.size_bytes
    assert cluster.complaints("num_failed") >= 2


@pytest.mark.slow
def test_a_node_that_dies_while_it_is_asked_costs_its_own_share_at_most(cluster):
    asked = threading.Event()

    def listen(exchange):
        if is_shard(exchange, cluster.split):
            asked.set()

    cluster.start_all()
    cluster.origin.choose = listen
    jobs = [(node, cluster.post_stage(node)) for node in cluster.good]
    asked.wait()
    cluster.bad.kill()
    assert [cluster.wait_for_job(*job)["state"] for job in jobs] == ["done"] * 2
    assert cluster.stage_on_good() <= cluster.size_bytes + cluster.share_bytes
    assert cluster.complaints("num_failed") > 0


@pytest.mark.slow
def test_a_frozen_node_is_left_alone(cluster):
    cluster.start_all()
    cluster.bad.freeze()
    assert cluster.stage_on_good() == cluster.size_bytes
    assert cluster.complaints("num_failed") > 0


@pytest.mark.slow
def test_a_slow_node_is_left_alone(cluster, separate_network):
    cluster.start_all()
    cluster.bad.slow(50e3)
    assert cluster.stage_on_good() <= cluster.size_bytes + cluster.share_bytes
    assert cluster.complaints("num_failed") > 0


@pytest.mark.slow
def test_a_byte_that_flipped_on_a_nodes_disk_goes_no_further(cluster):
    cluster.start_all()
    cluster.stage_on([cluster.bad])
    cluster.origin.forget()
    for path in map(object_path, [cluster.bad] * 99, objects_of(cluster.split)):
        flip(path)
    assert cluster.stage_on_good() <= cluster.size_bytes
    num_lies = cluster.complaints("num_lying")
    assert num_lies > 0
    assert sum(cluster.status(node)["cache"]["counters"].get("corrupt", 0) for node in cluster.good) == num_lies
    # Where it flipped it is known now too, and not given to anybody again.
    assert 0 < cluster.status(cluster.bad)["cache"]["counters"]["corrupt"] <= num_lies


@pytest.mark.slow
def test_a_liar_in_the_list_is_found_out(cluster):
    host, port = re.fullmatch(r"http://(.*):(\d+)", cluster.url(cluster.bad)).groups()
    cluster.bad.start(sys.executable, "-c", LIAR, host, port).read_line("lying")
    cluster.start_good()
    assert cluster.stage_on_good() == cluster.size_bytes
    assert cluster.complaints("num_lying") > 0


@pytest.mark.slow
def test_a_node_without_room_is_of_little_use_and_does_no_harm(cluster):
    cluster.start_all(budget="250kB")
    assert cluster.stage_on_good() <= cluster.size_bytes + cluster.share_bytes


@pytest.mark.slow
def test_a_node_with_another_token_is_not_talked_to(cluster):
    cluster.start_all(token="none-of-the-others-knows-this")
    assert cluster.stage_on_good() == cluster.size_bytes
    assert cluster.complaints("num_failed") > 0


@pytest.mark.slow
def test_what_goes_wrong_at_the_origin_now_and_then_is_not_seen(cluster):
    faults = [Fault(UNAVAILABLE), Fault(CUT, offset=1000), Fault(REFUSE), Fault(FLIP, offset=10_000)]
    flipped = set()

    def choose(exchange):
        fault = faults[exchange.number // 7 % 4] if exchange.number % 7 == 0 else None
        if fault is not None and fault.kind == FLIP:
            if exchange.path in flipped:
                return None  # what is wrong twice is the origin's own damage, and an error
            flipped.add(exchange.path)
        return fault

    cluster.start_all()
    cluster.origin.choose = choose
    cluster.stage_on_good()


@pytest.mark.slow
def test_what_is_resident_anywhere_is_served_while_the_origin_is_down(cluster):
    cluster.start(cluster.bad)
    cluster.start(cluster.good[0], budget="2MB")  # so that a job there fetches until its end
    cluster.wait_until_ready()
    cluster.stage_on([cluster.bad])
    gate = make_gate(cluster.good[0])
    reader = cluster.read(cluster.good[0], "pets", "--pause-at", 260, "--gate", gate)
    reader.read_line("paused")
    cluster.origin.choose = lambda _exchange: Fault(REFUSE)
    gate.write_text("go on")
    seen = json.loads(reader.read_line("served"))
    assert (seen["wrong"], sorted(seen["served"]["0"])) == ([], list(range(300)))
