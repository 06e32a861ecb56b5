"""Two nodes of one list, over real sockets: each object leaves the origin once."""

import socket

import pytest

from datasvc.shards import ingest


@pytest.fixture
def two(run, origin, folder, tmp_path):
    repository = origin[0]
    ingest(repository, str(folder), "pets", shard_bytes=1000)
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    peers = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    return [
        run(
            f"cache{number}",
            port=port,
            peers=peers,
            own_url=f"http://127.0.0.1:{port}",
            repositories=(repository.url,),
        )
        for number, port in enumerate(ports)
    ]


def staged(node):
    job_id = node.ask("POST", "/stage", {"ref": "pets"}).json["id"]
    while (job := node.get(f"/stage/{job_id}").json)["state"] in ("waiting", "running"):
        pass
    return job


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
