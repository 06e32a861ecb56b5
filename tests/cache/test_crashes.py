"""kill -9 at every step of whatever changes a cache, then open it again: see `crash_steps` for what must hold."""

import subprocess
import sys

import pytest

from tests.cache.crash_steps import SCENARIOS
from tests.cache.processes import ROOT

# Fewer would mean that the steps are not seen any more.
MIN_STEPS = 10


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_cache_is_sound_after_a_kill_at_every_step(name, memory_path):
    command = [sys.executable, "-m", "tests.cache.crash_steps", name, memory_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= MIN_STEPS
