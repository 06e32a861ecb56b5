"""Pages that follow what changes: only what is new is sent, and each state is rendered once."""

import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import datasvc
from datasvc.errors import UnavailableError
from datasvc.runs import RunLog
from datasvc.testing import small_dataset
from datasvc.ui import caches
from datasvc.ui.web import live, site
from datasvc.ui.web.live import RenderedParts, changed_parts, split_parts
from tests.cli.command import ROOT
from tests.ui.conftest import running_ui
from tests.ui.test_runs import report_steps

HTML = """<div>no part</div>
<div id="a" class="x" data-live>one <div>two <div>three</div></div> <b>four</b></div>
<div data-live id="chart" data-series="[1, &#34;&lt;div&gt;&#34;]"><svg></svg></div><p></p>
<div id="empty" data-live></div>"""
WINDOWS = 7


def test_the_parts_of_a_page_are_what_its_live_elements_have():
    parts = split_parts(HTML)
    assert {name: part.content for name, part in parts.items()} == {
        "a": {"html": "one <div>two <div>three</div></div> <b>four</b>"},
        "chart": {"series": '[1, "<div>"]'},
        "empty": {"html": ""},
    }


def test_a_page_gets_the_parts_that_it_wants_and_does_not_have():
    parts = split_parts(HTML)
    answer = changed_parts(parts, f"a={parts['a'].digest} chart= unknown=")
    assert answer == {
        "parts": {"chart": {"digest": parts["chart"].digest, "series": '[1, "<div>"]'}},
        "ids": ["a", "chart", "empty"],
    }
    assert changed_parts(parts, " ".join(f"{name}={part.digest}" for name, part in parts.items()))["parts"] == {}
    assert changed_parts(parts, "a==x = b")["parts"].keys() == {"a"}


def test_all_readers_share_one_rendering_of_a_state():
    rendered, go_on, calls = RenderedParts(), threading.Event(), []

    def render():
        calls.append(1)
        go_on.wait()
        return HTML

    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(rendered.get, "/", "1", render) for _ in range(8)]
        go_on.set()
        assert len({id(future.result()) for future in found}) == 1
    assert len(calls) == 1
    rendered.get("/", "2", render)
    rendered.get("/other", "1", render)
    assert len(calls) == 3


def test_a_rendering_that_fails_is_tried_again_and_few_are_kept():
    rendered = RenderedParts()

    def fail():
        raise UnavailableError("no answer")

    for _ in range(2):
        with pytest.raises(UnavailableError):
            rendered.get("/", "1", fail)
    assert rendered.get("/", "1", lambda: HTML).keys() == {"a", "chart", "empty"}
    for number in range(20):
        rendered.get("/", str(number), lambda: HTML)
    with pytest.raises(UnavailableError):
        rendered.get("/", "1", fail)


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """The pages of a repository with a live run; each page reads the log as it is."""
    monkeypatch.setattr(site, "RunCache", lambda: caches.RunCache(max_age_s=0.0))
    repository = datasvc.open(str(tmp_path / "repo"), create=True).repository
    with running_ui(tmp_path / "repo") as server, RunLog.open(repository, "cnn", flush_s=3600) as log:
        report_steps(log, range(1, 4))
        assert log.flush()
        yield server, log


def get_parts(server, log, present):
    header = " ".join(f"{name}={digest}" for name, digest in present.items())
    status, _, text = server.get(f"/api/parts/runs/{log.ref}", **{"Datasvc-Parts": header})
    assert status == 200, text
    return json.loads(text)


def test_a_refresh_sends_what_has_changed(followed):
    server, log = followed
    ids = get_parts(server, log, {})["ids"]
    assert {"state", "chart-0", "curve-numbers", "header"} <= {*ids}
    first = get_parts(server, log, dict.fromkeys(ids, ""))["parts"]
    assert first.keys() == {*ids}
    assert json.loads(first["chart-0"]["series"])["x"] == [1, 2, 3]
    present = {name: part["digest"] for name, part in first.items() if name != "curve-numbers"}
    assert get_parts(server, log, present)["parts"] == {}
    report_steps(log, [4])
    assert log.flush()
    second = get_parts(server, log, present)["parts"]
    assert {"state", "chart-0", "time"} <= second.keys()
    # Neither what is the same, nor what the reader has not opened.
    assert not {"header", "versions", "ranks", "curve-numbers"} & second.keys()
    assert json.loads(second["chart-0"]["series"])["x"] == [1, 2, 3, 4]


def test_parts_are_compressed_and_errors_are_json(followed):
    server, log = followed
    request = urllib.request.Request(
        f"{server.url}/api/parts/runs/{log.ref}", headers={"Datasvc-Parts": "state=", "Accept-Encoding": "gzip"}
    )
    with urllib.request.urlopen(request) as response:
        assert response.headers["Content-Encoding"] == "gzip"
    status, _, text = server.get("/api/parts/runs/cnn/20200101-000000-000000")
    assert status == 404
    assert "there is no run" in json.loads(text)["error"]


def test_a_store_that_stops_to_respond_is_an_event(followed, monkeypatch):
    server, log = followed
    with urllib.request.urlopen(f"{server.url}/api/runs/{log.ref}/events") as stream:
        first = [stream.readline() for _ in range(3)]
        assert first[0] == b"event: message\n"

        def fail(*_):
            raise UnavailableError("the store did not answer")

        monkeypatch.setattr(caches, "_read", fail)
        assert stream.readline() == b"event: failing\n"
        assert json.loads(stream.readline().partition(b": ")[2]) == {"error": "the store did not answer"}
        monkeypatch.undo()
        assert [stream.readline() for _ in range(3)] == [b"\n", *first[:2]]


def test_home_follows_its_runs(tmp_path, page):
    repository = datasvc.open(str(tmp_path / "repo"), create=True).repository
    with running_ui(tmp_path / "repo") as server, RunLog.open(repository, "cnn", flush_s=3600) as log:
        page.goto(server.url)
        page.get_by_text("live", exact=True).wait_for()
        report_steps(log, [1], progress=0.25)
        assert log.flush()
        row = page.get_by_role("row").filter(has_text=log.ref)
        row.get_by_text("25 %").wait_for()
        # A problem is not one of the live parts: the page is loaded again.
        log.close("failed", "the loss is nan")
        page.get_by_text("1 problem").wait_for()
        page.get_by_text(f"{log.ref} failed: the loss is nan").wait_for()
        page.goto("about:blank")


def test_home_shows_a_problem_that_arises_while_it_is_open(tmp_path, page, monkeypatch):
    datasvc.open(str(tmp_path / "repo"), create=True)
    with running_ui(tmp_path / "repo") as server:
        page.goto(server.url)
        page.get_by_text("live", exact=True).wait_for()
        monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(total=100, free=1))
        page.get_by_text("is nearly full").wait_for()
        page.goto("about:blank")


def test_a_refresh_that_fails_is_told_with_the_age_of_the_values(followed, browser, monkeypatch):
    server, log = followed
    window = browser.new_page()  # the browser itself writes the status 500 to the console
    window.clock.install()
    window.goto(f"{server.url}/runs/{log.ref}")
    window.get_by_text("live", exact=True).wait_for()
    window.locator("#step").get_by_text("3", exact=True).wait_for()
    broken = threading.Event()
    split = live.split_parts
    monkeypatch.setattr(live, "split_parts", lambda html: split(html if not broken.is_set() else None))
    broken.set()
    report_steps(log, [4])
    assert log.flush()
    window.get_by_text("The last refresh has failed: this page has failed").wait_for()
    # Fewer seconds than the next try is away: only the age is shown again.
    window.get_by_text("These values are").wait_for()
    broken.clear()
    window.clock.run_for(6000)
    window.locator("#step").get_by_text("4", exact=True).wait_for()
    window.get_by_text("live", exact=True).wait_for()
    assert not window.get_by_text("These values are").is_visible()
    window.close()


def test_seven_windows_of_live_pages_load_and_the_one_that_is_looked_at_is_live(followed, page):
    server, log = followed
    # Windows of this browser never count as hidden, so a script says which are.
    page.context.add_init_script(
        """
        Object.defineProperty(document, "hidden", { get: () => Boolean(window.isHidden) });
        window.hide = (value) => {
          window.isHidden = value;
          document.dispatchEvent(new Event("visibilitychange"));
        };
        """
    )
    windows = [page, *(page.context.new_page() for _ in range(WINDOWS - 1))]
    address = f"{server.url}/runs/{log.ref}"
    for window in windows:
        # Without the end of the hidden connections, the seventh window waits here for one of six.
        window.goto(address)
        window.get_by_text("live", exact=True).wait_for()
        window.evaluate("hide(true)")
    report_steps(log, [4])
    assert log.flush()
    page.evaluate("hide(false)")
    page.locator("#step").get_by_text("4", exact=True).wait_for()
    assert windows[1].locator("#step").text_content() == "3"
    for window in windows:
        window.goto("about:blank")


# `datasvc train` whose eleventh step waits until the test has opened a pipe.
TRAINING = """
import sys
from datasvc.trainer.recipes import train as recipe

pipe, update, num_steps = sys.argv.pop(1), recipe.update, 0

def update_later(*arguments):
    global num_steps
    num_steps += 1
    if num_steps == 11:
        open(pipe).read()
    return update(*arguments)

recipe.update = update_later
from datasvc.cli.main import main
main()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_person_follows_a_training_program_from_home_to_its_end(tmp_path, page):
    page.set_default_timeout(240_000)  # the program imports torch
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    small_dataset(repo, "pets", splits={"train": 64, "val": 16})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    words = ["train", "--repo", tmp_path / "repo", "--data", "pets", "--name", "cnn", "--size", 16, "--epochs", 3]
    words += ["--batch-size", 4, "--report-every", 1, "--ledger", tmp_path / "runs/cnn"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with running_ui(tmp_path / "repo", ledgers=tmp_path / "runs") as server:
        page.goto(server.url)
        page.get_by_text("live", exact=True).wait_for()
        command = [sys.executable, "-c", TRAINING, *map(str, (pipe, *words))]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=tmp_path) as training:
            try:
                page.get_by_role("link", name="cnn/").first.click()
                page.locator("#step").get_by_text("10", exact=True).wait_for()
                page.get_by_text("live", exact=True).wait_for()
                # The eleventh batch is served, and waits.
                page.get_by_text("68.8 % reached").wait_for()
                page.locator("#chart-0[data-points='10'] canvas").wait_for()
                pipe.write_text("go on")
                page.get_by_text("The run is finished").wait_for()
                assert training.wait() == 0
            finally:
                training.kill()
        # The first evaluation has added a curve: the page was loaded again.
        page.locator("#step").get_by_text("48", exact=True).wait_for()
        page.locator("#chart-0[data-points='48']").wait_for()
        page.get_by_text("no sample was lost or served twice; 64 of 64 served once").wait_for()
        page.get_by_role("link", name="cnn@1").first.wait_for()
        page.goto("about:blank")
