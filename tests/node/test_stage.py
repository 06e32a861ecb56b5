"""Staging jobs over HTTP: started, watched, cancelled."""

from contextlib import ExitStack

import pytest

from datasvc.cache import Cache
from datasvc.errors import NotFoundError, UnavailableError
from datasvc.node.transfers.staging_jobs import StageJobs
from datasvc.shards import ingest, open_dataset
from tests.node.conftest import ended
from tests.samples import write_folder
from tests.support.gate import Gate


@pytest.fixture
def pets(origin, folder):
    """`pets@1` in the repository of `origin`: several shards in two splits."""
    ingest(origin[0], str(folder), "pets", shard_bytes=2000)
    return origin[0]


@pytest.fixture
def node(run, pets):
    return run(repositories=(pets.url,))


def test_a_job_brings_a_data_set_onto_the_node(node, pets):
    answer = node.ask("POST", "/stage", {"ref": "pets", "repo": pets.url})
    assert answer.status == 202
    assert answer.headers["Location"] == f"/stage/{answer.json['id']}"
    job = ended(node, answer.json["id"])
    assert (job["state"], job["ref"], job["error"]) == ("done", "pets@1", None)
    assert job["done_bytes"] == job["total_bytes"] == job["bytes"]["origin"] > 0
    again = ended(node, node.ask("POST", "/stage", {"ref": "pets@1"}).json["id"])
    assert again["bytes"]["resident"] == job["total_bytes"]
    assert [each["id"] for each in node.get("/stage").json["jobs"]] == [job["id"], again["id"]]


def test_one_split_may_be_staged_alone(node):
    both = ended(node, node.ask("POST", "/stage", {"ref": "pets"}).json["id"])
    val = ended(node, node.ask("POST", "/stage", {"ref": "pets", "split": "val"}).json["id"])
    assert 0 < val["total_bytes"] < both["total_bytes"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"ref": "nothing"}, 404, "pets"),
        ({"ref": "pets@7"}, 404, "no version 7; it has 1"),
        ({"ref": "pets", "split": "test"}, 404, "train"),
        ({"ref": "pets", "repo": "s3://elsewhere/x"}, 404, "--repo"),
        ({"ref": "../x"}, 400, "is not a valid name of a data set"),
        ({}, 400, "ref"),
        ({"ref": "pets", "budget": "1TB"}, 400, "budget"),
        ({"ref": 7}, 400, "strings"),
        ([], 400, "strings"),
        ("{", 400, "JSON"),
        ("[" * 60_000, 400, "JSON"),
        ("[" * 70_000, 413, "Large"),
        (b"\xff\xfe", 400, "JSON"),
    ],
)
def test_a_request_that_makes_no_sense_is_answered_at_once(node, body, status, message):
    answer = node.ask("POST", "/stage", body)
    assert (answer.status, message in answer.json["error"]) == (status, True), answer.json
    assert node.get("/stage").json["jobs"] == []


def test_a_page_in_a_browser_cannot_start_a_job(node):
    answer = node.ask("POST", "/stage", '{"ref": "pets"}', Content_Type="text/plain")
    assert (answer.status, "application/json" in answer.json["error"]) == (400, True)


def test_a_job_that_fails_says_why(node, pets):
    info = _shards(pets)[0]
    pets.objects.local_path(info.digest).unlink()
    job = ended(node, node.ask("POST", "/stage", {"ref": "pets"}).json["id"])
    assert (job["state"], job["error_kind"]) == ("failed", "NotFoundError")
    assert info.digest[:12] in job["error"]


def test_a_job_that_is_too_large_fails_and_fetches_nothing(run, pets):
    node = run(repositories=(pets.url,), budget=8192)
    job = ended(node, node.ask("POST", "/stage", {"ref": "pets"}).json["id"])
    assert (job["state"], job["error_kind"], job["done_bytes"]) == ("failed", "CacheFullError", 0)


@pytest.fixture
def slow(run, origin, tmp_path):
    """A node that takes minutes for `many@1`, of which the first parts come soon."""
    source = write_folder(tmp_path / "many", {"train": {"a": 300}})
    ingest(origin[0], str(source), "many", shard_bytes=4000)
    return run(repositories=(origin[0].url,), origin_rate_bytes_s=20_000)


@pytest.mark.slow
def test_a_running_job_is_cancelled_and_keeps_what_has_arrived(slow):
    job_id = slow.ask("POST", "/stage", {"ref": "many"}).json["id"]
    slow.wait_for(lambda status: status["jobs"][0]["done_bytes"] > 0)
    assert slow.ask("DELETE", f"/stage/{job_id}").status == 200
    job = ended(slow, job_id)
    assert (job["state"], job["error"]) == ("cancelled", None)
    assert 0 < job["done_bytes"] < job["total_bytes"]
    assert slow.get("/status").json["cache"]["num_resident"] > 0
    assert slow.ask("DELETE", f"/stage/{job_id}").json["state"] == "cancelled"


def test_a_job_that_waits_is_cancelled_before_it_begins(slow):
    ids = [slow.ask("POST", "/stage", {"ref": "many"}).json["id"] for _ in range(3)]
    assert slow.ask("DELETE", f"/stage/{ids[2]}").json["state"] == "cancelled"
    assert ended(slow, ids[2])["done_bytes"] == 0


def test_jobs_that_are_too_many_are_refused_and_old_ones_forgotten(pets, tmp_path):
    gate, splits = Gate(), list(open_dataset(pets, "pets").values())
    with Cache(tmp_path / "slow", budget="10MB") as cache, ExitStack() as opening:
        cache.stage = gate.before(cache.stage)
        opening.callback(gate.open)
        jobs = StageJobs(cache, num_at_once=1, max_unfinished=2, max_ended=1)
        first, second = (jobs.start(splits, {}) for _ in range(2))
        with pytest.raises(UnavailableError, match="2 staging jobs"):
            jobs.start(splits, {})
        gate.begun.wait()
        assert (first.state, second.state) == ("running", "waiting")
        gate.open()
        first.future.result()
        second.future.result()
        jobs.start(splits, {}).future.result()
        assert second in jobs.all()
        with pytest.raises(NotFoundError):
            jobs.find(first.id)
        assert jobs.close(60)
        with pytest.raises(UnavailableError, match="stopping"):
            jobs.start(splits, {})


def test_a_node_that_stops_ends_its_jobs(slow):
    slow.ask("POST", "/stage", {"ref": "many"})
    slow.wait_for(lambda status: status["jobs"][0]["state"] == "running")
    assert slow.stop() is True


def test_a_job_that_never_was_is_missing(node):
    for method in ("GET", "DELETE"):
        assert node.ask(method, "/stage/0123").status == 404
    assert node.ask("PUT", "/stage").status == 405


def _shards(repository):
    return list(open_dataset(repository, "pets@1")["train"].table.shards())
