import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_whatever_a_hostile_version_says_raises_our_errors_only_runs_nothing_and_takes_little_memory(repository):
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.hostile", repository.url],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)["seen"]
    for kind in ("states", "tables", "entries", "plans"):
        assert seen[kind].get("CorruptDataError", 0) >= 5, seen
