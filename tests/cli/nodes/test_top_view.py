"""`datasvc top`: what people see of a node."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from copy import deepcopy

import pytest
from rich.console import Console

from datasvc.cache import Cache
from datasvc.cli.nodes.top_view import _RATE_COUNTERS, byte_rates, draw, draw_traffic, sparkline, status_text, watch
from datasvc.drawing.colours import colour_values
from datasvc.node.service import describe_cache
from datasvc.repository import Repository
from tests.cli.command import ROOT, run


@pytest.fixture
def cache(tmp_path):
    """A folder with one object of 5,000 bytes, fetched."""
    repository = Repository.create(str(tmp_path / "repo"))
    info = repository.objects.put(bytes(5000))
    with Cache(tmp_path / "cache", budget="1MB") as opened:
        opened.acquire(info, repository)
        opened.release(info.digest)
        yield opened


def status_of(cache):
    return {"cache": describe_cache(cache.status())}


def test_a_look_says_how_full_the_cache_is_and_who_uses_it(cache):
    text = status_text(status_of(cache))
    assert "8.19 kB of 1.00 MB" in text
    assert "8.19 kB resident in 1 object" in text
    assert "hits: 0.0% of 1" in text
    assert f"{os.getpid()} " in text


def test_a_process_is_one_row_for_each_description_and_never_without_one(cache):
    status = status_of(cache)
    jobs = [("7-a", "pets", 1000), ("7-b", "pets", 500), ("7-c", "", 20), ("8-d", "", 30)]
    cache_jobs = [{"lease_id": lease, "note": note, "clock_bytes": count} for lease, note, count in jobs]
    text = status_text({"cache": {**status["cache"], "jobs": cache_jobs}})
    rows = [line.split() for line in text.splitlines() if line[:2] in {"7 ", "8 "}]
    assert rows == [["7", "1.50", "kB", "pets"], ["7", "20", "bytes", "-"], ["8", "30", "bytes", "-"]]


def test_jobs_and_peers_have_a_line_each(cache):
    job = {
        "ref": "pets@1", "split": "", "state": "running", "done_bytes": 3000, "total_bytes": 9000,
        "bytes": {"resident": 1000, "origin": 0, "peer": 2000},
    }  # fmt: skip
    peer = {"num_ok": 7, "num_missing": 1, "num_failed": 2, "num_lying": 3, "bytes_received": 5000}
    text = status_text({**status_of(cache), "jobs": [job], "peers": {"http://b:1": peer}})
    assert line_with(text, "pets@1")[:7] == ["pets@1", "all", "running", "3.00", "kB", "9.00", "kB"]
    assert line_with(text, "http://b:1") == ["http://b:1", "7", "1", "2", "3", "5.00", "kB"]


def test_names_from_elsewhere_cannot_command_the_terminal(cache):
    job = {"ref": "\x1b[2Jpets[/red]", "split": "", "state": "done", "done_bytes": 0, "total_bytes": 0}
    job["bytes"] = {"resident": 0, "origin": 0, "peer": 0}
    text = status_text({**status_of(cache), "jobs": [job]})
    assert "\x1b" not in text
    assert "[2Jpets[/red]" in text


def test_rates_are_differences_over_time_and_never_below_zero(cache):
    before, after = status_of(cache), status_of(cache)
    after["cache"]["counters"] = {"origin_bytes": 15_000}
    assert byte_rates(before, after, 2.0)["origin_bytes"] == 5000
    assert byte_rates(after, before, 2.0)["origin_bytes"] == 0
    assert byte_rates(before, after, 0.0) == {}


def test_the_last_rates_are_bars_beside_the_highest(cache):
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(
        draw(status_of(cache), [{name: rate for _, name in _RATE_COUNTERS} for rate in (0, 1000, 8000, 4000)])
    )
    assert line_with(console.file.getvalue(), "evicted")[-5:] == ["4.00", "kB/s", "▁█▄", "8.00", "kB/s"]
    assert "last 4 readings" in console.file.getvalue()


def test_a_sparkline_goes_from_zero_to_the_highest_value_and_hides_no_small_one():
    assert sparkline([0, 1e-9, 1, 2, 3, 4, 5, 6, 7, 8]) == " ▁▁▂▃▄▅▆▇█"
    assert (sparkline([0, 0]), sparkline([])) == ("  ", "")


@pytest.mark.parametrize(
    ("protocol", "height", "start"),
    [("kitty", 50, "\x1b_Ga=d,q=2"), ("sixel", 50, "\x1bP"), ("kitty", 12, None), ("blocks", 50, None)],
)
def test_a_terminal_with_pixels_has_a_picture_of_the_traffic_below_the_tables(
    cache, monkeypatch, protocol, height, start
):
    monkeypatch.setenv("DATASVC_IMAGES", protocol)
    screen, stop, status = io.StringIO(), threading.Event(), status_of(cache)
    readings = []

    def read_status():
        readings.append(len(readings))
        if len(readings) == 3:
            stop.set()
        seen = deepcopy(status)
        seen["cache"]["counters"] |= {"origin_bytes": 1000 * len(readings)}
        return seen

    console = Console(file=screen, force_terminal=True, width=110, height=height)
    watch(read_status, interval_s=0.001, stop=stop, console=console)
    places = re.findall(r"\x1b\[(\d+);1H(\x1bP|\x1b_Ga=d,q=2)", screen.getvalue())
    # The first reading has no rate yet.
    assert [found for _, found in places] == ([start] * 2 if start else [])
    assert all(int(line) > len(status_text(status).splitlines()) for line, _ in places)


def test_the_picture_has_a_line_for_each_counter():
    rates = [{"a": 0.0, "b": 5.0}, {"a": 10.0, "b": 5.0}]
    colours = {f"#{red:02x}{green:02x}{blue:02x}" for _, (red, green, blue) in
               draw_traffic(rates, {"a": "A", "b": "B"}).getcolors(1000)}  # fmt: skip
    assert {colour_values("c0")[1], colour_values("c1")[1]} <= colours
    assert draw_traffic([{"a": 0.0}], {"a": "A"}).size == (640, 140)


def test_without_a_terminal_it_looks_once(cache):
    done = run("top", "--cache", cache.folder)
    assert done.returncode == 0
    assert "resident in 1 object" in done.stdout
    assert "\x1b" not in done.stdout


def obey_interrupts():
    """As a terminal's programs do: those of a job in the background ignore them, and this test may be one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_on_a_terminal_it_watches_until_interrupted(cache):
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "datasvc.cli.main", "top", "--cache", cache.folder, "--interval", "0.01"],
        cwd=ROOT, stdin=other_end, stdout=other_end, stderr=other_end, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        preexec_fn=obey_interrupts,  # noqa: PLW1509 - one call, which takes no lock
    )  # fmt: skip
    os.close(other_end)
    seen = b""
    while seen.count(b"resident in 1 object") < 3:
        seen += os.read(terminal, 4096)
    process.send_signal(signal.SIGINT)
    drained = True
    while drained:
        try:
            drained = os.read(terminal, 4096)
        except OSError:
            break
    assert process.wait() == 0
    os.close(terminal)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "--node URL"),
        (["--node", "x"], 2, "http://HOST:PORT"),
        (["--node", "http://127.0.0.1:9"], 5, "does not respond"),
        (["--cache", "nowhere"], 1, "is not a cache"),
        (["--cache", "nowhere", "--interval", "0"], 2, "interval"),
    ],
)
def test_what_cannot_be_watched_is_a_clear_error(options, code, message):
    done = run("top", *options, DATASVC_CACHE=None)
    assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


def line_with(text, word):
    return next(line.split() for line in text.splitlines() if word in line)
