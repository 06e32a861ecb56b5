"""The pages Runs and Run: equal to what the library reads, live, and with problems first."""

import html as html_module
import json
import math
import re
import shutil
import subprocess
import urllib.request

import pytest

import datasvc
from datasvc.errors import NotFoundError
from datasvc.runs import RunLog, RunSummary, list_runs, read_run
from datasvc.runs.part import PartRange
from datasvc.testing import small_dataset
from datasvc.ui import caches
from datasvc.ui.pages import runs as runs_page
from datasvc.ui.pages.problems import recent_run_problems, run_problems
from datasvc.ui.web import table_view
from tests.cli.command import ROOT
from tests.support import warm_python
from tests.ui.conftest import check_accessible, check_width, running_ui, texts

VERDICT = "starved by decode: 100 images/s offered, 200 asked; two more decode threads or GPU decode"


def report_steps(log, steps, **facts):
    for step in steps:
        times = {"step_s": 0.1, "wait_s": 0.04, "forward_s": 0.02, "backward_s": 0.03}
        log.report("step", step=step, loss=1 / step, rate=0.1, images_per_s=300.0, unit="images", **times, **facts)


def write_run(repository, name="cnn", outcome="finished", message=""):
    """Write the log of a run with an event of each kind; return it."""
    with RunLog.open(
        repository, name, config={"batch_size": 8}, data=["pets@2"], parent="cnn@1", world_size=2
    ) as log:
        report_steps(log, range(1, 41), coverage=0.25, epoch=1, progress=0.5)
        log.report("evaluation", step=40, accuracy=0.75, loss=float("nan"))
        log.report("checkpoint", step=40, version="cnn@3")
        log.report("stall", step=20, wait_s=2.5)
        for size, step in ((6, 0), (6, 10), (4, 30)):  # of an elastic job
            log.report("round", rank=0, size=size, replicas=size // 2, step=step, sync_s=0.1)
        log.report("lost", rank=3, worker=1, step=35)
        log.report("diagnosis", step=40, verdict=VERDICT)
        ranks = {"rank": [0, 1], "host": ["a", "b"], "own_s": [0.05, 0.09], "step_s": [0.1, 0.1]}
        log.report("ranks", step=40, num_ranks=2, stragglers=[1], **ranks)
        log.close(outcome, message)
    return log


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The pages of a repository with a finished and a failed run."""
    url = tmp_path_factory.mktemp("runs") / "repo"
    repository = datasvc.open(str(url), create=True).repository
    done = write_run(repository)
    failed = write_run(repository, "gpt", "failed", "ConfigError: the loss is nan")
    with running_ui(url) as server:
        yield server, repository, done, failed


def test_the_step_of_a_target_is_on_the_page_of_a_run(logged):
    server, repository, done, _ = logged
    expected = read_run(repository, done.name, done.id).forecast(0.01)
    page = f"/runs/{done.ref}?target=0.01"
    assert server.json(page, "forecast") == json.loads(json.dumps(expected.to_dict()))
    assert str(expected) in texts(server.get(page)[2])
    assert "target=&#39;x&#39; is not valid; expected a number" in server.get(f"/runs/{done.ref}?target=x")[2]


def test_the_list_of_runs_is_that_of_the_library(logged):
    server, repository, done, failed = logged
    shown = server.json("/runs", "runs")
    assert shown == json.loads(json.dumps([run.to_dict() for run in list_runs(repository)]))
    assert {run["ref"] for run in server.json("/runs?name=gpt", "runs")} == {failed.ref}
    text = texts(server.get("/runs")[2])
    assert "2 runs; none is in progress" in text
    assert f"{failed.ref} failed: ConfigError: the loss is nan" in text
    assert f'href="/runs/cnn/{done.id}"' in server.get("/runs")[2]


def test_a_run_shows_what_its_log_has(logged):
    server, repository, done, _ = logged
    path = f"/runs/cnn/{done.id}"
    shown = server.json(path, "run")
    assert shown == json.loads(json.dumps(read_run(repository, "cnn", done.id).to_dict()))
    assert shown["series"]["loss"]["steps"] == list(range(1, 41))
    html = server.get(path)[2]
    text = " ".join(texts(html).split())
    assert "The run is finished at step 40 , 50 % of its training." in text
    assert VERDICT in text
    assert "the other ranks wait for rank 1" in text
    assert "1 step waited a second or longer for data" in text
    assert "of its samples are served" not in text  # the run has ended
    assert 'href="/models/cnn@3"' in html
    assert 'href="/datasets/pets@2"' in html
    assert "stall at step 20: waited 2.5 s for data" in html
    changes = (
        "3 replicas of 2 ranks from step 10 on, as many as before",
        "2 replicas of 2 ranks from step 30 on, 3 replicas of 2 ranks before",
        "rank 3, a worker, was lost at step 35",
    )
    assert "; ".join(changes) in text
    assert all(html.count(change) > 1 for change in changes)  # in the charts too
    # Of the 100 ms of a step, what no part explains is "other".
    for part, ms in (("waiting for data", "40"), ("forward", "20"), ("backward", "30"), ("other", "10")):
        assert f"{part}: last {ms} ms" in html
    ranks = text[text.index("Mean milliseconds") :]
    assert "own time, ms" in ranks
    assert ranks.index("straggler 90.0") < ranks.index("50.0")


def test_a_run_that_has_ended_is_told_in_the_past_with_units_and_links(logged):
    server, _, done, _ = logged
    html = server.get(f"/runs/cnn/{done.id}")[2]
    text = " ".join(texts(html).split())
    problems = [problem["text"] for problem in server.json(f"/runs/cnn/{done.id}", "problems")]
    assert problems
    assert all(problem.startswith("while it ran: ") for problem in problems)
    assert (
        "Its last diagnosis, of the loader of one of its 2 ranks, with the numbers on this rank: starved by decode"
        in text
    )
    assert "wait 2.5 s" in text
    assert 'version <a href="/models/cnn@3">cnn@3</a>' in html
    sorted_ranks = server.get(f"/runs/cnn/{done.id}?ranks_sort=own_s")[2]
    assert re.findall(r'<th scope="row" class="number">(\d)</th><td>', sorted_ranks) == ["0", "1"]


def test_the_line_of_python_of_a_run_runs(logged):
    server, _, done, _ = logged
    html = server.get(f"/runs/cnn/{done.id}")[2]
    lines = html_module.unescape(html.partition("<p>As Python</p>")[2].partition(">")[2].partition("</pre>")[0])
    program = "\n".join((*lines.split("\n")[:-1], f"print({lines.splitlines()[-1]}.summary.ref)"))
    words = [warm_python.command(), "-c", program]
    printed = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert printed.stdout == f"{done.ref}\n"


def test_a_run_that_is_deleted_while_it_is_followed_has_ended(tmp_path):
    repository = datasvc.open(str(tmp_path / "repo"), create=True).repository
    log = RunLog.open(repository, "cnn", flush_s=3600)
    assert log.flush()
    events = f"/api/runs/cnn/{log.id}/events"
    with running_ui(tmp_path / "repo") as server, urllib.request.urlopen(server.url + events) as stream:
        assert stream.readline() == b"event: message\n"
        assert b"running" in stream.readline()
        shutil.rmtree(tmp_path / "repo/runs")
        assert b"event: end" in stream.read()
    log.close(timeout_s=0.1)


def test_a_run_that_does_not_exist_is_an_error_with_those_that_do(logged):
    server, _, done, _ = logged
    status, _, html = server.get(f"/runs/cnn/{done.id[:-6]}ffffff")
    assert status == 404
    assert done.ref in html
    assert server.get("/runs/cnn/x")[0] == 400


def test_the_log_of_a_run_is_read_again_only_if_it_has_new_parts(tmp_path, monkeypatch):
    repository = datasvc.open(str(tmp_path / "repo"), create=True).repository
    reads = []
    monkeypatch.setattr(caches, "read_run", lambda *run: reads.append(run) or read_run(*run))
    runs = caches.RunCache(max_age_s=0.0)
    with RunLog.open(repository, "cnn", flush_s=3600) as log:
        report_steps(log, [1])
        assert log.flush()
        for _ in range(3):
            assert runs.read(repository, "cnn", log.id).summary.step == 1
        assert len(reads) == 1
        report_steps(log, [2])
        assert log.flush()
        assert list(runs.read(repository, "cnn", log.id).series["loss"].steps) == [1, 2]
        assert len(reads) == 2
    assert runs.read(repository, "cnn", log.id).summary.state == "finished"
    shutil.rmtree(tmp_path / "repo/runs")
    with pytest.raises(NotFoundError):
        runs.read(repository, "cnn", log.id)
    recent = caches.RunCache(max_age_s=3600.0)
    again = RunLog.open(repository, "cnn")
    again.close()
    assert recent.read(repository, "cnn", again.id) is recent.read(repository, "cnn", again.id)


def test_any_values_that_a_program_reports_are_shown(tmp_path):
    repository = datasvc.open(str(tmp_path / "repo"), create=True).repository
    with RunLog.open(repository, "odd", config={"a": [1]}, facts={"x": {"y": None}}) as log:
        log.report("step", step=1, loss=math.inf, coverage="most", progress=None, wait_s=True, step_s=0)
        log.report("step", step=2, loss=math.nan)
        log.report("diagnosis")
        log.report("ranks", rank=3, stragglers="all")
        log.report("evaluation", accuracy="high")
        log.report("checkpoint", version=["a"], step=True)
        log.report("stall", step="x")
    with running_ui(tmp_path / "repo") as server:
        assert server.get(f"/runs/odd/{log.id}")[0] == 200
        assert server.get("/runs")[0] == 200


def test_without_runs_the_page_shows_how_to_get_one(filled):
    with running_ui(filled) as server:
        assert f"datasvc train --repo {filled}" in server.get("/runs")[2]


def test_many_runs_are_divided_into_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_page, "_RUNS_PER_PAGE", 2)
    repository = datasvc.open(str(tmp_path / "repo"), create=True).repository
    for _ in range(3):
        RunLog.open(repository, "cnn").close()
    with running_ui(tmp_path / "repo") as server:
        first, second = server.json("/runs", "runs"), server.json("/runs?page=1", "runs")
        assert (len(first), len(second)) == (2, 1)
        assert 'href="/runs?page=1"' in server.get("/runs")[2]
        last = server.get("/runs?page=1")[2]
        assert 'href="/runs?page=0"' in last
        assert ">older<" not in last


def test_runs_are_sorted_by_the_heads_of_their_columns(tmp_path, monkeypatch):
    repository = datasvc.open(str(tmp_path / "repo"), create=True).repository
    for number, loss in enumerate((0.5, math.nan, 0.25, 2.0), start=1):
        with RunLog.open(repository, f"r{number}", run_id=f"2025010{number}-000000-000000") as log:
            log.report("step", step=number, loss=loss)

    def names(path):
        return re.findall(r'<th scope="row">(?:<input[^>]*> )?<a href="/runs/([^/"]*)/', server.get(path)[2])

    with running_ui(tmp_path / "repo") as server:
        assert names("/runs") == ["r4", "r3", "r2", "r1"]
        head = 'aria-sort="{}"><a href="/runs?sort={}#runs">loss</a>'
        assert names("/runs?sort=-loss") == ["r4", "r1", "r3", "r2"]
        assert head.format("descending", "loss") in server.get("/runs?sort=-loss")[2]
        assert names("/runs?sort=loss") == ["r3", "r1", "r4", "r2"]
        assert names("/runs?sort=step") == names("/?runs_sort=step") == ["r1", "r2", "r3", "r4"]
        assert 'aria-sort="ascending"><a href="/?runs_sort=-step#runs">' in server.get("/?runs_sort=step")[2]
        assert server.get("/runs?sort=colour")[0] == 400
        monkeypatch.setattr(table_view, "_ROWS_PER_PAGE", 3)
        assert names("/runs?sort=loss&page=1") == ["r2"]
        monkeypatch.setattr(runs_page, "_MAX_SORTED", 3)
        assert names("/runs?sort=loss") == ["r3", "r4", "r2"]
        assert "The newest 3 runs are sorted" in server.get("/runs?sort=loss")[2]


def test_a_run_whose_ranks_hang_is_stalled_in_the_list_and_once_on_its_page(tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    with RunLog.open(repo.repository, "cnn", flush_s=3600.0) as log, running_ui(tmp_path / "repo") as server:
        log.report("step", step=1)
        log.report("stalled", operation="'grad'", ranks=[1, 3], waited_s=60.0)
        assert log.flush()
        problems = server.json(f"/runs/{log.name}/{log.id}", "problems")
        assert [problem["severity"] for problem in problems if "ranks 1, 3" in problem["text"]] == ["error"]
        assert '<strong class="error">stalled</strong>' in server.get("/runs")[2]


def summary(**changes):
    values = {"name": "cnn", "id": "1", "state": "running", "message": "", "started_s": 0.0, "last_s": 100.0}
    values |= {"num_attempts": 1, "latest": {}, "versions": [], "world_size": 1, "data": [], "num_lost": 0}
    return RunSummary(**{**values, **changes})


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (summary(state="failed", message="no room"), "cnn/1 failed: no room"),
        (summary(state="not responding", latest={"step": 7}), "at step 7"),
        (summary(latest={"wait_s": 0.06, "step_s": 0.1}), "waits 60% of the time for data"),
        (summary(latest={"wait_s": 0.0, "step_s": 0.1}, verdict=VERDICT), f"cnn/1 is {VERDICT}"),
        (summary(stragglers=[3, 5]), "the other ranks wait for rank 3, 5"),
        (summary(idle_s=700.0), "cnn/1 is stalled: its program runs, but has reported nothing for 700 s"),
        (summary(stalled={"operation": "'grad'", "ranks": [3]}), "cnn/1 is stalled: rank 3 did not submit 'grad'"),
        (summary(num_stalls=2, last_stall_s=90.0), "2 steps waited a second or longer for data, the last one 10 s"),
    ],
)
def test_problems_of_runs(run, text):
    (problem,) = run_problems(run)
    assert text in problem.text
    assert problem.link == "/runs/cnn/1"
    assert recent_run_problems([run], 200.0) == [problem]
    assert recent_run_problems([run], 100.0 + 2 * 86400) == []


@pytest.mark.parametrize(
    "run",
    [
        summary(),
        summary(state="finished", latest={"wait_s": 1, "step_s": 1}, verdict=VERDICT, stragglers=[1]),
        summary(latest={"wait_s": 1, "step_s": 1}, verdict="compute-bound"),  # of many steps
        summary(idle_s=700.0, busy="evaluation"),
        summary(last_s=2000.0, num_stalls=2, last_stall_s=90.0),
    ],
)
def test_a_run_without_problems(run):
    assert run_problems(run) == []


def count_parts(repository, log):
    """Return how many parts the log has, whatever was replaced."""
    parts = filter(None, map(PartRange.parse, repository.storage.list(f"runs/{log.ref}")))
    return max(part.last for part in parts)


def test_a_new_point_appears_while_the_run_goes_on(tmp_path, page):
    repository = datasvc.open(str(tmp_path / "repo"), create=True).repository
    with running_ui(tmp_path / "repo") as server:
        log = RunLog.open(repository, "cnn")  # with the usual time between two parts
        report_steps(log, range(1, 4))
        assert log.flush()
        page.goto(f"{server.url}/runs/cnn/{log.id}")
        page.get_by_text("live", exact=True).wait_for()
        page.get_by_text("The run goes on").wait_for()
        page.locator("#chart-0[data-points='3'] canvas").wait_for()
        page.get_by_role("button", name="show forward").click()
        num_parts = count_parts(repository, log)
        report_steps(log, [4])
        page.locator("#step").get_by_text("4", exact=True).wait_for()
        # It came with the next part, and not by one that comes when nothing has been reported for long.
        assert count_parts(repository, log) == num_parts + 1
        page.locator("#chart-0[data-points='4']").wait_for()
        # What the reader has hidden stays so.
        page.locator("#time-chart:has([data-x='4']) [aria-label='show forward'][aria-pressed=false]").wait_for()
        log.close()
        page.get_by_text("The run is finished").wait_for()
        page.get_by_text("ended", exact=True).wait_for()
        page.goto("about:blank")


def test_the_pages_of_runs_are_accessible_and_fit_a_narrow_window(logged, page):
    server, _, done, _ = logged
    for path in ("/runs", f"/runs/cnn/{done.id}"):
        page.goto(server.url + path)
        check_accessible(page)
        check_width(page)


def test_a_chart_names_the_mark_at_the_cursor_and_begins_at_zero_for_rates(logged, page):
    server, _, done, _ = logged
    page.goto(f"{server.url}/runs/cnn/{done.id}")
    chart = page.locator("[data-series]").filter(has_text="images/s")
    chart.locator("canvas").wait_for()
    plot = chart.evaluate("element => JSON.parse(element.dataset.series)")
    assert plot["from_zero"] is True
    (first, last), width = (plot["x"][0], plot["x"][-1]), chart.locator(".u-over").bounding_box()["width"]
    step, label = next((step, label) for step, label, is_problem, *_ in plot["marks"] if is_problem)
    chart.locator(".u-over").hover(position={"x": width * (step - first) / (last - first), "y": 20})
    chart.get_by_text(label).wait_for()
    assert label.startswith("stall at step")


def test_the_legend_of_stacked_areas_hides_parts_and_the_cursor_is_that_of_the_curves(logged, page):
    server, _, done, _ = logged
    page.goto(f"{server.url}/runs/cnn/{done.id}")
    chart, forward = page.locator("#time-chart"), page.get_by_role("button", name="show forward")
    page.locator("#chart-0 canvas").wait_for()
    (waiting, other) = (chart.locator(".area").nth(number) for number in (0, 3))
    upper = other.get_attribute("points").split()[0]
    forward.focus()
    page.keyboard.press("Enter")
    assert forward.get_attribute("aria-pressed") == "false"
    assert not chart.locator(".area").nth(1).is_visible()
    # What stands on it comes down, by the height of the part: 20 of 100 ms.
    x, y = map(float, upper.split(","))
    moved_x, moved_y = map(float, other.get_attribute("points").split()[0].split(","))
    base = float(waiting.get_attribute("points").split()[-1].split(",")[1])
    assert (moved_x, moved_y - y) == (x, pytest.approx((base - y) / 5, abs=0.05))
    chart.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    text = page.locator("#time .mark-text")
    assert text.text_content() == "step 2; waiting for data: 40 ms; backward: 30 ms; other: 10 ms"
    assert chart.locator(".cursor").get_attribute("x1") == chart.locator("[data-x='2']").get_attribute("data-at")
    # The curves have the cursor at the same step.
    assert page.locator("#chart-0 .mark-text").text_content() == "step 2; loss: 0.5"
    page.keyboard.press("Escape")
    assert text.text_content() == ""
    forward.click()
    assert other.get_attribute("points").split()[0] == upper
    over = page.locator("#chart-0 .u-over")
    over.hover(position={"x": over.bounding_box()["width"] * 19 / 39, "y": 20})
    text.filter(has_text="step 20; waiting for data: 40 ms; forward").wait_for()
    page.mouse.move(0, 0)
    page.locator("#time .mark-text:empty").wait_for(state="attached")


def test_a_page_without_scripts_has_the_curves_and_their_numbers(logged, browser):
    server, _, done, _ = logged
    context = browser.new_context(java_script_enabled=False)
    window = context.new_page()
    window.goto(f"{server.url}/runs/cnn/{done.id}")
    assert window.locator("#chart-0 svg").is_visible()
    assert window.get_by_text("Numbers of the curves").is_visible()
    assert window.locator("#time-chart .area").count() == 4
    assert not window.locator("#time-chart [role=button]").count()
    context.close()


def test_home_has_live_runs_and_the_problems_of_runs_and_of_versions(tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    for _ in range(2):
        small_dataset(repo, "pets", samples=8)
    write_run(repo.repository, "gpt", "failed", "no room")
    live = RunLog.open(repo.repository, "cnn")
    report_steps(live, [1])
    assert live.flush()
    (tmp_path / "repo/datasets/pets/versions/00000002.json").write_text("{}")
    with running_ui(tmp_path / "repo") as server:
        text = texts(server.get("/")[2])
        assert "1 live run" in text
        own = server.json(f"/runs/cnn/{live.id}", "problems")
        assert own[0]["text"].startswith("it waits 40% of the time")
        assert [problem["link"] for problem in own] == [None]
        assert f"{live.ref} is starved: it waits 40% of the time" in text
        assert "failed: no room" in text
        assert "2 problems, 1 warning" in text
        assert {run["name"] for run in server.json("/", "runs")} == {"cnn", "gpt"}
    live.close()


def test_runs_that_go_on_come_first(tmp_path):
    repository = datasvc.open(str(tmp_path / "repo"), create=True).repository
    going_on = RunLog.open(repository, "old", run_id="20250101-000000-000000")
    assert going_on.flush()
    RunLog.open(repository, "new").close()
    with running_ui(tmp_path / "repo") as server:
        html = server.get("/runs")[2]
        assert html.index(going_on.ref) < html.index("new/")
    going_on.close()
