"""The page Cluster, and the problems of nodes, with two real nodes of one list."""

import json
import shutil
import urllib.request
from types import SimpleNamespace

import pytest

import datasvc
from datasvc.drawing import ChartSeries
from datasvc.testing import small_dataset
from datasvc.ui.pages.cluster import _group
from datasvc.ui.pages.problems import disk_problems, node_problems
from datasvc.ui.web import node_monitor
from datasvc.ui.web.node_monitor import NodeState
from tests.cli.command import run as run_command
from tests.node.conftest import staged, two_nodes
from tests.ui.conftest import check_accessible, check_width, running_ui, texts


@pytest.fixture
def cluster(tmp_path):
    """The URL of a repository, and two nodes that serve its shards."""
    repository = tmp_path / "repo"
    small_dataset(datasvc.open(str(repository), create=True), "pets", samples=96)
    with two_nodes(tmp_path, repository) as nodes:
        yield repository, nodes


@pytest.fixture
def often(monkeypatch):
    """Read the nodes all the time, so that a page that follows them has something to follow."""
    monkeypatch.setattr(node_monitor, "INTERVAL_S", 0.02)


def test_the_cluster_shows_what_top_prints_of_each_node(cluster):
    repository, nodes = cluster
    jobs = [staged(node) for node in nodes]
    urls = tuple(node.url for node in nodes)
    with running_ui(repository, nodes=urls) as server:
        shown = server.json("/cluster", "nodes")
        for url in urls:
            top = json.loads(run_command("top", "--node", url, "--json").stdout)
            for same in ("version", "process", "jobs", "peers"):
                assert shown[url][same] == top[same]
            assert shown[url]["cache"]["counters"] == top["cache"]["counters"]
        text = texts(server.get("/cluster")[2])
        assert "2 nodes." in text
        assert jobs[0]["state"] == "done"
        assert "pets@1" in text
        assert server.json(f"/cluster?node={urls[1]}", "nodes").keys() == {urls[1]}
        assert f"datasvc top --node {urls[1]} --json" in server.get(f"/cluster?node={urls[1]}")[2]
        assert server.get("/cluster?node=http://elsewhere:1")[0] == 404


def test_the_owners_of_shards_are_those_that_the_nodes_choose(cluster):
    repository, nodes = cluster
    urls = tuple(node.url for node in nodes)
    jobs = [staged(node) for node in nodes]
    with running_ui(repository, nodes=urls) as server:
        placement = server.json("/cluster", "placement")
    owned = placement["nodes"]
    assert placement["dataset"] == "pets@1"
    assert sum(each["owns"]["shards"] for each in owned.values()) == placement["num_shards"] > 2
    # What the first node staged from its peer is what the peer owns.
    assert owned[urls[1]]["owns"]["bytes"] == jobs[0]["bytes"]["peer"]
    assert all(each["owns"] == each["serves"] for each in owned.values())


def test_a_node_that_does_not_respond_stays_listed_with_its_last_values(cluster, often):
    repository, nodes = cluster
    urls = [node.url for node in nodes]
    with running_ui(repository, nodes=tuple(urls)) as server:
        assert "error" not in server.json("/cluster", "nodes")[urls[1]]
        assert '<div id="problems" data-live>' in server.get("/cluster")[2]
        nodes[1].stop()
        while "error" not in (gone := server.json("/cluster", "nodes")[urls[1]]):
            pass
        assert gone["last"]["cache"]["limit_bytes"] > 0
        assert gone["read"] <= gone["tried"]
        text = texts(server.get("/cluster")[2])
        assert "2 nodes, of which 1 does not respond" in text
        assert f"{urls[1]} does not respond:" in text
        assert "what is shown are its last values" in text
        assert f"{urls[1]} does not respond:" in texts(server.get("/")[2])
        owned = server.json("/cluster", "placement")
        assert owned["nodes"][urls[1]]["serves"]["shards"] == 0
        assert owned["nodes"][urls[0]]["serves"]["shards"] == owned["num_shards"]


def test_each_of_several_nodes_has_a_chart_with_the_same_scales():
    lines = [ChartSeries(f"http://node{number}:1", [-1.0, 0.0], [1.0, number * 1e6]) for number in range(1, 11)]
    group = _group("From peers", lines, "bytes/s", is_one=False)
    assert group["title"] == "From peers, first 8 of 10 nodes"
    assert len(group["pictures"]) == 8
    assert all(">0 bytes/s<" in picture and ">8 MB/s<" in picture for picture in group["pictures"])
    (one,) = _group("Traffic", lines[:3], "bytes/s")["pictures"]
    assert one.count('class="key"') == 3
    # The axis counts the minutes back from now.
    assert "minutes ago" in one
    assert ">1</text>" in one
    assert ">-1</text>" not in one


def test_a_reader_sees_staging_without_loading_the_page_again(cluster, page, monkeypatch):
    repository, nodes = cluster
    monkeypatch.setattr(node_monitor, "INTERVAL_S", 0.2)
    with running_ui(repository, nodes=tuple(node.url for node in nodes)) as server:
        page.goto(server.url + "/cluster")
        page.get_by_text("live", exact=True).wait_for()
        page.get_by_text("nothing was requested yet").wait_for()
        page.get_by_text("Numbers of the charts").click()
        staged(nodes[0])
        page.get_by_role("progressbar").first.wait_for()
        page.get_by_role("cell", name="done").wait_for()
        monkeypatch.setattr(node_monitor, "INTERVAL_S", 600)
        # What the reader opened stays open.
        assert page.locator("#numbers").evaluate("element => element.open")
        check_accessible(page)
        check_width(page)
        page.goto("about:blank")


def test_events_have_the_headers_of_all_responses(filled):
    with running_ui(filled) as server, urllib.request.urlopen(f"{server.url}/api/cluster/events") as stream:
        assert stream.headers.get_content_type() == "text/event-stream"
        assert stream.headers["Content-Security-Policy"].startswith("default-src 'self'")


def test_without_nodes_the_page_shows_how_to_start_one(filled):
    with running_ui(filled) as server:
        assert f"datasvc serve --cache FOLDER --repo {filled}" in server.get("/cluster")[2]


def test_a_history_is_bounded_and_survives_a_restart_of_the_counters(monkeypatch):
    monkeypatch.setattr(node_monitor, "MAX_SAMPLES", 3)
    monitor = node_monitor.NodeMonitor(["http://127.0.0.1:1"])
    answers = [{"cache": cache(origin_bytes=count)} for count in (10, 20, 30, 5)]
    monkeypatch.setattr(monitor._clients["http://127.0.0.1:1"], "status", lambda: answers.pop(0))
    for _ in range(4):
        monitor.sample("http://127.0.0.1:1")
    (state,) = monitor.states()
    assert [sample.counter("origin_bytes") for sample in state.samples] == [20, 30, 5]


def cache(**changes):
    names = ("resident_bytes", "reserved_bytes", "quarantined_bytes", "pinned_bytes", "num_resident")
    sizes = {**dict.fromkeys(names, 0), "tenants": {}, "jobs": []}
    counters = {name: changes.pop(name) for name in ("origin_bytes", "corrupt") if name in changes}
    return {"folder": "/c", "budget_bytes": 100, "limit_bytes": 100, "counters": counters, **sizes, **changes}


@pytest.mark.parametrize(
    ("status", "severity", "text"),
    [
        ({"cache": cache(quarantined_bytes=5, corrupt=2)}, "error", "2 corrupt objects found so far"),
        ({"cache": cache(limit_bytes=60)}, "error", "because the disk was full"),
        ({"cache": cache(pinned_bytes=95)}, "warning", "are pinned"),
        ({"cache": cache(resident_bytes=20), "disk": {"free_bytes": 79}}, "warning", "may use 80 bytes more"),
        (
            {"cache": cache(), "jobs": [{"ref": "pets@1", "split": None, "state": "failed", "error": "no room"}]},
            "error",
            "staging pets@1 failed: no room",
        ),
        ({"cache": cache(), "peers": {"http://b:1": {"num_lying": 1}}}, "warning", "1 wrong object from http://b:1"),
    ],
)
def test_problems_of_nodes(status, severity, text):
    (problem,) = node_problems(NodeState("http://a:1", status, 1.0))
    assert problem.severity == severity
    assert text in problem.text
    assert problem.link == "/cluster?node=http%3A%2F%2Fa%3A1"


def test_a_nearly_full_disk_of_the_repository_is_a_problem(tmp_path, monkeypatch):
    assert disk_problems(None) == []
    assert disk_problems(tmp_path / "no such folder") == []
    for free_bytes, num_problems in ((3, 0), (2, 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free_bytes: SimpleNamespace(total=100, free=free))
        assert len(disk_problems(tmp_path)) == num_problems


def test_a_later_job_of_the_same_data_replaces_one_that_failed():
    jobs = [{"ref": "pets@1", "split": None, "state": state, "error": None} for state in ("failed", "done")]
    assert not node_problems(NodeState("http://a:1", {"cache": cache(), "jobs": jobs}, 1.0))
