"""`--elastic --sync`: what a lost rank has learned since a round is dropped, and its samples are served again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import datasvc
from datasvc.models import describe_model
from datasvc.repository import Repository
from datasvc.shards import ingest
from tests.distributed.elastic_jobs import SAME_SIZE, TWO_HOSTS
from tests.distributed.test_recipe_elastic import audit
from tests.support import warm_python

ROOT = Path(__file__).parents[2]
NUM_STEPS = 28  # 14 steps of 96 in each of two epochs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# The training program, but for a worker that kills itself in the backward pass of the step after `KILLED_AFTER`.
PROGRAM = """
import os, signal
from datasvc.trainer.recipes import train as training

is_victim = os.environ.get("TRAINER_ELASTIC_WORKER", "localhost:0:0").endswith(":1")
real_update = training.update
def update(run, batch, mark):
    if is_victim and run.step == int(os.environ["KILLED_AFTER"]):
        weight = run.optimizer.param_groups[0]["params"][0]
        weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    return real_update(run, batch, mark)
training.update = update

from datasvc.trainer.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("averaged") / "repo"))
    ingest(repository, str(digits_folder), "digits", shard_bytes=256 << 10)
    return repository


def run(repository, name, *words, ranks, options=(), killed_after=-1):
    """Run the program without momentum; returns its events."""
    # fmt: off
    command = [
        sys.executable, "-m", "datasvc.trainer.launch", "-np", str(ranks), *options, "--no-prefix",
        warm_python.command(), "-c", PROGRAM, "--data", "digits@1", "--repo", repository.url, "--name", name,
        "--size", "32", "--resize", "32", "--scale", "0.8", "1", "--flip", "0", "--epochs", "2",
        "--global-batch", "96", "--momentum", "0", "--checkpoint-every", "1000", "--report-every", "4", *words,
    ]
    # fmt: on
    environment = {**os.environ, "KILLED_AFTER": str(killed_after), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def rounds(events):
    return [(event["size"], event["step"]) for event in events if event["event"] == "round"]


def weights(repository, ref):
    """The trainable weights of a version: the statistics of batch normalisation are of rank 0, or of all."""
    model = datasvc.open(repository.url).models.restore(ref).state["model"]
    return {name: value for name, value in model.items() if "running" not in name and "num_batches" not in name}


@pytest.mark.parametrize("sync", ["local:4", "diloco:4:delay=2"])
def test_without_a_lost_rank_the_others_have_the_bits_of_a_job_that_continues_the_last_round(
    repository, tmp_path, sync
):
    """Rank 1 of three is killed in step 11. The other two go on from step 8, the end of the last round."""
    name = sync.replace(":", "-").replace("=", "")
    ledger = ("--ledger", str(tmp_path / "ledger"))
    events = run(
        repository,
        f"{name}-elastic",
        *("--sync", sync, "--elastic", "--commit-every", "1", *ledger),
        ranks=3,
        options=("-H", "localhost:3", "--min-num-proc", "2"),
        killed_after=10,
    )
    assert rounds(events) == [(3, 0)] * 3 + [(2, 8)] * 2
    assert audit(tmp_path / "ledger")[0] == 0, audit(tmp_path / "ledger")[1]
    (use,) = describe_model(repository, f"{name}-elastic").entry["data"]
    assert [(span["start"], span["stop"]) for span in use["spans"]][-1][1] == [2, 0]

    run(repository, f"{name}-begun", "--sync", sync, "--max-steps", "8", ranks=3)
    run(repository, f"{name}-begun", "--sync", sync, ranks=2)
    found, expected = (weights(repository, f"{name}-{end}") for end in ("elastic", "begun"))
    assert describe_model(repository, f"{name}-elastic").entry["step"] == NUM_STEPS
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_rank_that_comes_back_joins_at_the_end_of_a_round(repository, tmp_path):
    events = run(
        repository,
        "replaced",
        *("--sync", "diloco:4", "--elastic", "--commit-every", "1", "--ledger", str(tmp_path / "ledger")),
        ranks=2,
        options=(*TWO_HOSTS, *SAME_SIZE),
        killed_after=10,
    )
    assert rounds(events) == [(2, 0), (2, 0), (2, 8), (2, 8)]
    assert audit(tmp_path / "ledger")[0] == 0, audit(tmp_path / "ledger")[1]
    entry = describe_model(repository, "replaced").entry
    assert (entry["step"], entry["execution"]["sync"]) == (NUM_STEPS, "diloco:4")
    assert entry["metrics"]["val_accuracy"] > 0.5
