"""The commands and the Python of the page recipes.md, and the commands of waiting.md, run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from datasvc.models import describe_model
from datasvc.repository import Repository
from tests.support.pages import find_page

ROOT = Path(__file__).parents[2]
GUIDE = find_page("recipes.md").read_text()


def blocks(language, text=GUIDE):
    return re.findall(rf"^```{language}\n(.+?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_python_of_the_guide_runs():
    (code,) = blocks("python")
    exec(compile(code, "recipes.md", "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen runs, one after the other
def test_the_commands_of_the_guide_run(tmp_path):
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    for script in blocks("sh") + blocks("sh", find_page("waiting.md").read_text()):
        done = subprocess.run(
            ["bash", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr}"
    few, validated = (
        {path.read_bytes() for path in tmp_path.glob(f"{folder}/*/*.jpg")} for folder in ("few/train", "images/val")
    )
    assert few
    assert not few & validated
    repository = Repository.open(str(tmp_path / "repo"))
    assert describe_model(repository, "branch@1").entry["parent"] == "careful@1"
    assert describe_model(repository, "small").entry["config"]["epochs"] == 3
