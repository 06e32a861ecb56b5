"""`datasvc ui`: a process that serves until it is told to stop."""

import http.client
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from datasvc.cli.ui import ui as ui_command
from datasvc.errors import ConfigError, NotFoundError
from tests.cli.command import ROOT, run_apart
from tools.bench.ui_server import running_server


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_at_a_signal_while_a_page_is_live(filled, number):
    command = [sys.executable, "-m", "datasvc.cli.main", "ui", "--repo", str(filled), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]
            # The page of the nodes is updated as long as its connection is open.
            with urllib.request.urlopen(f"{url.rstrip('/')}/api/cluster/events") as stream:
                assert stream.headers["Content-Type"].startswith("text/event-stream")
                process.send_signal(number)
                output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, output, errors) == (0, "", "")


@pytest.mark.slow
def test_no_page_loads_torch_or_pandas_into_the_server(filled):
    # As a user starts it: the server of the other tests is a thread of a process that has both.
    with running_server(str(filled), filled.parent) as server:
        pages = (
            "/",
            "/datasets/pets@2",
            "/datasets/pets@2/samples/train?where=label+%3E+1",
            "/models/cnn@2?span=all",
        )
        for path in (*pages, "/compare/cnn@2/cnn@4?norms=1", "/planner", "/lineage/cnn@4", "/runs"):
            assert server.fetch(path)
        assert b"relative change" in server.fetch("/compare/cnn@2/cnn@4?norms=1")
        mapped = Path(f"/proc/{server.process}/maps").read_text(encoding="utf-8")
    assert "_duckdb" in mapped
    assert [name for name in ("/torch/", "/pandas/") if name in mapped] == []


@pytest.mark.slow
def test_a_port_that_is_in_use_is_an_error_that_names_it(ui, filled):
    port = ui.url.rpartition(":")[2]
    done = run_apart("ui", "--repo", filled, "--port", port, "--no-browser")
    assert done.returncode == 2
    assert f"{port}): address already in use; choose another --port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("url", ["{folder}/typo", "s4://bucket/repo"])
def test_a_repository_that_is_not_there_is_an_error_at_the_start(tmp_path, monkeypatch, url):
    monkeypatch.setattr("datasvc.shards.ingestion.executors.keep_lean", lambda: None)
    monkeypatch.setattr("datasvc.ui.server.run_ui", None)  # the server must not start
    with pytest.raises((NotFoundError, ConfigError), match=r"no repository at|cannot use"):
        ui_command(url.format(folder=tmp_path), port=0, open_browser=False)


@pytest.mark.slow
def test_it_stops_at_a_signal_while_a_page_waits_for_a_store_that_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as store:
        url = f"http://127.0.0.1:{store.getsockname()[1]}/repo"
        command = [sys.executable, "-m", "datasvc.cli.main", "ui", "--repo", url, "--port", "0", "--json"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            try:
                page = json.loads(process.stdout.readline())["url"]
                threading.Thread(target=_open, args=(page,), daemon=True).start()
                connection, _ = store.accept()
                process.send_signal(signal.SIGINT)
                output, errors = process.communicate(timeout=60)
                connection.close()
            finally:
                process.kill()
    assert (process.returncode, output, errors) == (0, "", "")


class Output(io.StringIO):
    """Standard output that may be a terminal."""

    def __init__(self, *, is_terminal):
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal


@pytest.mark.parametrize(("is_terminal", "is_wanted"), [(True, True), (True, False), (False, True)])
def test_the_browser_is_opened_at_the_address_in_a_terminal_unless_it_is_not_wanted(
    filled, monkeypatch, is_terminal, is_wanted
):
    calls, done = [], threading.Event()
    monkeypatch.setattr("webbrowser.open", lambda address: (calls.append(address), done.set()))
    monkeypatch.setattr("datasvc.shards.ingestion.executors.keep_lean", lambda: None)
    monkeypatch.setattr("sys.stdout", Output(is_terminal=is_terminal))

    def serve(_settings, ready):
        ready("http://127.0.0.1:8766/")
        if is_terminal and is_wanted:
            assert done.wait(60)

    monkeypatch.setattr("datasvc.ui.server.serve", serve)
    ui_command(str(filled), open_browser=is_wanted)
    assert calls == ["http://127.0.0.1:8766/"] * (is_terminal and is_wanted)


def _open(url):
    with suppress(OSError, http.client.HTTPException):
        urllib.request.urlopen(url).read()
