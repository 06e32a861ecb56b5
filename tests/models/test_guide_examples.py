"""The examples of the page models.md for users of any loader run as they stand."""

import re
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

import datasvc
from datasvc.cli.main import make_app
from tests.support.pages import find_page

GUIDE = find_page("models.md")
SECTION = re.search(r"^## Checkpoints alone\n(.+?)^## ", GUIDE.read_text(), re.DOTALL | re.MULTILINE)[1]
TORCH, LIGHTNING = re.findall(r"^```python\n(.+?)^```", SECTION, re.DOTALL | re.MULTILINE)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda code: exec(compile(code, "models.md", "exec"), {"__name__": "__main__"})


def said_of(ref):
    return CliRunner().invoke(make_app(), ["models", "show", ref, "--repo", "repo"], env={"COLUMNS": "200"}).stdout


def test_a_plain_torch_loop_with_any_loader_saves_versions_and_goes_on_from_them(run):
    run(TORCH.replace("100", "7"))
    repo = datasvc.open("repo")
    first = repo.models.restore("net")
    assert (first.entry["step"], first.entry["data"]) == (7, [])
    run(TORCH.replace("100", "12"))
    second = repo.models.restore("net")
    assert (second.entry["step"], second.entry["parent"]) == (12, "net@1")
    assert second.state["optimizer"]["state"][0]["step"] == 12
    assert "no consumed samples were recorded" in said_of("net@2")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning_with_any_loader_saves_versions_and_goes_on_from_them(run):
    run(LIGHTNING)
    found = datasvc.open("repo").models.restore("lightning")
    assert (found.entry["step"], found.entry["parent"], found.entry["data"]) == (40, "lightning@3", [])
    assert found.state["optimizer_states"][0]["state"][0]["step"] == 40
    assert found.entry["step"] == found.state["global_step"]
    assert "no consumed samples were recorded" in said_of("lightning@4")
