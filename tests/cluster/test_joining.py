"""Who is there changes while jobs run: nodes join, leave and are cut off, and no sample is lost, doubled or wrong."""

import json

import pytest

from datasvc.repository import Repository
from tests.cluster.content import bytes_of, make_dataset, objects_of
from tests.cluster.serving import Serving, make_gate, resident_digests
from tests.cluster.store import FileStore
from tools.bench.origin import Limits, Origin

NUM_SAMPLES = 480


@pytest.fixture
def origin(network, tmp_path):
    """An origin with `pets`, and with `cats` of which the first half is the same."""
    repository = Repository.create(str(tmp_path / "repo"))
    splits = {
        "pets": make_dataset(repository, "pets", range(NUM_SAMPLES)),
        "cats": make_dataset(repository, "cats", [*range(NUM_SAMPLES // 2), *range(1000, 1000 + NUM_SAMPLES // 2)]),
    }
    with (
        FileStore(tmp_path) as store,
        Origin(store.url, Limits(latency_s=0.01), host=network.origin_address) as running,
    ):
        running.splits = splits
        yield running


def shard_bytes(origin, split, clients=None):
    """Return the bytes of a split's shards that left the origin, to some nodes or all."""
    names, addresses = objects_of(split), None if clients is None else {node.address for node in clients}
    return sum(
        each.num_bytes
        for each in origin.exchanges()
        if each.path.rpartition("/")[2] in names and (addresses is None or each.client in addresses)
    )


def start_readers(serving, nodes, *options, pause_at):
    """Start one rank of a job on each node; returns them and their gates, all paused."""
    gates = [make_gate(node) for node in nodes]
    readers = [
        serving.read(
            node, "pets", "--rank", rank, "--world-size", len(nodes), "--pause-at", pause_at, "--gate", gate, *options
        )
        for rank, (node, gate) in enumerate(zip(nodes, gates, strict=True))
    ]
    for reader in readers:
        reader.read_line("paused")
    return readers, gates


def check_served(readers, numbers, epochs=1):
    """Wait for the ranks of a job: together they served every sample once an epoch, and none was wrong."""
    seen = [json.loads(reader.read_line("served")) for reader in readers]
    assert [each["wrong"] for each in seen] == [[]] * len(seen)
    for epoch in range(epochs):
        served = sorted(number for each in seen for number in each["served"][str(epoch)])
        assert served == sorted(numbers)
    assert [reader.wait() for reader in readers] == [0] * len(readers)


def write_members(path, serving, nodes):
    """Publish who the nodes are, as the page cluster.md says."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{serving.url(node)}\n" for node in nodes))
    new.rename(path)


@pytest.mark.slow
def test_nodes_that_join_and_leave_in_mid_epoch_cost_no_sample(network, origin, tmp_path):
    members = tmp_path / "members"
    serving = Serving(network, f"{origin.url}/repo", members=f"file:{members}")
    first, leaving, third, joining = network.nodes
    write_members(members, serving, [first, leaving, third])
    for node in (first, leaving, third):
        serving.start(node, budget="2MB")  # a job fetches until its end
    serving.wait_until_ready()
    readers, gates = start_readers(serving, [first, third], "--epochs", 2, pause_at=160)
    write_members(members, serving, [first, third, joining])
    serving.start(joining, budget="1GB")
    serving.wait_until_ready()
    leaving.kill()
    for gate in gates:
        gate.write_text("go on")
    check_served(readers, range(NUM_SAMPLES), epochs=2)
    assert serving.status(joining)["cache"]["counters"]["served_bytes"] > 0
    for node in (first, third, joining):
        assert resident_digests(node) <= objects_of(origin.splits["pets"]).keys()


@pytest.mark.slow
def test_of_a_cluster_that_is_cut_in_two_each_half_reads_the_origin_once(separate_network, origin):
    network, split = separate_network, origin.splits["pets"]
    serving = Serving(network, f"{origin.url}/repo")
    for node in network.nodes:
        serving.start(node)
    serving.wait_until_ready()
    halves = network.nodes[:2], network.nodes[2:]
    network.partition(*halves)
    origin.forget()
    jobs = serving.stage_on(network.nodes)
    assert [(job["state"], job["error"]) for job in jobs] == [("done", None)] * 4
    assert [shard_bytes(origin, split, half) for half in halves] == [bytes_of(split)] * 2
    for node in network.nodes:
        assert resident_digests(node) == objects_of(split).keys()
    network.heal()


@pytest.mark.slow
def test_jobs_that_are_cut_off_from_the_origin_continue_once_it_is_reachable(separate_network, origin):
    network = separate_network
    serving = Serving(network, f"{origin.url}/repo")
    cut_off, others = network.nodes[:2], network.nodes[2:]
    for node in network.nodes:
        serving.start(node, budget="2MB" if node in cut_off else "1GB")
    serving.wait_until_ready()
    readers, gates = start_readers(serving, cut_off, pause_at=80)
    network.partition(cut_off, [*others, network.origin_address])
    for gate in gates:
        gate.write_text("go on")
    jobs = serving.stage_on(others)
    assert [(job["state"], job["error"]) for job in jobs] == [("done", None)] * 2
    network.heal()
    check_served(readers, range(NUM_SAMPLES))


@pytest.mark.slow
def test_two_jobs_with_different_data_share_a_folder_and_a_server(network, origin):
    serving = Serving(network, f"{origin.url}/repo")
    node, peer = serving.nodes = network.nodes[:2]
    serving.members = ",".join(map(serving.url, serving.nodes))
    pets, cats = origin.splits["pets"], origin.splits["cats"]
    assert bytes_of(pets, cats) < bytes_of(pets) + bytes_of(cats)  # some shards are the same
    for each in serving.nodes:
        serving.start(each)
    serving.wait_until_ready()
    origin.forget()
    readers = [serving.read(node, name, "--epochs", 2) for name in ("pets", "cats")]
    jobs = [(node, serving.post_stage(node, name)) for name in ("cats", "pets")]
    assert [serving.wait_for_job(*job)["state"] for job in jobs] == ["done", "done"]
    check_served(readers[:1], range(NUM_SAMPLES), epochs=2)
    check_served(readers[1:], [*range(NUM_SAMPLES // 2), *range(1000, 1000 + NUM_SAMPLES // 2)], epochs=2)
    assert resident_digests(node) == objects_of(pets, cats).keys()
    assert resident_digests(peer) < objects_of(pets, cats).keys()
    counters = serving.status(node)["cache"]["counters"]
    assert counters["origin_bytes"] + counters["peer_bytes"] == bytes_of(pets, cats)
