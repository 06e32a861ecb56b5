"""The disk of a node after a power cut: what a save said to be there is there, and nothing else is taken for it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_power_cut_at_any_step_of_a_save_leaves_a_whole_version_and_the_last_one_that_was_saved(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the library that notes what is not synced")
    library = tmp_path / "power_cut.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, HERE / "power_cut.c", "-ldl"], check=True)
    environment = {
        **os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library),
        "POWER_CUT_ROOT": f"{tmp_path}/disk", "POWER_CUT_LOG": f"{tmp_path}/unsynced",
    }  # fmt: skip
    (tmp_path / "disk").mkdir()
    (tmp_path / "unsynced").touch()
    words = [sys.executable, HERE / "local_power_cuts.py", tmp_path, "4"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    lost, restored = json.loads(done.stdout)
    assert lost["bytes"] + lost["names"] > 0, "the cuts undo something"
    assert restored["after the save: 2"] == 4
    assert restored["before the branch: 1"] == restored["before the entry: 1"] == 4
    assert restored["before the rename: 2"] == 4, "all of it was synced"
