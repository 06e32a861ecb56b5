"""Nodes that start with empty caches, all at once: every byte leaves the origin once, whatever the origin is."""

import os
from collections import Counter

import pytest

from datasvc.repository import Repository
from tests.cluster.content import bytes_of, make_dataset, objects_of
from tests.cluster.serving import Serving, resident_digests
from tests.cluster.store import FileStore
from tools.bench.origin import Limits, Origin

LIMITS = Limits(connection_rate=35e6, latency_s=0.02)


def check_cold_start(serving, origin, split):
    """Stage on all nodes at once from nothing, and look at everything that the issue is about."""
    for node in serving.nodes:
        serving.start(node)
    serving.wait_until_ready()
    origin.forget()
    jobs = serving.stage_on(serving.nodes)
    size_bytes = bytes_of(split)
    assert [(job["state"], job["done_bytes"]) for job in jobs] == [("done", size_bytes)] * 4, jobs
    objects = objects_of(split)
    read = Counter()
    for exchange in origin.exchanges():
        read[exchange.path.rpartition("/")[2].partition("?")[0]] += exchange.num_bytes
    assert {digest: read[digest] for digest in objects} == objects
    for node in serving.nodes:
        assert resident_digests(node) == objects.keys()
        found = serving.status(node)
        counters = found["cache"]["counters"]
        # Which node brings a shard from the origin its name decides: for one of them it may be none.
        assert counters.get("origin_bytes", 0) + counters["peer_bytes"] == size_bytes
        assert counters["peer_bytes"] > 0
        assert all(peer["num_failed"] == peer["num_lying"] == 0 for peer in found["peers"].values())
    totals = sum((Counter(serving.status(node)["cache"]["counters"]) for node in serving.nodes), Counter())
    assert totals["peer_bytes"] == totals["served_bytes"] == 3 * size_bytes
    assert [serving.stop(node) for node in serving.nodes] == [0] * 4


@pytest.mark.parametrize("network", ["namespaces", pytest.param("loopback", marks=pytest.mark.slow)], indirect=True)
def test_of_four_nodes_that_stage_at_once_each_byte_leaves_the_origin_once(network, tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    split = make_dataset(repository, "pets", range(300))
    with FileStore(tmp_path) as store, Origin(store.url, LIMITS, host=network.origin_address) as origin:
        check_cold_start(Serving(network, f"{origin.url}/repo"), origin, split)


@pytest.mark.slow
def test_so_it_does_from_a_real_object_store(network, s3_bucket):
    repository = Repository.create(f"{s3_bucket}/cold")
    split = make_dataset(repository, "pets", range(150))
    with Origin(os.environ["AWS_ENDPOINT_URL"], LIMITS, host=network.origin_address) as origin:
        environ = {"AWS_ENDPOINT_URL": origin.url}
        check_cold_start(Serving(network, repository.url, environ=environ), origin, split)
