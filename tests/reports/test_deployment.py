"""What an operator of a cluster sees: boards that fill, manifests that a cluster admits, and quiet logs."""

import json
import re
import socket
import urllib.request
from pathlib import Path

import pytest

from datasvc.errors import ConfigError
from datasvc.loaders import ImageLoader, serve_loader_metrics
from datasvc.loaders.core import metrics
from datasvc.testing import small_dataset
from datasvc.trainer.recipes import train as loop
from datasvc.trainer.recipes.settings.config import TrainConfig

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "deploy/grafana/datasvc.json").read_text())


@pytest.fixture
def servers(monkeypatch):
    """The servers of metrics that were started, on free ports, with the ports that were asked for."""
    found, real = [], metrics.start_http_server

    def serve(port, registry):
        found.append((port, *real(0, "127.0.0.1", registry)))
        return found[-1][1:]

    monkeypatch.setattr(metrics, "start_http_server", serve)
    return found


def scrape(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
        return {line.split("{")[0] for line in answer.read().decode().splitlines() if not line.startswith("#")}


def test_the_row_of_loaders_on_the_board_fills_while_datasvc_train_runs(servers, tmp_path, monkeypatch):
    """totvslabs/couchbase-exporter#30: a board whose queries name series that nothing exports stays empty."""
    url = str(tmp_path / "repo")
    small_dataset(url, samples=8)
    row = [panel for panel in BOARD["panels"] if "datasvc_loader" in json.dumps(panel.get("targets", ()))]
    named = set(re.findall(r"datasvc_loader_\w+", json.dumps([panel["targets"] for panel in row])))
    scraped, report = [], loop.report_step

    def report_and_scrape(run, *args, **options):
        scraped.append(scrape(servers[0][1]))
        return report(run, *args, **options)

    monkeypatch.setattr(loop, "report_step", report_and_scrape)
    loop.train(
        TrainConfig(repo=url, data="small", name="net", batch_size=4, max_steps=1, metrics_port=9100, run_log=False)
    )
    assert [port for port, *_ in servers] == [9100]
    assert named <= scraped[0]
    assert not servers[0][2].is_alive(), "the port is free for the next run"


def test_a_port_that_is_taken_ends_the_run_at_its_start_with_the_port(tmp_path):
    """prometheus/client_python#667: a second process of a machine asks for the same port."""
    loader = ImageLoader(
        small_dataset(str(tmp_path / "repo"), samples=4)["train"], batch_size=4, size=8, training=False
    )
    with socket.create_server(("", 0)) as taken, loader:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"on port {port}: .*; choose another"):
            serve_loader_metrics(port, {"val": loader})
