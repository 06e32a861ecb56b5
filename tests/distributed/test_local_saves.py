"""Versions on the disks of three nodes: what is restored after one of them, and after two, are lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm_python

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_node_that_is_killed_and_lost_loses_nothing_and_two_lose_what_the_repository_lacks(tmp_path):
    words = [warm_python.command(), ROOT / "tests/distributed/programs/local_saves.py", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=True)
    sys.stderr.write(done.stderr)
    trained, one_lost, two_lost = map(json.loads, done.stdout.splitlines())
    lost = [5, "LostRankError"]
    assert trained == [lost, lost, None, None], "the last node was killed"
    on_nodes = "m, step 5, on the nodes"
    assert "is read again from other nodes" in done.stderr
    assert [found[:2] for found in one_lost] == [[on_nodes, "m@1"]] * 4
    assert [found[3] for found in one_lost] == [0] * 4
    # The new node has got the version that was restored, at first only what its ranks needed of it.
    assert [[step for step in found[2] if step >= 4] for found in one_lost] == [[4, 5], [4, 5], [5], [5]]
    assert one_lost[2][4] < one_lost[0][4]
    assert [[found[0], found[3]] for found in two_lost] == [["m@1", 2]] * 4
