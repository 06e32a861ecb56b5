"""Two nodes of one list, over real sockets: each object leaves the origin once."""

import pytest

from datasvc.shards import ingest
from tests.node.conftest import staged, two_nodes


@pytest.fixture
def two(origin, folder, tmp_path):
    repository = origin[0]
    ingest(repository, str(folder), "pets", shard_bytes=1000)
    with two_nodes(tmp_path, repository.url) as nodes:
        yield nodes


def test_each_object_leaves_the_origin_once(two):
    jobs = [staged(node) for node in two]
    assert [job["state"] for job in jobs] == ["done", "done"]
    counters = [node.get("/status").json["cache"]["counters"] for node in two]
    assert sum(each["origin_bytes"] for each in counters) == jobs[0]["total_bytes"]
    assert sum(each["peer_bytes"] for each in counters) == sum(each["served_bytes"] for each in counters) > 0
    (report,) = two[0].get("/status").json["peers"].values()
    assert (report["num_ok"] > 0, report["num_failed"]) == (True, 0)
    assert f'datasvc_peer_ok_total{{peer="{two[1].url}"}}' in two[0].get("/metrics").body.decode()


def test_a_node_whose_peer_is_gone_takes_all_from_the_origin(two):
    two[1].stop()
    job = staged(two[0])
    assert (job["state"], job["bytes"]["origin"]) == ("done", job["total_bytes"])
