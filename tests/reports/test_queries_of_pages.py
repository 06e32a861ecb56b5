"""One address of `datasvc ui` cannot take the memory, the time or the threads of all its readers."""

import http.client
import tempfile
import threading
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from datasvc import sql_sandbox
from datasvc.errors import BusyError, ConfigError
from datasvc.sql_sandbox import QueryLimits, confined, connected, limited
from datasvc.ui.web import routes
from tests.ui.conftest import fill_repository, running_ui

_LONG_STEP = "length(regexp_replace(repeat('a', 100000000), '(a|b)*c', 'x', 'g')) > 0"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    url = tmp_path_factory.mktemp("pages") / "repo"
    fill_repository(url)
    with running_ui(url) as server:
        yield server


@pytest.mark.parametrize(
    "value",
    ["length(repeat('a', 1000000000))", "len(range(200000000))"],
)
@pytest.mark.parametrize("path", ["pets@2/samples/train?where=", "pets@2/samples/train?order=", "pets@2?where="])
def test_a_condition_that_needs_gigabytes_is_refused_and_others_are_answered(pages, path, value, capfd):
    """duckdb/duckdb#12017: `repeat` with large arguments takes any memory; its own limit does not hold."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of earlier tests
    _, _, html = pages.get(f"/datasets/{path}{quote(f'{value} > 0' if 'where' in path else value)}")
    assert "cannot be evaluated" in html or "narrow the condition" in html
    assert "key" in pages.get("/datasets/pets@2/samples/train?where=label+%3D+1")[2]
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert int(peak.split()[1]) < before + (512 << 10), "kilobytes of the process of the pages"


@pytest.mark.slow
def test_a_query_in_one_long_step_is_killed_at_the_deadline_and_the_next_one_is_answered(pages, monkeypatch):
    """duckdb/duckdb#15925, duckdb/duckdb#24961: an interrupt does not end every query, so its process is killed."""
    monkeypatch.setattr(routes, "_QUERY_TIME_S", 1.0)
    html = pages.get(f"/datasets/pets@2/samples/train?where={quote(_LONG_STEP)}")[2]
    assert "the query did not end in 1 s and was stopped" in html
    monkeypatch.undo()
    found = pages.json("/datasets/pets@2/samples/train?where=label+%3D+1", "samples")
    assert {sample["values"]["label"] for sample in found["samples"]} == {1}


def test_a_reader_who_leaves_frees_the_thread_of_a_long_query(pages, monkeypatch):
    """cldellow/datasette-parquet#6: a query goes on after its reader has left, and holds what others need."""
    ended = threading.Event()
    begun = threading.Event()
    close, call = sql_sandbox._Child.close, sql_sandbox._Child.call

    def note_call(child, *arguments):
        begun.set()
        return call(child, *arguments)

    def note_close(child):
        close(child)
        ended.set()

    monkeypatch.setattr(sql_sandbox._Child, "call", note_call)
    monkeypatch.setattr(sql_sandbox._Child, "close", note_close)
    monkeypatch.setattr(routes, "_QUERY_TIME_S", 3600.0)
    connection = http.client.HTTPConnection(urlsplit(pages.url).netloc)
    connection.request("GET", f"/api/datasets/pets@2/samples/train?where={quote(_LONG_STEP)}")
    assert begun.wait(60)
    connection.close()
    assert ended.wait(60)


def test_too_many_long_queries_are_refused_and_hold_no_threads(monkeypatch):
    """duckdb/duckdb#8564: without a limit of its time, a query holds a thread of its server."""
    children = sql_sandbox._Children()
    monkeypatch.setattr(sql_sandbox, "_children", children)
    monkeypatch.setattr(children, "_num_to_start", 0)  # all of them are busy
    waiting = [children.take() for _ in range(sql_sandbox._MAX_WAITING)]
    limits = {"memory_bytes": 64 << 20, "spilled_bytes": 1 << 20}
    with limited(QueryLimits(time_s=3600.0, **limits)), pytest.raises(BusyError, match="try again"):
        confined(len, "x")
    waiting[0].cancel()
    with limited(QueryLimits(time_s=0.0, **limits)), pytest.raises(ConfigError, match="did not end in 0 s"):
        confined(len, "x")
    assert len(children._waiting) == sql_sandbox._MAX_WAITING
    assert children.take() in children._waiting, "the place of a query that has gone is free"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "image"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
@pytest.mark.parametrize("path", ["/datasets", "/api/datasets", "/v1/models"])
def test_the_page_of_another_site_cannot_send_queries_by_an_image_tag(pages, path, headers, status):
    """tornadoweb/tornado#3576: a server of this machine answers what any page in the browser requests."""
    assert pages.get(path, **headers)[0] == status


def test_the_folder_of_a_query_that_was_killed_is_removed_by_a_later_one(tmp_path, monkeypatch):
    """duckdb/duckdb#11564: what a query has spilled stays on the disk after its process was killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "datasvc-sql-left"
    left.mkdir()
    (left / "spilled.block").write_bytes(b"x")
    with connected():
        sql_sandbox._remove_abandoned()
        (kept,) = tmp_path.iterdir()
        assert kept != left
    assert not kept.exists()
