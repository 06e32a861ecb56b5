"""The training program with `--elastic`: a rank is killed at a random step, and nothing of the training differs."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import datasvc
from datasvc.models import describe_model
from datasvc.repository import Repository
from datasvc.runs import list_runs, read_run
from datasvc.shards import ingest
from tests.distributed.elastic_jobs import SAME_SIZE, TWO_HOSTS
from tests.support import warm_python

ROOT = Path(__file__).parents[2]
NUM_STEPS = 28  # 14 steps of 96 in each of two epochs
JOB_TIMEOUT_S = 240.0

# The training program, but for the loss, which is here the mean over the ranks, and for a worker that kills itself
# where it is told to: in the backward pass of a step, or while the last checkpoint is written.
PROGRAM = """
import json, os, signal
import datasvc.trainer as hvd
from datasvc.models.saving.writer import VersionWriter
from datasvc.trainer.recipes import train as training

worker, point, count = json.loads(os.environ["KILLED"])
is_victim = os.environ.get("TRAINER_ELASTIC_WORKER", "localhost:0:0").rpartition(":")[2] == worker

def die():
    os.kill(os.getpid(), signal.SIGKILL)

real_update = training.update
def update(run, batch, mark):
    if run.config.parse_compression().has_memory:
        memory = run.optimizer.state_dict()["compression"]["memory"]
        norms = [float(values["residual"].norm()) for _, values in sorted(memory.items()) if "residual" in values]
        run.events.report("residuals", rank=hvd.rank(), size=hvd.size(), step=run.step, norms=norms)
    if is_victim and point == "step" and run.step == count:
        run.optimizer.param_groups[0]["params"][0].register_hook(lambda gradient: die())
    return hvd.allreduce(real_update(run, batch, mark), name="test.loss")
training.update = update

real_write = VersionWriter.write
def write(self, task):
    if is_victim and point == "last save" and task.metadata.step == count:
        die()
    return real_write(self, task)
VersionWriter.write = write

from datasvc.trainer.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("recipe") / "repo"))
    ingest(repository, str(digits_folder), "digits", shard_bytes=256 << 10)
    return repository


def run(repository, name, *words, options=(), killed=("", "", 0), num_ranks=2, hosts=TWO_HOSTS):
    """Run the program; returns its exit status, events and standard error."""
    # fmt: off
    command = [
        sys.executable, "-m", "datasvc.trainer.launch", "-np", str(num_ranks), *hosts, *options, "--no-prefix",
        warm_python.command(), "-c", PROGRAM,
        "--data", "digits@1", "--repo", repository.url, "--name", name, "--size", "32", "--resize", "32",
        "--scale", "0.8", "1", "--epochs", "2", "--global-batch", "96", "--checkpoint-every", "4",
        "--optimizer", "lamb", "--learning-rate", "0.002", "--ema-decay", "0.9", "--evaluate-every", "1",
        "--patience", "5", *words,
    ]
    # fmt: on
    environment = {**os.environ, "KILLED": json.dumps(killed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
        timeout=JOB_TIMEOUT_S,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, events, done.stderr


def losses(events):
    """The losses by step; of a step that was repeated, the last one."""
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def evaluations(events):
    return {event["step"]: event["ema_val_loss"] for event in events if event["event"] == "evaluation"}


def weights(repository, ref):
    return datasvc.open(repository.url).models.restore(ref).state["model"]


def audit(folder):
    done = subprocess.run(
        [sys.executable, "-m", "datasvc.cli.main", "audit", str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def undisturbed(repository):
    status, events, errors = run(repository, "undisturbed")
    assert status == 0, errors
    found = list_runs(repository, "undisturbed")[0]
    (compared, *_) = [event for event in read_run(repository, found.name, found.id).events if event.event == "ranks"]
    assert compared.facts["rank"] == [0, 1]
    assert all(own_s > 0 for own_s in compared.facts["own_s"])
    return events


def check_undisturbed(repository, name, events, undisturbed, victim="1"):
    found, expected = losses(events), losses(undisturbed)
    assert sorted(found) == list(range(1, NUM_STEPS + 1))
    assert found == pytest.approx(expected, rel=1e-4)
    assert evaluations(events) == pytest.approx(evaluations(undisturbed), rel=1e-3)
    newest = describe_model(repository, name)
    assert newest.entry["step"] == NUM_STEPS
    (use,) = newest.entry["data"]
    assert use["spans"][0]["start"] == [0, 0]
    assert use["spans"][-1]["stop"] == [2, 0]
    run = list_runs(repository, name)[0]
    history = read_run(repository, name, run.id)
    assert (run.state, newest.entry["run"]) == ("finished", run.ref)
    steps = history.series["loss"].steps.tolist()
    if victim == "0":  # it writes the log, and the last second before its end is lost
        assert steps == sorted(set(steps))
        assert (steps[-1], set(steps) - set(range(1, NUM_STEPS + 1))) == (NUM_STEPS, set())
    else:
        assert steps == list(range(1, NUM_STEPS + 1))
    assert not history.problems


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_continues_without_a_rank_that_is_killed(repository, undisturbed, tmp_path, seed):
    draw = random.Random(seed)
    victim, step = str(draw.randrange(2)), draw.randrange(1, NUM_STEPS)
    name, ledger = f"shrunk-{seed}", tmp_path / "ledger"
    status, events, errors = run(
        repository,
        name,
        "--elastic",
        "--commit-every",
        "3",
        "--ledger",
        str(ledger),
        options=("--min-num-proc", "1"),
        killed=(victim, "step", step),
    )
    assert status == 0, errors
    sizes = [event["size"] for event in events if event["event"] == "round"]
    assert sizes == [2, 2, 1], f"worker {victim} at step {step}"
    check_undisturbed(repository, name, events, undisturbed, victim)
    assert audit(ledger)[0] == 0, audit(ledger)[1]


@pytest.mark.slow
def test_a_rank_that_replaces_another_gets_the_state_from_memory_and_nothing_differs(
    repository, undisturbed, tmp_path
):
    status, events, errors = run(
        repository,
        "replaced",
        "--elastic",
        "--commit-every",
        "3",
        "--ledger",
        str(tmp_path / "ledger"),
        options=SAME_SIZE,
        killed=("0", "step", 17),
    )
    assert status == 0, errors
    rounds = [(event["size"], event["step"]) for event in events if event["event"] == "round"]
    assert rounds == [(2, 0), (2, 0), (2, 17), (2, 17)]
    assert losses(events) == losses(undisturbed)
    # The random states of the lost rank are not those of the one that replaces it; nothing here draws from them.
    found, expected = (weights(repository, name) for name in ("replaced", "undisturbed"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert audit(tmp_path / "ledger")[0] == 0


@pytest.mark.slow
def test_a_rank_that_is_killed_while_the_last_checkpoint_is_written_loses_nothing(repository, undisturbed):
    status, events, errors = run(
        repository,
        "ended",
        "--elastic",
        "--commit-every",
        "3",
        options=("--min-num-proc", "1"),
        killed=("1", "last save", NUM_STEPS),
    )
    assert status == 0, errors
    check_undisturbed(repository, "ended", events, undisturbed)
    assert events[-1]["event"] == "end"


@pytest.mark.slow
def test_the_remaining_ranks_keep_what_their_compression_has_not_sent(repository):
    status, events, errors = run(
        repository,
        "compressed",
        *("--elastic", "--commit-every", "3", "--compression", "topk:0.1", "--max-steps", "5"),
        options=("--min-num-proc", "2"),
        killed=("0", "step", 4),
        num_ranks=3,
        hosts=("-H", "localhost:3"),
    )
    assert status == 0, errors
    residuals = {
        (event["size"], event["rank"]): event["norms"]
        for event in events
        if event["event"] == "residuals" and event["step"] == 3
    }
    assert len(residuals) == 5
    # The residuals of rank 0 are lost with it. Ranks 1 and 2 become ranks 0 and 1.
    assert [residuals[2, rank] for rank in range(2)] == [residuals[3, rank] for rank in (1, 2)]
    assert residuals[3, 1] != residuals[3, 2]
