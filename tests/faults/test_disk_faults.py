"""Each file operation of ingest, append, delete, save, tag, push, remove, gc, staging and eviction fails once.

Each failure ends in an error of ours or is survived, nothing half-made is visible, and the next try works.
DATASVC_DISK_FAULTS=all gives every operation every error, instead of the errors in turn.
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
@pytest.mark.parametrize(
    ("operation", "min_points"),
    [
        ("ingest", 60),
        ("append", 70),
        ("delete", 35),
        ("save", 40),
        ("tag", 8),
        ("push", 50),
        ("remove", 10),
        ("gc", 14),
        ("stage", 120),
        ("evict", 120),
    ],
)
def test_no_failing_file_operation_loses_or_half_makes_anything(tmp_path, shim, operation, min_points):
    every = "all" if os.environ.get("DATASVC_DISK_FAULTS") == "all" else "turns"
    done = subprocess.run(
        [sys.executable, HERE / "disk_fault_program.py", tmp_path, operation, json.dumps(ERRORS), every],
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
    assert result["points"] >= min_points
    assert result["kinds"].get("refused", 0) >= min_points // 2
