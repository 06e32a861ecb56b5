"""Lightning, accelerate and transformers with DDP on two ranks of gloo, of which one is killed."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import datasvc
from datasvc.testing import small_dataset
from tests.integrations.two_ranks import BATCH, STEPS
from tests.support import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
NUM_SAMPLES, NUM_RANKS = 40, 2


def launch(framework, repo, name, marker, step):
    """Train on two ranks; return the exit status, which is 0 if both came to the end, and what they printed."""
    program = [ROOT / "tests/integrations/two_ranks.py", framework, repo.repository.url, name, marker, step]
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}", "--no-python"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [warm_python.command(), "-m", *launcher, warm_python.command(), *map(str, program)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_a_lost_rank_costs_no_bit_and_no_sample_and_each_rank_has_its_random_state(framework, tmp_path):
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    small_dataset(str(tmp_path / "repo"), "pets", samples=NUM_SAMPLES)
    repo, marker = datasvc.open(str(tmp_path / "repo")), tmp_path / "killed"
    status, printed = launch(framework, repo, "whole", tmp_path / "never", STEPS + 1)
    assert status == 0, printed
    # At the third save the first is committed, there is room for two that are not. Another launch and not torchrun's
    # `--max-restarts`, with which torch 2.13 gives new groups the addresses of the lost ranks.
    status, printed = launch(framework, repo, "killed", marker, 7)
    assert status, printed
    assert marker.exists(), printed
    status, printed = launch(framework, repo, "killed", marker, 7)
    assert status == 0, printed
    whole, found = (repo.models.restore(name) for name in ("whole", "killed"))
    assert found.entry["step"] == whole.entry["step"] == STEPS
    part = {"lightning": "state_dict", "accelerate": "net", "transformers": "model"}[framework]
    assert whole.state[part].keys() == found.state[part].keys()
    for name, tensor in whole.state[part].items():
        assert torch.equal(found.state[part][name], tensor), name
    states = [[state["torch"] for state in version.state["rank_state"]] for version in (whole, found)]
    assert not torch.equal(*states[0])  # each rank has drawn its own numbers
    assert all(map(torch.equal, *states))
    keys = repo.dataset("pets@1")["train"].to_arrow(columns=["key"])["key"].to_pylist()
    uses = repo.models.trained_on([str(found.version)], keys=keys).all_uses()
    served = sorted((use.epoch, use.position) for use in uses)
    per_epoch = NUM_SAMPLES // (NUM_RANKS * BATCH) * NUM_RANKS * BATCH
    expected = [divmod(number, per_epoch) for number in range(STEPS * NUM_RANKS * BATCH)]
    assert served == expected
