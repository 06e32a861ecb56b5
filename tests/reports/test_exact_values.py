"""The same value on the terminal, in a notebook, on a page and as JSON: with all of its digits."""

import html
import json
import math
import re
import time
import urllib.parse

import pytest
import torch

import datasvc
from datasvc.runs import RunLog, list_runs
from datasvc.views.diffs import comparison_html
from tests.cli.command import run
from tests.ui.conftest import running_ui

CONFIG = {"lr": 1.2345678e-08, "seed": 2**64 - 1, "parts": {"decay": 0.12345678, "steps": 2**60 + 1}}
NAMES = ["steps/sec", "acc%", "%2F", "loss?x=1&y=2", "#h", "a+b", "<i>", 'q"x', "..", "損失"]


@pytest.fixture
def repo(tmp_path):
    return datasvc.open(str(tmp_path / "repo"), create=True)


@pytest.fixture
def logged(repo):
    with RunLog.open(repo.repository, "net", config=CONFIG) as log:
        log.report("step", step=1, loss=math.nan, rate=math.inf)
        log.report("evaluation", step=1, top1=-math.inf)
    repo.models.save("net", {"w": torch.zeros(1)}, step=1, config=CONFIG, metrics={"loss": math.nan, "top1": 0.5})
    return log.ref


def cells(page):
    return {html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page)}


def strict(text):
    """Parse JSON as browsers do: without NaN and Infinity."""

    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_the_settings_of_a_run_are_the_same_everywhere(repo, logged):
    """microsoft/nni#5726, FudanNLP/fitlog#8, labmlai/app#104: a page rounds a rate, and a seed becomes a float."""
    shown = strict(run("runs", "show", logged, "--json", DATASVC_REPO=repo.repository.url).stdout)
    assert shown["headers"]["1"]["config"] == CONFIG
    with running_ui(repo.repository.url) as ui:
        on_page = cells(ui.get(f"/runs/{logged}")[2])
    assert {"1.2345678e-08", str(2**64 - 1)} <= on_page
    assert json.dumps(CONFIG["parts"]) in on_page


def test_the_configuration_of_a_version_is_the_same_everywhere(repo, logged):
    """mlflow/mlflow#2006: a list with all digits, and a page with three."""
    terminal = run("models", "show", "net@1", DATASVC_REPO=repo.repository.url).stdout
    notebook = cells(repo.models.describe("net@1")._repr_html_())
    with running_ui(repo.repository.url) as ui:
        on_page = cells(ui.get("/models/net@1")[2])
    for value in ("1.2345678e-08", str(2**64 - 1), "0.12345678", str(2**60 + 1)):
        assert value in terminal
        assert {value} <= notebook
        assert {value} <= on_page


def test_values_that_differ_do_not_look_equal_in_a_comparison(repo):
    """cadence-workflow/cadence-web#28, zilliztech/attu#542: two numbers, and one text for both."""
    for number in (1, 2):
        config = {"lr": 0.1 + number * 1e-9, "seed": 2**63 + number}
        repo.models.save("net", {"w": torch.zeros(1)}, step=1, config=config)
    compared = repo.models.compare(["net@1", "net@2"])
    rows = re.findall(r"<tr>(.*?)</tr>", str(comparison_html(compared)))
    pairs = [re.findall(r"<td[^>]*>(.*?)</td>", row)[1:] for row in rows]
    assert [first != second for first, second in filter(None, pairs)] == [True, True]


def test_json_is_json_whatever_was_reported(repo, logged):
    """treeverse/vscode-dvc#2733, determined-ai/determined#3101, graphite-project/graphite-web#813: NaN, Infinity."""
    for words in (("runs", "show", logged), ("runs", "ls"), ("models", "show", "net@1"), ("models", "log", "net")):
        assert strict(run(*words, "--json", DATASVC_REPO=repo.repository.url).stdout)
    with running_ui(repo.repository.url) as ui:
        for address in (f"/runs/{logged}", "/runs", "/models/net@1", "/models"):
            assert strict(ui.get(f"/api{address}")[2])


def test_a_number_that_is_not_finite_is_not_shown_as_missing(repo, logged):
    """determined-ai/determined#3101: the page showed null for NaN, which hid that the run had diverged."""
    terminal = run("runs", "show", logged, DATASVC_REPO=repo.repository.url).stdout
    assert ("loss: nan" in terminal, "top1: -inf" in terminal) == (True, True)
    with running_ui(repo.repository.url) as ui:
        assert "top1 -inf" in ui.get(f"/runs/{logged}")[2]


def test_a_metric_of_any_name_is_chosen_on_the_page_of_its_model(repo):
    """mlflow/mlflow#1830, graphite-project/graphite-web#33: a slash or a percent sign in the name, and no chart."""
    for step in (1, 2):
        repo.models.save("net", {"w": torch.zeros(1)}, step=step, metrics=dict.fromkeys(NAMES, step / 8))
    with running_ui(repo.repository.url) as ui:
        for name in NAMES:
            status, _, page = ui.get(f"/models/net@2?metric={urllib.parse.quote(name, safe='')}")
            assert (status, f"{html.escape(name, quote=False)} by version" in page.replace("&#34;", '"')) == (
                200,
                True,
            )


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/New_York"])
def test_times_are_those_of_utc_on_a_machine_in_another_zone(repo, monkeypatch, zone):
    """mlflow/mlflow-export-import#246, JuliaAI/MLFlowClient.jl#20: a time without an offset was read as local."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        with RunLog.open(repo.repository, "net") as log:
            log.report("step", step=1)
        repo.models.save("net", {"w": torch.zeros(1)}, step=1)
        repo.models.tag("net@1", "prod")
        (found,) = list_runs(repo.repository, "net")
        assert abs(found.started_s - time.time()) < 600  # the identifier has the time too, see `started_s`
        assert log.id.startswith(time.strftime("%Y%m%d-%H", time.gmtime(found.started_s)))
        moved = repo.models.tag_history("net", "prod")[0].content["created"]
        at = [
            run("models", "tag", "net", "prod", "--at", text, TZ=zone, DATASVC_REPO=repo.repository.url).returncode
            for text in (moved.removesuffix("+00:00"), "2000-01-01T00:00")
        ]
        assert at == [0, 1]
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
