"""`--elastic`: when a rank is lost, the others continue after the last whole step, and repeat none."""

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
from tests.distributed.test_recipe_elastic import audit
from tests.support import warm_python

ROOT = Path(__file__).parents[2]
NUM_STEPS = 28  # 14 steps of 96 in each of two epochs
STEP = 17  # the last one of three ranks
JOB_TIMEOUT_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# The training program, whose workers report each update that they have made. Worker 1 kills or stops itself in the
# backward pass of a step, or kills itself after its update and that of worker 2. Worker 0 then loses the connection
# between its last collective of this step and its update.
PROGRAM = """
import json, os, pathlib, signal, time
import datasvc.trainer as hvd
from datasvc.trainer.recipes import train as training

scenario = json.loads(os.environ["SCENARIO"])
made, dying = (pathlib.Path(scenario["folder"], name) for name in ("made", "dying"))
number = int(os.environ.get("TRAINER_ELASTIC_WORKER", "localhost:0:0").rpartition(":")[2])
real_update = training.update

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

def update(run, batch, mark):
    if number == 1 and run.step == scenario.get("backward"):
        weight = run.optimizer.param_groups[0]["params"][0]
        sent = getattr(signal, scenario.get("signal", "SIGKILL"))
        weight.register_hook(lambda gradient: os.kill(os.getpid(), sent))
    if number == 0 and run.step == scenario.get("cut") and not dying.exists():
        real_synchronize = run.optimizer.synchronize
        def synchronize():
            real_synchronize()
            wait_for(dying)
            raise hvd.HorovodInternalError("the connection was cut")
        run.optimizer.synchronize = synchronize
    loss = real_update(run, batch, mark)
    run.events.report("updated", worker=number, step=run.step + 1)
    if number == 2 and run.step == scenario.get("cut"):
        made.touch()
    if number == 1 and run.step == scenario.get("cut"):
        wait_for(made)
        dying.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return loss
training.update = update

from datasvc.trainer.__main__ import main
main()
"""


class Jobs:
    def __init__(self, url, folder):
        self.url, self.folder = url, folder

    def run(self, name, *words, ranks, options=(), **scenario):
        """Run the program; return its events, of all ranks."""
        # fmt: off
        command = [
            sys.executable, "-m", "datasvc.trainer.launch", "-np", str(ranks), *options, "--no-prefix",
            warm_python.command(), "-c", PROGRAM, "--data", "digits@1", "--repo", self.url, "--name", name,
            "--size", "32", "--resize", "32", "--scale", "0.8", "1", "--epochs", "2", "--global-batch", "96",
            "--optimizer", "adamw", "--learning-rate", "0.003", "--ema-decay", "0.9",
            "--report-every", "4", *words,
        ]
        # fmt: on
        scenario |= {"folder": str(self.folder)}
        environment = {**os.environ, "SCENARIO": json.dumps(scenario), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=JOB_TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def trained(self, name):
        """What training has changed of the last version; the statistics of batch normalisation are of rank 0."""
        state = datasvc.open(self.url).models.restore(name).state
        tensors = {**state["model"], **{f"ema {key}": value for key, value in state["ema"]["averages"].items()}}
        for number, moments in state["optimizer"]["state"].items():
            tensors |= {f"{number} {key}": value for key, value in moments.items()}
        return {name: value for name, value in tensors.items() if "running" not in name and "num_batches" not in name}


@pytest.fixture(scope="module")
def url(digits_folder, tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("step_ends") / "repo"))
    ingest(repository, str(digits_folder), "digits", shard_bytes=256 << 10)
    return repository.url


@pytest.fixture(scope="module")
def expected(url, tmp_path_factory):
    """A job of three ranks that stops after the step, and is continued by two."""
    jobs = Jobs(url, tmp_path_factory.mktemp("expected"))
    jobs.run("begun", "--max-steps", str(STEP), ranks=3)
    jobs.run("begun", ranks=2)
    return jobs.trained("begun")


# In the second case, workers 1 and 2 have made the last update, and worker 0 has not. In the third one, no connection
# is lost: the others and the launcher would wait for half an hour and for ten minutes.
@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        ("in-backward", {"backward": STEP}),
        ("cut", {"cut": STEP - 1}),
        ("stopped", {"backward": STEP, "signal": "SIGSTOP"}),
    ],
)
def test_the_others_go_on_after_the_last_step_with_the_bits_of_a_job_that_stopped_there(
    url, expected, tmp_path, name, scenario
):
    jobs = Jobs(url, tmp_path)
    options = ("-H", "localhost:3", "--min-num-proc", "2")
    words = (
        "--elastic",
        "--commit-every",
        "1000",
        "--checkpoint-every",
        "1000",
        "--ledger",
        str(tmp_path / "ledger"),
    )
    events = jobs.run(name, *words, ranks=3, options=options, **scenario)
    rounds = [(event["size"], event["step"]) for event in events if event["event"] == "round"]
    assert rounds == [(3, 0)] * 3 + [(2, STEP)] * 2
    updates = {worker: [] for worker in range(3)}
    for event in events:
        if event["event"] == "updated":
            updates[event["worker"]].append(event["step"])
    every = list(range(1, NUM_STEPS + 1))
    assert updates[2] == every
    # Worker 0 has got the weights of this step from worker 2.
    assert updates[0] == [each for each in every if each != 1 + scenario.get("cut", NUM_STEPS)]
    assert updates[1] == list(range(1, STEP + 1))
    status, report = audit(tmp_path / "ledger")
    assert status == 0, report
    entry = describe_model(Repository.open(url), name).entry
    (use,) = entry["data"]
    assert entry["step"] == NUM_STEPS
    assert [(span["step"], span["ranks"]) for span in use["spans"]] == [(0, 3), (STEP, 2)]
    assert use["spans"][0]["stop"] == use["spans"][1]["start"]
    found = jobs.trained(name)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert all(value.isfinite().all() for value in found.values())
