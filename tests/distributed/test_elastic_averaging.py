"""`--elastic --sync`: what a lost rank has learned since a round is dropped, and the others train on its samples."""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
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

# The training program, but for a worker that kills itself in the backward pass of the step after `KILLED_AFTER`, once
# the others have made it, and one that has an error as of a lost rank when the round after the step `FAILS_IN` is
# over for the others. Each writes the positions of which it has made a step to a file of its own in `STEPS`.
PROGRAM = """
import json, os, pathlib, signal, time
import datasvc.trainer as hvd
from datasvc.trainer.optim import averaging
from datasvc.trainer.recipes import train as training

worker = os.environ.get("TRAINER_ELASTIC_WORKER", "localhost:0:0")
steps = pathlib.Path(os.environ["STEPS"]) / f"{worker}.{os.getpid()}"
running = {}
def die(step):
    # The others have made as many steps and this one.
    def others():
        return [each for each in steps.parent.iterdir() if each != steps]
    while len(others()) < hvd.size() - 1 or any(each.read_text().count("\\n") <= step for each in others()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
real_update, real_mean = training.update, averaging._AveragingOptimizer._replace_by_mean
def update(run, batch, mark):
    if worker.endswith(":1") and run.step == int(os.environ["KILLED_AFTER"]):
        weight = run.optimizer.param_groups[0]["params"][0]
        weight.register_hook(lambda gradient: die(run.step))
    running["line"] = json.dumps([batch.epoch, batch.positions.tolist(), run.step])
    loss = real_update(run, batch, mark)
    write()
    return loss
def write():
    if line := running.pop("line", None):
        with steps.open("a") as file:
            file.write(line + "\\n")
def replace_by_mean(self, tensors, process_set, **options):
    write()  # the step is made, whatever becomes of the round
    before = [tensor.clone() for tensor in tensors]
    real_mean(self, tensors, process_set, **options)
    if worker.endswith(":2") and self.num_steps == int(os.environ["FAILS_IN"]):
        for tensor, value in zip(tensors, before):
            tensor.copy_(value)
        raise hvd.HorovodInternalError("a rank was lost")
real_send = averaging.OuterOptimizer._send
def send(self, step):
    write()
    real_send(self, step)
averaging.OuterOptimizer._send = send
training.update, averaging._AveragingOptimizer._replace_by_mean = update, replace_by_mean

from datasvc.trainer.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("averaged") / "repo"))
    ingest(repository, str(digits_folder), "digits", shard_bytes=256 << 10)
    return repository


def run(repository, name, *words, ranks, options=(), killed_after=-1, fails_in=-1, steps=None):
    """Run the program without momentum; returns its events."""
    steps = steps or Path(tempfile.mkdtemp(dir=Path(repository.url).parent))
    # fmt: off
    command = [
        sys.executable, "-m", "datasvc.trainer.launch", "-np", str(ranks), *options, "--no-prefix",
        warm_python.command(), "-c", PROGRAM, "--data", "digits@1", "--repo", repository.url, "--name", name,
        "--size", "32", "--resize", "32", "--scale", "0.8", "1", "--flip", "0", "--epochs", "2",
        "--global-batch", "96", "--momentum", "0", "--checkpoint-every", "1000", "--report-every", "4", *words,
    ]
    # fmt: on
    environment = {**os.environ, "KILLED_AFTER": str(killed_after), "FAILS_IN": str(fails_in), "STEPS": str(steps)}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def rounds(events):
    return [(event["size"], event["step"]) for event in events if event["event"] == "round"]


def weights(repository, ref):
    """The trainable weights of a version: the statistics of batch normalisation are of rank 0, or of all."""
    model = datasvc.open(repository.url).models.restore(ref).state["model"]
    return {name: value for name, value in model.items() if "running" not in name and "num_batches" not in name}


def test_without_a_lost_rank_the_others_have_the_bits_of_a_job_that_continues_the_last_round(repository, tmp_path):
    """Rank 1 of three is killed in step 11. With a delay the others go on from step 8, the end of the last round."""
    sync, name = "diloco:4:delay=2", "delayed"
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


def check_trained_once(folder, lost="none", kept=0):
    """Each sample that is not dropped was in one step, but for those of a lost worker after step `kept`."""
    lines = [
        (path.name.partition(".")[0], *json.loads(line))
        for path in folder.iterdir()
        for line in path.read_text().splitlines()
    ]
    counts = Counter(
        (epoch, position)
        for worker, epoch, positions, step in lines
        if not (worker.endswith(lost) and step >= kept)
        for position in positions
    )
    assert counts == Counter({(epoch, position): 1 for epoch in range(2) for position in range(14 * 96)})


@pytest.mark.parametrize(
    ("sync", "ranks", "killed_after", "start", "kept"),
    [("local:4", 3, 10, 8, 6 * 32), ("diloco:7", 3, 13, 7, 14 * 32), ("postlocal:3:5", 2, 5, 3, 3 * 48)],
)
def test_the_others_keep_their_steps_of_a_round_and_train_on_what_is_left_of_it(
    repository, tmp_path, sync, ranks, killed_after, start, kept
):
    """Rank 1 is killed in a round, in its third or last step, which the others have made: `kept` samples or more."""
    (tmp_path / "steps").mkdir()
    events = run(
        repository,
        f"kept-{killed_after}",
        *("--sync", sync, "--elastic", "--commit-every", "1000", "--ledger", str(tmp_path / "ledger")),
        ranks=ranks,
        options=("-H", f"localhost:{ranks}", "--min-num-proc", "1"),
        killed_after=killed_after,
        steps=tmp_path / "steps",
    )
    assert rounds(events) == [(ranks, 0)] * ranks + [(ranks - 1, start)] * (ranks - 1)
    found = {event.get("kept_samples") for event in events if event["event"] == "round"} - {None}
    assert len(found) == 1
    assert found <= set(range(kept, 96 * 7, 96 // ranks))
    check_trained_once(tmp_path / "steps", lost=":1", kept=start)
    assert audit(tmp_path / "ledger")[0] == 0, audit(tmp_path / "ledger")[1]
    entry = describe_model(repository, f"kept-{killed_after}").entry
    (use,) = entry["data"]
    assert (entry["step"], use["spans"][-1]["stop"]) == (NUM_STEPS, [2, 0])
    assert entry["metrics"]["val_accuracy"] > 0.5


@pytest.mark.parametrize(
    ("leases", "size", "options"),
    [
        ("equal", 2, ("-H", "localhost:3", "--min-num-proc", "2")),
        ("measured", 3, ("-H", "localhost:1,127.0.0.1:2", "--min-num-proc", "3", *SAME_SIZE[2:])),
    ],
)
def test_leases_of_a_lost_replica_are_served_again(repository, tmp_path, leases, size, options):
    """The others go back to the end of the round before, whose shares go on if the replica comes back."""
    (tmp_path / "steps").mkdir()
    events = run(
        repository,
        f"leased-{leases}",
        *("--sync", "local:4", "--leases", leases, "--elastic", "--commit-every", "3"),
        *("--ledger", str(tmp_path / "ledger")),
        ranks=3,
        options=options,
        killed_after=10,
        steps=tmp_path / "steps",
    )
    assert rounds(events)[:3] == [(3, 0)] * 3
    assert rounds(events)[3:] == [(size, 8)] * size
    assert audit(tmp_path / "ledger")[0] == 0, audit(tmp_path / "ledger")[1]
    entry = describe_model(repository, f"leased-{leases}").entry
    (use,) = entry["data"]
    assert use["spans"][-1]["stop"] == [2, 0]
    assert entry["metrics"]["val_accuracy"] > 0.5


def test_a_rank_that_missed_the_end_of_a_round_takes_the_weights_of_one_that_did_not(repository, tmp_path):
    (tmp_path / "steps").mkdir()
    events = run(
        repository,
        "missed",
        *("--sync", "local:4", "--elastic", "--commit-every", "1000", "--ledger", str(tmp_path / "ledger")),
        ranks=3,
        options=("-H", "localhost:3", "--min-num-proc", "2"),
        fails_in=8,
        steps=tmp_path / "steps",
    )
    assert rounds(events) == [(3, 0)] * 3 + [(3, 8)] * 3
    assert audit(tmp_path / "ledger")[0] == 0, audit(tmp_path / "ledger")[1]
    check_trained_once(tmp_path / "steps")


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
