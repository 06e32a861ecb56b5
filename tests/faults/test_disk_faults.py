"""Each file operation of ingest, append, delete, save, tag, push, remove, gc, staging and eviction fails once.

Each failure ends in an error of ours or is survived, nothing half-made is visible, and the next try works. The same
holds if the program ends there. DATASVC_DISK_FAULTS=all gives every file operation every error and every end.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Negative: half of a write succeeds first.
OPERATIONS = {  # and how many file operations each has at least
    "ingest": 60,
    "append": 70,
    "delete": 35,
    "branch": 4,
    "grow": 35,
    "merge": 20,
    "save": 40,
    "tag": 8,
    "push": 50,
    "remove": 10,
    "gc": 14,
    "stage": 120,
    "evict": 120,
}
ENDS = ["interrupt", "terminate", "kill", "exception", "exit"]
ERRORS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, -errno.ENOSPC]


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the library that fails file operations")
    library = tmp_path_factory.mktemp("shim") / "disk_faults.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, HERE / "disk_faults.c", "-ldl"], check=True)
    return library


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("operation", "min_points"), list(OPERATIONS.items()))
def test_no_failing_file_operation_loses_or_half_makes_anything(memory_path, shim, operation, min_points):
    result = run(memory_path, shim, operation, ERRORS, "turns")
    assert result["points"] >= min_points
    assert result["kinds"].get("refused", 0) >= min_points // 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_program_that_ends_at_any_file_operation_leaves_nothing_that_the_next_trips_over(
    memory_path, shim, operation
):
    is_short = OPERATIONS[operation] < 30
    result = run(memory_path, shim, operation, ENDS, "all" if is_short else "some")
    assert result["kinds"]["ended"] >= OPERATIONS[operation] * (4 if is_short else 0.25)


def run(folder, shim, operation, faults, choice):
    if os.environ.get("DATASVC_DISK_FAULTS") == "all":
        choice = "all"
    done = subprocess.run(
        [sys.executable, HERE / "disk_fault_program.py", folder, operation, json.dumps(faults), choice],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["wrong"], "\n".join(result["wrong"])
    assert result["untried"] == []
    return result
