"""The programs of the page integrations.md run as they stand, where their packages are installed."""

import re
import sys
from importlib.util import find_spec
from shutil import copytree

import pytest

from tests.pages import find_page

SECTIONS = re.split(r"^## ", find_page("integrations.md").read_text(), flags=re.MULTILINE)[1:]
PROGRAMS = {
    section.splitlines()[0]: re.findall(r"^```python\n(.+?)^```", section, re.DOTALL | re.MULTILINE)
    for section in SECTIONS
}


def test_the_page_has_a_program_of_each_framework():
    assert list(PROGRAMS) == ["Lightning", "Transformers", "Accelerate", "torchdata", "MLflow", "Weights & Biases"]


@pytest.mark.slow
@pytest.mark.parametrize("heading", PROGRAMS)
def test_a_program_runs(heading, digits, tmp_path, monkeypatch):
    (program,) = PROGRAMS[heading]
    needed = re.findall(r"^(?:import|from) (\w+)", program, re.MULTILINE)
    if heading == "MLflow":
        needed.append("sqlalchemy")  # which keeps runs in a file
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing} not installed")
    copytree(digits.repository.url.removeprefix("file://"), tmp_path / "repo")
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    exec(compile(program, heading, "exec"), {"__name__": "__main__"})
    if heading == "MLflow":
        sys.modules["mlflow"].set_tracking_uri(None)
    if "wandb" in needed:
        sys.modules["wandb"].teardown()  # it keeps the settings of the first run of a process
