"""The checkpoints of examples/ with Lightning, accelerate and transformers, in processes that are killed.

Skipped where these packages are not installed.
"""

import os
import signal
import subprocess
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch

import datasvc
from datasvc.repository import Repository
from datasvc.shards import ingest
from tests.support import warm_python

ROOT = Path(__file__).parents[2]
NUM_SAMPLES, EPOCHS, STEPS_OF_EPOCH = 96, 4, 12
PARTS = {
    "lightning": ("state_dict", "optimizer_states", "lr_schedulers", "rank_state"),
    "accelerate": ("net", "optimizer", "schedule", "loader", "rank_state"),
    "transformers": ("model", "optimizer", "lr_scheduler", "loader", "rank_state"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def url(digits_folder, tmp_path_factory):
    url = str(tmp_path_factory.mktemp("frameworks") / "repo")
    ingest(Repository.create(url), str(digits_folder), "digits", limit=NUM_SAMPLES)
    return url


@pytest.fixture(params=PARTS)
def framework(request):
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


# Runs a program that sends itself a signal when it logs a line, so that the signal always meets the same step.
RUNNER = """
import logging, os, runpy, sys
program, line, number, *sys.argv[1:] = sys.argv[1:]
handler = logging.Handler()
handler.emit = lambda record: record.getMessage().startswith(line) and os.kill(os.getpid(), int(number))
logging.getLogger("datasvc.integrations").addHandler(handler)
runpy.run_path(program, run_name="__main__")
"""


def run(framework, url, name, every, *, line="never", number=0):
    """Train; send a signal at a line of the log. Return the exit status."""
    program = str(ROOT / f"examples/{framework}_checkpoints.py")
    words = ["--repo", url, "--data", "digits@1", "--name", name, "--epochs", str(EPOCHS), "--every", str(every)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [warm_python.command(), "-c", RUNNER, program, line, str(int(number)), *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in {0, -number, 128 + number}, done.stderr
    return done.returncode


def newest(url, name):
    found = datasvc.open(url).models.restore(name)
    assert found.entry["step"] == EPOCHS * STEPS_OF_EPOCH
    return found


def check_equal(one, other, place=""):
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            check_equal(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            check_equal(left, right, f"{place}.{number}")
    else:
        assert one == other, place


def test_a_killed_and_a_stopped_training_continue_to_the_same_bits(framework, url):
    assert run(framework, url, "whole-" + framework, STEPS_OF_EPOCH) == 0
    whole = newest(url, "whole-" + framework)
    # Killed in the middle of an epoch: at the third save the first is committed, there is room for two that are not.
    assert run(framework, url, framework, 5, line="step 15:", number=signal.SIGKILL) == -signal.SIGKILL
    assert datasvc.open(url).models.restore(framework).entry["step"] in {5, 10, 15}
    # Told to end, it commits the step after: the last of an epoch, where a loader is after its last batch.
    last = 2 * STEPS_OF_EPOCH
    stopped = run(framework, url, framework, last - 1, line=f"step {last - 1}:", number=signal.SIGTERM)
    assert stopped == 128 + signal.SIGTERM
    assert datasvc.open(url).models.restore(framework).entry["step"] == last
    assert run(framework, url, framework, STEPS_OF_EPOCH) == 0

    found = newest(url, framework)
    for part in PARTS[framework]:
        check_equal(found.state[part], whole.state[part], part)
    repo = datasvc.open(url)
    keys = repo.dataset("digits@1")["train"].to_arrow(columns=["key"])["key"].to_pylist()
    uses = repo.models.trained_on([str(found.version)], keys=keys).all_uses()
    assert sorted((use.epoch, use.position) for use in uses) == list(product(range(EPOCHS), range(NUM_SAMPLES)))
