"""Programs that import horovod, unchanged, on real ranks."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPAT = Path(__file__).parents[2] / "tools" / "horovod_compat"


@pytest.fixture
def environ(launcher):
    found = importlib.util.find_spec("ignite")
    folders = [str(COMPAT), launcher.environ["PYTHONPATH"]]
    folders += [] if found is None else [str(Path(found.origin).parents[1])]
    return {**launcher.environ, "PYTHONPATH": os.pathsep.join(folders)}


@pytest.mark.slow
def test_a_program_for_horovod_runs_unchanged_under_horovodrun(launcher, environ):
    command = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", "--no-prefix", sys.executable]
    done = subprocess.run(
        [*command, launcher.program("unchanged.py")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 2 by 0.28.1", "1 of 2 by 0.28.1"]


@pytest.mark.slow
@pytest.mark.parametrize("is_spawned", [False, True])
def test_ignite_takes_it_for_horovod(launcher, environ, is_spawned):
    pytest.importorskip("ignite", reason="pytorch-ignite is not installed")
    program = launcher.program("with_ignite.py")
    if is_spawned:
        done = subprocess.run(
            [sys.executable, program, "2"], env=environ, capture_output=True, text=True, timeout=120, check=False
        )
    else:
        done = dataclasses.replace(launcher, environ=environ).run(2, sys.executable, program, "0")
    assert done.returncode == 0, done.stderr
    how = "spawned" if is_spawned else "launched"
    assert [f"rank {rank} was {how}" in done.stdout for rank in range(2)] == [True, True]
