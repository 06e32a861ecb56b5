"""The benchmark of the cache runs on a tiny workload and prints its figures; nothing here judges a speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)
TINY = {
    "staging": ("--requests", 1, 2, "--seconds", 0.1),
    "cold": ("--images", 60, "--shard-mib", 1),
    "reuse": ("--images", 1200),  # its smallest cache must hold what a batch needs
    "nodes": ("--images", 40),
    "peer": ("--images", 40),
    "hits": ("--images", 40),
    "catalogue": ("--objects", 100, "--reservations", 20),
}


def run(folder, part, *arguments):
    """Run a part of the benchmark; returns what it printed, its figures by name."""
    words = [part, *arguments, "--repeats", 1, "--folder", folder, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "cache", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=570,  # only bounds a hang
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not list(folder.iterdir())
    return {figure["name"]: figure["median"] for figure in found["rows"] + found["ratios"]}


@pytest.mark.long
def test_the_catalogue_is_measured(tmp_path):
    assert all(value > 0 for value in run(tmp_path, "catalogue", *TINY["catalogue"]).values())


@pytest.mark.long
@pytest.mark.parametrize("part", ["staging", "peer", "hits"])
def test_staging_peers_and_hits_are_measured(tmp_path, part):
    assert all(value > 0 for value in run(tmp_path, part, *TINY[part]).values())


# The bytes are laws, not speeds.
@pytest.mark.long
def test_of_four_nodes_with_peers_one_reads_each_byte_from_the_origin(tmp_path):
    found = run(tmp_path, "nodes", *TINY["nodes"])
    assert found["origin bytes / data, with peers"] == 1
    assert found["origin bytes / data, each from the origin"] == 4


@pytest.mark.long
def test_a_second_epoch_needs_no_origin_where_all_fits(tmp_path):
    cold = run(tmp_path, "cold", *TINY["cold"])
    assert [value for name, value in cold.items() if "second epoch" in name and "origin bytes" in name] == [0]
    reuse = run(tmp_path, "reuse", *TINY["reuse"])
    assert reuse["100% fit: hits, epoch 2"] == 1
    assert reuse["25% fit: hits, epoch 3"] < reuse["75% fit: hits, epoch 3"] < 1
