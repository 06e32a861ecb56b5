"""What an operator of a cluster sees: boards that fill, manifests that a cluster admits, and quiet logs."""

import json
import os
import re
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

import datasvc
from datasvc.errors import ConfigError
from datasvc.loaders import ImageLoader, serve_loader_metrics
from datasvc.loaders.core import metrics
from datasvc.loaders.decode.crop import import_codec
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


HINTS = """Failed to load nvjpeg library! Please install CUDA toolkit or the nvJPEG python wheel.
Failed to load nvtiff library! Please install nvTIFF.
Note: If using nvImageCodec's Python distribution, it is enough to install the nvTIFF wheel
"""


@pytest.fixture
def imported_anew(tmp_path, monkeypatch):
    """Lets `nvidia.nvimgcodec` be imported from `tmp_path`."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "nvidia"}
    folder = tmp_path / "nvidia" / "nvimgcodec"
    folder.mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder / "__init__.py"
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_without_a_gpu_the_decoder_s_hints_about_gpu_libraries_are_not_printed(imported_anew, capfd):
    """NVIDIA/nvImageCodec#30: messages of its libraries that no setting turns off. Other output is passed on."""
    imported_anew.write_text(f"import os\nos.write(2, {(HINTS + 'a real error').encode()!r})\n")
    assert import_codec().__file__ == str(imported_anew)
    import_codec()
    os.write(2, b"\nlater")
    assert capfd.readouterr().err == "a real error\nlater"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
@pytest.mark.parametrize(("program", "error"), [("train.py", ImportError), ("C:\\\\bin\\\\datasvc.exe", SystemExit)])
def test_another_system_than_linux_is_named_in_one_line(platform, program, error, monkeypatch):
    """amoffat/sh#576: on another system an import ends in an error about a module that it lacks."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(error, match=f"^datasvc runs on Linux only, and this is {platform}: use .*$"):
        exec(Path(datasvc.__file__).read_text(), {"__name__": "datasvc"})
