import json
import re

import pytest

from datasvc.runs import RunLog, list_runs, read_run
from tests.cli.command import run

HOSTILE = "<script>alert(1)</script>\x1b[31m"


@pytest.fixture
def log(repository):
    with RunLog.open(repository, "digits-cnn", config={"model": "cnn", HOSTILE: HOSTILE}, data=["digits@1"]) as log:
        for step in range(1, 6):
            log.report(
                "step", step=step, loss=1 / step, step_s=0.01, wait_s=0.002, forward_s=0.004, progress=step / 5
            )
        log.report("evaluation", step=5, accuracy=0.75, **{HOSTILE: 1.0})
        log.report("checkpoint", step=5, version="digits-cnn@1")
        log.report(
            "diagnosis", step=5, verdict="starved by decode: 3 images/s offered, 9 asked; two more decode threads"
        )
        log.report("ranks", step=5, rank=[0, 1], host=["a", HOSTILE], own_s=[0.01, 0.02], stragglers=[1])
        log.report(HOSTILE, value=HOSTILE)
    return log


def test_runs_are_listed_newest_first(repository, log):
    RunLog.open(repository, "other").close("failed", "out of memory")
    done = run("runs", "ls", "--repo", repository.url)
    assert {line.split("\t")[0] for line in done.stdout.splitlines()[1:]} == {
        found.ref for found in list_runs(repository)
    }
    assert f"{log.ref}\tfinished\t5\t1\t1\t" in done.stdout
    as_json = run("runs", "ls", "digits-cnn", "--json", "--last", "1", "--repo", repository.url)
    assert json.loads(as_json.stdout) == [json.loads(json.dumps(list_runs(repository, "digits-cnn")[0].to_dict()))]


def test_a_run_is_shown_with_its_problems_metrics_and_times(repository, log):
    done = run("runs", "show", "digits-cnn", "--repo", repository.url)
    assert done.returncode == 0, done.stderr
    for text in (
        f"run: {log.ref}",
        "state: finished",
        "data: digits@1",
        "versions: digits-cnn@1",
        "problem: starved by decode",
        "problem: the other ranks wait for rank 1",
        "accuracy: 0.75 at step 5",
        "step_s: 10.00 ms",
        "forward_s: 4.00 ms",
    ):
        assert text in done.stdout
    assert "\x1b" not in done.stdout
    as_json = json.loads(run("runs", "show", log.ref, "--json", "--repo", repository.url).stdout)
    assert as_json == json.loads(json.dumps(read_run(repository, log.name, log.id).to_dict()))


def test_a_forecast_is_that_of_the_library(repository):
    with RunLog.open(repository, "long") as log:
        for step in range(1, 201):
            log.report("step", step=step, loss=1 / step)
    expected = read_run(repository, log.name, log.id).forecast(0.001)
    assert expected.step == pytest.approx(1000, rel=0.3)
    words = ["runs", "forecast", "long", "0.001", "--repo", repository.url]
    assert run(*words).stdout == f"{expected}\n"
    assert json.loads(run(*words, "--json").stdout) == expected.to_dict()
    done = run("runs", "forecast", "long", "0.1", "--curve", "accuracy", "--repo", repository.url)
    assert done.returncode == 2
    assert "no curve 'accuracy'; its curves are: loss" in done.stderr


def test_a_report_is_one_file_that_needs_no_other_and_runs_nothing(repository, log, tmp_path):
    path = tmp_path / "report.html"
    done = run("report", "digits-cnn", "--html", path, "--repo", repository.url)
    assert done.returncode == 0, done.stderr
    html = path.read_text()
    for text in (
        log.ref,
        "digits@1",
        "digits-cnn@1",
        "starved by decode",
        "<svg",
        "Time of a step",
        "accuracy",
        "finished",
    ):
        assert text in html
    assert "<script" not in html
    assert "\x1b" not in html
    assert not re.search(r"(src|href)\s*=", html)
    assert not re.search(r"url\(|@import", html)


def test_a_report_of_a_run_that_has_reported_nothing_says_so(repository, tmp_path):
    RunLog.open(repository, "empty").close("failed", "out of memory")
    path = tmp_path / "report.html"
    assert run("report", "empty", "--html", path, "--repo", repository.url).returncode == 0
    assert "is failed before its first step: out of memory" in path.read_text()
    assert run("runs", "show", "empty", "--repo", repository.url).returncode == 0


def test_an_unknown_run_is_refused_with_those_that_exist(repository, log):
    done = run("runs", "show", "digits-cnn/20000101-000000-aaaaaa", "--repo", repository.url)
    assert done.returncode == 1
    assert log.ref in done.stderr


def test_a_report_says_what_it_leaves_out(repository, tmp_path):
    with RunLog.open(repository, "wide") as log:
        log.report("step", step=1, **{f"curve{number:02}": 1.0 for number in range(15)})
        for _ in range(201):
            log.report("note")
    history = read_run(repository, log.name, log.id)
    html = history.to_html()
    assert "curves are drawn; not curve12, curve13, curve14." in html
    assert f"The last 200 of {len(history.events)} events" in html
    done = run("report", "wide", "--html", tmp_path / "nowhere" / "r.html", "--repo", repository.url)
    assert done.returncode == 1
    assert f"the folder {tmp_path / 'nowhere'} does not exist; create it first" in done.stderr
    assert ".tmp-" not in done.stderr
