"""The examples of the page trainer.md run as they stand, alone and on two ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import find_page

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", find_page("trainer.md").read_text(encoding="utf-8"), re.DOTALL)


def run(command, tmp_path):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{tmp_path}: {done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_examples_run_alone(tmp_path):
    program = tmp_path / "all.py"
    program.write_text("\n".join(EXAMPLES), encoding="utf-8")
    assert len(EXAMPLES) == 6
    run([sys.executable, str(program)], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_examples_run_on_two_ranks(tmp_path):
    program = tmp_path / "all.py"
    program.write_text("\n".join(EXAMPLES), encoding="utf-8")
    run([sys.executable, "-m", "datasvc.trainer.launch", "-np", "2", sys.executable, str(program)], tmp_path)
