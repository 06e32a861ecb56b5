"""What fails on a page, and what must not: corrupt shards, endless queries, nodes of other versions, our defects."""

import json
import os
import shlex
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

import datasvc
from datasvc.errors import UnavailableError
from datasvc.repository import Repository
from datasvc.shards.format.schema import image_schema
from datasvc.testing import small_dataset
from datasvc.ui.caches import KeptPages
from datasvc.ui.pages import home, planner
from datasvc.ui.web import node_monitor, routes
from tests.cli.command import run
from tests.samples import jpeg
from tests.shards.written_versions import TEXT_SCHEMA, write_version
from tests.support.gate import Gate
from tests.ui.conftest import running_ui, texts

ENDLESS = "(select count(*) from range(1000000000) a, range(1000000000) b where a.range + b.range = 7) > label"


@pytest.fixture
def repo(tmp_path):
    return datasvc.open(str(tmp_path / "repo"), create=True)


def shard_path(repo, ref, split="train"):
    digest = next(iter(repo.dataset(ref)[split].table.shards())).digest
    return Path(repo.repository.objects.location(digest))


def damage(path):
    path.chmod(0o644)
    path.write_bytes(os.urandom(path.stat().st_size))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [damage, Path.unlink])
def test_a_shard_that_cannot_be_read_hides_neither_other_matches_nor_the_page(repo, fault):
    small_dataset(repo, "birds", samples=12, classes=3)
    small_dataset(repo, "pets", splits={"train": 12, "val": 6})
    (key,) = (sample.key for sample in repo.datasets.head("pets", 1, split="val"))
    fault(shard_path(repo, "birds"))
    with running_ui(repo.repository.url) as server:
        found = [each["kind"] for each in server.json(f"/search?{urlencode({'q': key})}", "results")]
        assert "sample" in found
        (left_out,) = server.json("/search?q=no-such-key", "not_searched")
        assert left_out["name"].startswith("keys of birds@1/train: ")
        assert server.json("/search?q=no-such-key", "searched")[-1].startswith(
            "keys of samples, compared exactly, in 2"
        )
        status, _, html = server.get("/datasets/birds")
        assert status == 200
        assert "birds@1 has 12 samples" in " ".join(texts(html).split())
        assert "shard" in " ".join(each["text"] for each in server.json("/datasets/birds", "problems"))
        assert "histogram label" in server.json("/datasets/birds")
        faults = [(each["link"], each["text"]) for each in server.json("/", "problems")]
        assert [link for link, _ in faults] == ["/datasets/birds@1"]
        assert "shard" in faults[0][1]
        assert "(a page met it 0 min ago)" in faults[0][1]


def test_a_mistyped_condition_of_a_data_set_is_a_message_above_its_form(ui):
    status, _, html = ui.get("/datasets/pets?where=labl+%3D+1")
    assert status == 200
    assert 'value="labl = 1"' in html
    (problem,) = ui.json("/datasets/pets?where=labl+%3D+1", "problems")
    assert "the columns are key, image, width, height, label" in problem["text"]


@pytest.mark.parametrize("path", ["pets@2/samples/train?where=", "pets@2/samples/train?order=", "pets@2?where="])
def test_a_query_that_would_not_end_is_stopped(filled, monkeypatch, path):
    monkeypatch.setattr(routes, "_QUERY_TIME_S", 0.2)
    with running_ui(filled) as server:
        html = server.get(f"/datasets/{path}{quote(ENDLESS)}")[2]
        assert "the query did not end in 0.2 s and was stopped; narrow the condition" in html


class BadStatus:
    """A client of a node that sends any JSON."""

    def __init__(self, status):
        self.status = lambda: status


@pytest.mark.parametrize(
    "status", [{}, [], {"cache": {"resident_bytes": 0}}, {"cache": None}, "text", {"cache": {"counters": 3}}]
)
def test_an_unexpected_status_of_a_node_is_a_problem_of_this_node(status):
    monitor = node_monitor.NodeMonitor(["http://127.0.0.1:1"])
    monitor._clients = {"http://127.0.0.1:1": BadStatus(status)}
    (state,) = monitor.states()
    assert state.error.startswith("http://127.0.0.1:1 sent no status of a node")
    assert state.status is None


def test_nodes_have_the_spelling_that_they_have_of_each_other(filled):
    with running_ui(filled, nodes=("http://127.0.0.1:1/", "http://127.0.0.1:1")) as server:
        assert server.settings.nodes == ("http://127.0.0.1:1",)


def test_pages_that_are_loaded_at_once_have_their_own_problems(repo, monkeypatch):
    for _ in range(2):
        small_dataset(repo, "pets", samples=8)
    Path(repo.repository.storage.local_path("datasets/pets/versions/00000002.json")).write_text("{}")
    both = threading.Barrier(2)
    summarize = home.summarize_datasets

    def summarize_together(repository):
        both.wait(60)
        facts = summarize(repository)
        both.wait(60)
        return facts

    monkeypatch.setattr(home, "summarize_datasets", summarize_together)
    with running_ui(repo.repository.url) as server, ThreadPoolExecutor(2) as threads:
        pages = list(threads.map(server.json, ["/", "/datasets"]))
        for page in pages:
            (problem,) = page["problems"]
            assert problem["text"].startswith("pets@2 is left out: ")
            assert page["datasets"] == json.loads(run("ls", "--json", "--repo", repo.repository.url).stdout)


@pytest.mark.parametrize("kind", ["datasets", "models"])
def test_lists_name_the_versions_that_cannot_be_read_as_commands_do(repo, kind):
    for step in (1, 2):
        small_dataset(repo, "pets", samples=8)
        repo.models.save("pets", {"w": [step]}, step=step)
    Path(repo.repository.storage.local_path(f"{kind}/pets/versions/00000002.json")).write_text("{}")
    words = ["models"] if kind == "models" else []
    with running_ui(repo.repository.url) as server:
        assert server.json(f"/{kind}", kind) == json.loads(
            run(*words, "ls", "--json", "--repo", repo.repository.url).stdout
        )
        assert server.json(f"/{kind}/pets@1", "versions") == json.loads(
            run(*words, "log", "pets", "--json", "--repo", repo.repository.url).stdout
        )
        assert "pets@2 is left out" in texts(server.get(f"/{kind}/pets@1")[2])
        assert "cannot be read" in texts(server.get("/")[2])
        # A model has the name of a data set.
        assert [each["text"][:18] for each in server.json("/", "problems")] == ["pets@2 is left out"]


def test_pages_choose_the_first_data_set_that_has_a_version(repo):
    for name in ("ants", "pets"):
        small_dataset(repo, name, samples=8)
    small_dataset(repo, "ants", samples=8)
    repo.datasets.remove(["ants@1", "ants@2"])
    nodes = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    with running_ui(repo.repository.url, nodes=nodes) as server:
        assert server.json("/cluster", "placement")["dataset"] == "pets@1"
        assert "Planner" in server.get("/planner?budget=150&batch=8")[2]
        assert "/datasets/pets@1" in server.get("/planner?budget=150&batch=8")[2]


def test_a_version_without_splits_cannot_be_planned(repo):
    write_version(repo.repository, "void", {}, TEXT_SCHEMA)
    with running_ui(repo.repository.url) as server:
        assert server.get("/planner?data=void")[0] == 200
        assert "has no splits" in server.json("/planner?data=void", "problems")[0]["text"]


@pytest.mark.parametrize("error", [StopIteration, KeyError("x")])
def test_a_defect_of_a_page_is_an_error_page(filled, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(planner.PlannerForm, "parse", fail)
    with running_ui(filled) as server:
        status, headers, html = server.get("/planner")
        assert (status, headers.get_content_type()) == (500, "text/html")
        assert "please report it" in html
        status, headers, text = server.get("/api/planner")
        assert (status, headers.get_content_type()) == (500, "application/json")
        assert "please report it" in json.loads(text)["error"]


@pytest.mark.parametrize("text", ["--5", "5" * 5000, "-", "1e3", "٣"])
def test_a_number_of_the_address_that_is_none_is_refused(ui, text):
    path = f"/datasets/pets@2/samples/train?{urlencode({'start': text})}"
    assert ui.get(path)[0] == ui.get(f"/api{path}")[0] == 400


def test_a_data_set_without_the_chosen_split_is_planned_with_its_usual_one(ui):
    query = "/planner?data=birds&split=val&budget=150&batch=4"
    assert ui.json(query, "problems")[0]["text"] == "birds@1 has no split 'val'; 'train' is planned"
    assert ui.json(query, "plan")["first_epoch"]["used_bytes"] > 0


def test_the_form_of_the_planner_follows_the_data_set_and_shows_errors(ui, browser):
    window = browser.new_page()  # an error status is an error in the console, too
    window.goto(f"{ui.url}/planner?data=pets@2&split=val&budget=150&batch=4")
    window.get_by_label("Data set or version").fill("birds")
    window.get_by_label("Data set or version").dispatch_event("change")
    window.get_by_text("birds@1 has no split 'val'").wait_for()
    window.locator("#split option").get_by_text("train").wait_for(state="attached")
    assert window.locator("#split option").all_text_contents() == ["train"]
    window.get_by_label("Data set or version").fill("no-such")
    window.get_by_label("Data set or version").dispatch_event("change")
    window.locator("p#answer").get_by_text("no-such").wait_for()
    # The curves of the earlier answer are not shown beside the message.
    assert not window.locator("#curves").is_visible()
    window.get_by_label("Data set or version").fill("pets@2")
    window.get_by_label("Data set or version").dispatch_event("change")
    window.get_by_text("val").first.wait_for(state="attached")
    window.locator("div#answer").get_by_text("pets@2").first.wait_for()
    assert [window.locator(part).count() for part in ("#answer", "#curves", "#result")] == [1, 1, 1]
    window.close()


def test_costs_of_a_step_that_are_long_have_room_in_the_address(ui):
    status, _, html = ui.get(f"/planner?{urlencode({'costs': json.dumps({'x': chr(34) * 2000})})}")
    assert status == 200
    assert "the time of steps is not predicted" in html
    assert "more than 6000 characters" in ui.get(f"/planner?{urlencode({'costs': 'x' * 6001})}")[2]


def test_two_requests_to_a_store_that_fails_do_not_wait_for_each_other(filled, monkeypatch):
    both = threading.Barrier(2)

    def fail(*_, **__):
        both.wait(60)
        raise UnavailableError("the store did not answer")

    monkeypatch.setattr("datasvc.ui.web.site.Repository.open", fail)
    with running_ui(filled) as server, ThreadPoolExecutor(2) as threads:
        assert [status for status, *_ in threads.map(server.get, ["/datasets", "/models"])] == [503, 503]


def test_a_store_that_is_slow_shows_the_last_good_page_meanwhile(filled, monkeypatch):
    gate = Gate()
    with running_ui(filled) as server:
        assert "The store has not" not in server.get("/datasets")[2]
        monkeypatch.setattr(routes, "_PATIENCE_S", 0.05)
        monkeypatch.setattr(home, "summarize_datasets", gate.before(home.summarize_datasets))
        status, _, html = server.get("/datasets")
        gate.open()
        assert status == 200
        assert "The store has not given this page within 0.05 s, so this page is" in html
        assert "pets@2" in html


def test_a_store_that_is_slow_shows_what_is_waited_for_and_the_next_request_gets_the_same_reading(
    filled, monkeypatch
):
    answers, readings = threading.Event(), []
    summarize = home.summarize_datasets

    def read(repository):
        readings.append(repository)
        assert answers.wait(60)
        return summarize(repository)

    monkeypatch.setattr(routes, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(home, "summarize_datasets", read)
    with running_ui(filled) as server:
        for _ in range(2):
            status, headers, html = server.get("/datasets?sort=-name", Accept="text/html")
            assert (status, headers["Refresh"]) == (202, "0.05")
            assert "This page has not come within 0.05 s." in texts(html)
            assert "/datasets?sort=-name" in texts(html)
            assert str(filled) in texts(html)
        monkeypatch.setattr(routes, "_PATIENCE_S", 60.0)
        answers.set()
        status, _, html = server.get("/datasets?sort=-name", Accept="text/html")
        assert (status, "pets@2" in html) == (200, True)
        assert len(readings) == 1


def test_an_image_that_is_slow_is_not_replaced_by_a_page(filled, monkeypatch):
    monkeypatch.setattr(routes, "_PATIENCE_S", 0.0)
    with running_ui(filled) as server:
        request = urllib.request.Request(
            f"{server.url}/datasets/pets@2/samples/train/0/image/image", headers={"Accept": "image/avif,*/*"}
        )
        with urllib.request.urlopen(request) as response:
            assert response.headers.get_content_maintype() == "image"


def test_the_command_of_a_key_that_begins_like_an_option_runs(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    sample = {"key": "-x", "image": jpeg(), "width": 40, "height": 30, "label": 0}
    write_version(repository, "odd", {"train": [[sample]]}, image_schema(labelled=True), ("a",))
    with running_ui(repository.url) as server:
        html = server.get("/datasets/odd/samples/train/0")[2]
        command = html.partition('data-copy="datasvc sample ')[2].partition('"')[0]
        printed = run("sample", *shlex.split(command))
        assert json.loads(printed.stdout) == server.json("/datasets/odd/samples/train/0", "sample")


def test_kept_pages_are_bounded():
    kept = KeptPages(max_bytes=3000)
    pages = {f"/{number}": os.urandom(500).hex() for number in range(10)}
    for address, html in pages.items():
        kept.put(address, html)
        kept.put(address, html)
    assert kept.get("/9")[0] == pages["/9"]
    assert kept.get("/0") is None
    assert 1 < sum(kept.get(address) is not None for address in pages) < 10


def test_all_versions_of_a_long_history_are_reached(repo, monkeypatch):
    monkeypatch.setattr("datasvc.ui.pages.dataset._MAX_VERSIONS", 2)
    for _ in range(3):
        small_dataset(repo, "pets", samples=4)
    with running_ui(repo.repository.url) as server:
        html = server.get("/datasets/pets")[2]
        assert 'href="/datasets/pets@3?all=1">All 3 versions' in html
        assert "pets@1" not in texts(html[html.index("Versions") : html.index("Splits")])
        html = server.get("/datasets/pets?all=1")[2]
        assert "All 3 versions" not in html
        assert "pets@1" in texts(html)
