"""The programs of the pages on integrations run as they stand, where their packages are installed."""

import os
import re
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from shutil import copytree

import pytest

from tests.support.pages import find_page
from tests.support.ray_cluster import ray_cluster

HEADINGS = {
    "integrations.md": ["Lightning", "Transformers", "Accelerate", "torchdata"],
    "trackers.md": ["MLflow", "Weights & Biases"],
    "ray.md": ["Ray Data", "Ray Train", "RayExecutor"],
    "jax.md": ["JAX", "Keras"],
}
# Run by `make test-long`: test_ray.py trains with Ray Train and reads with Ray Data at each landing.
LONG = {"Ray Train", "Ray Data"}
NOT_RUN = {
    "torchtitan": "its Trainer needs GPUs; examples/torchtitan_llama.py is run",
    "The Hugging Face Hub": "needs the Hub; tests/integrations/test_hub.py calls the same functions",
}


def programs_of(page):
    """Return the programs of a page by the heading above them."""
    sections = re.split(r"^##? ", find_page(page).read_text(), flags=re.MULTILINE)[1:]
    found = {
        section.splitlines()[0]: re.findall(r"^```python\n(.+?)^```", section, re.DOTALL | re.MULTILINE)
        for section in sections
    }
    return {heading: programs for heading, programs in found.items() if programs}


PROGRAMS = {heading: programs for page in [*HEADINGS, "hub.md"] for heading, programs in programs_of(page).items()}


def test_the_pages_have_a_program_of_each_framework():
    for page, headings in HEADINGS.items():
        assert [heading for heading in programs_of(page) if heading not in NOT_RUN] == headings
    for heading in NOT_RUN:
        compile(PROGRAMS[heading][0], heading, "exec")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("without_an_experiment")
@pytest.mark.parametrize(
    "heading",
    [
        pytest.param(heading, marks=[pytest.mark.long] if heading in LONG else [])
        for heading in PROGRAMS
        if heading not in NOT_RUN
    ],
)
def test_a_program_runs(heading, digits, tmp_path, monkeypatch):
    (program,) = PROGRAMS[heading]
    needed = re.findall(r"^(?:import|from) (\w+)", program, re.MULTILINE)
    needed += {"MLflow": ["sqlalchemy"], "RayExecutor": ["ray"]}.get(heading, [])
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing} not installed")
    copytree(digits.repository.url.removeprefix("file://"), tmp_path / "repo")
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "KERAS_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with ray_cluster() if "ray" in needed else nullcontext() as ray:
        try:
            exec(compile(program, heading, "exec"), {"__name__": "__main__"})
        finally:
            if ray:
                ray.data.DataContext.get_current().execution_options.preserve_order = False
            os.environ.pop("KERAS_BACKEND", None)  # the program sets it
    if heading == "MLflow":
        sys.modules["mlflow"].set_tracking_uri(None)
    if "wandb" in needed:
        sys.modules["wandb"].teardown()  # it keeps the settings of the first run of a process
