"""`--elastic --layout`: a lost rank takes its replica out, and whole replicas continue with parts of the others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import datasvc
from tests.distributed.elastic_jobs import ListedHosts
from tests.distributed.test_layout_resumes import url
from tests.distributed.test_recipe_elastic import audit
from tests.support import warm_python

__all__ = ["url"]

ROOT = Path(__file__).parents[2]
STEPS_PER_EPOCH = 8  # of 12 of the 96 blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# The training program, but for workers that kill or stop themselves after the forward pass of a step, all those of
# one step together, once the first replica has come to that step. If `hosts` names a file, the job of fewer ranks
# adds a host, and waits for its worker in a step.
PROGRAM = """
import json, os, pathlib, signal, time
import datasvc.trainer as hvd
from datasvc.trainer.optim import averaging
from datasvc.trainer.recipes import train as training
from datasvc.trainer.rendezvous.rendezvous import current_rendezvous

SCENARIO = json.loads(os.environ["SCENARIO"])
folder = pathlib.Path(SCENARIO["folder"])
number = int(os.environ.get("TRAINER_ELASTIC_WORKER", "localhost:0:0").rpartition(":")[2])

def wait_until(function):
    while not function():
        time.sleep(0.01)

def die(victims, step):
    (folder / f"{step}-{number}").touch()
    names = ["first-0", "first-1", *victims]
    wait_until(lambda: all((folder / f"{step}-{name}").exists() for name in names))
    os.kill(os.getpid(), getattr(signal, SCENARIO["signal"]))

real_update = training.update
def update(run, batch, mark):
    for step, victims, *size in SCENARIO["kills"]:
        if run.step != step or size not in ([], [hvd.size()]):
            continue
        (folder / f"{step}-first-{number}").touch()
        if number in victims:
            run.model.register_forward_hook(lambda *_, known=(victims, step): die(*known))
    if [run.step, hvd.size()] == SCENARIO["returns"]:
        if hvd.rank() == 0:
            (folder / "new").write_text("localhost:6\\n127.0.0.1:1\\n")
            (folder / "new").replace(folder / "hosts")
        rendezvous = current_rendezvous()
        wait_until(lambda: rendezvous._notice.number > rendezvous.assignment.notice)
    return real_update(run, batch, mark)
training.update = update

real_mean = averaging._AveragingOptimizer._replace_by_mean
def replace_by_mean(self, *words, **options):
    step, victim, others = SCENARIO["half"] or [None, None, []]
    if [self.num_steps, number] == [step, victim]:
        wait_until(lambda: all((folder / f"averaged-{other}").exists() for other in others))
        os.kill(os.getpid(), signal.SIGKILL)
    real_mean(self, *words, **options)
    if self.num_steps == step:
        (folder / f"averaged-{number}").touch()
averaging._AveragingOptimizer._replace_by_mean = replace_by_mean

from datasvc.trainer.__main__ import main
main()
"""


class Jobs:
    def __init__(self, url, folder):
        self.url, self.folder = url, folder

    def run(self, name, layout, *words, ranks, options=(), kills=(), returns=None, half=None, number="SIGKILL"):
        """Run the program; return its events, of all ranks.

        `half`: step, a worker that kills itself in the averaging after it, and others that have ended it before.
        """
        # fmt: off
        command = [
            sys.executable, "-m", "datasvc.trainer.launch", "-np", str(ranks), *options, "--no-prefix",
            warm_python.command(), "-c", PROGRAM, "--data", "tokens@1", "--repo", self.url, "--name", name,
            "--model", "gpt", "--model-option", "layers=2", "heads=4", "width=32", "dropout=0.0", "context=8",
            "--vocabulary", "29", "--global-batch", "12", "--optimizer", "sgd", "--momentum", "0",
            "--learning-rate", "0.1", "--schedule", "constant", "--warmup-epochs", "0", "--checkpoint-every", "1000",
            "--report-every", "1", "--lost-after", "120", "--layout", layout, *words,
        ]
        # fmt: on
        scenario = {"folder": str(self.folder), "kills": kills, "returns": returns, "half": half, "signal": number}
        environment = {
            **os.environ,
            "SCENARIO": json.dumps(scenario),
            "OMP_NUM_THREADS": "1",
            "HVD_DISCOVERY_INTERVAL": "0.1",
        }
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        self.errors = done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def weights(self, ref):
        return datasvc.open(self.url).models.restore(ref).state["model"]


@pytest.fixture
def jobs(url, tmp_path):
    return Jobs(url, tmp_path)


def rounds(events):
    """Size and step of each round, as rank 0 reports them."""
    return [(each["size"], each["step"]) for each in events if each["event"] == "round" and each["rank"] == 0]


def losses(events):
    return {each["step"]: each["loss"] for each in events if each["event"] == "step"}


def check_audit(folder):
    status, report = audit(folder)
    assert status == 0, report


def test_two_replicas_are_lost_and_one_comes_back_and_each_sample_is_consumed_once(jobs, tmp_path):
    hosts = ListedHosts(tmp_path, "localhost:6")
    words = ("--sync", "diloco:4", "--epochs", "8", "--optimizer", "adamw", "--learning-rate", "0.003")
    undisturbed = jobs.run("undisturbed", "replica=3,shard=2", *words, ranks=6)
    events = jobs.run(
        "changing",
        "replica=3,shard=2",
        *(*words, "--elastic", "--commit-every", "1", "--ledger", str(tmp_path / "ledger")),
        ranks=6,
        options=(*hosts.options, "--min-num-proc", "2"),
        kills=[(10, [2]), (29, [5])],
        returns=[17, 4],
    )
    assert rounds(events) == [(6, 0), (4, 8), (6, 20), (4, 28)]
    check_audit(tmp_path / "ledger")
    assert [
        each["kept_samples"]
        for each in events
        if each["event"] == "round" and each["rank"] == 0 and each["size"] == 4
    ] == [16, 8]
    found, expected = losses(events), losses(undisturbed)
    # Of a round in which a replica is lost, the steps before and the last one are reported, each once.
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == [step for step in range(1, 8 * STEPS_PER_EPOCH + 1) if step not in (11, 30, 31)]
    assert all(loss < 4.0 for loss in found.values())
    assert [found[step] for step in (12, 16, 20, 28)] == pytest.approx(
        [expected[step] for step in (12, 16, 20, 28)], rel=0.2
    )
    assert found[64] < 0.02


def test_ranks_that_make_each_step_together_train_as_those_of_the_axis_data(jobs):
    jobs.run("data", "data=3,shard=2", "--epochs", "1", ranks=6)
    jobs.run("replicas", "replica=3,shard=2", "--epochs", "1", "--elastic", ranks=6, options=("--min-num-proc", "2"))
    found, expected = jobs.weights("replicas"), jobs.weights("data")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)


def test_a_replica_that_is_lost_while_the_others_train_on_the_rest_of_a_round_leaves_a_smaller_rest(jobs, tmp_path):
    """The second replica is lost after two of the four steps of a round, the third in the second step of its rest.

    Their other ranks then make a new replica, which takes over the weights of the first.
    """
    events = jobs.run(
        "twice",
        "replica=3,shard=2",
        *("--sync", "diloco:4", "--epochs", "2", "--elastic", "--ledger", str(tmp_path / "ledger")),
        ranks=6,
        options=("--min-num-proc", "2"),
        kills=[(10, [2]), (9, [5], 4)],
    )
    # Of 48 samples two replicas keep two steps of 4, and then the first its own and up to three steps of the rest.
    first, second, third = [each for each in events if each["event"] == "round" and each["rank"] == 0]
    assert [(each["size"], each["step"]) for each in (first, second, third)] == [(6, 0), (4, 8), (4, 8)]
    assert (second["kept_samples"], third["kept_samples"] in (14, 20, 26)) == (16, True)
    assert max(losses(events)) == 2 * STEPS_PER_EPOCH
    check_audit(tmp_path / "ledger")


@pytest.mark.parametrize(
    ("kills", "half", "expected"),
    [
        ([], (12, 5, (0, 2, 4)), [(6, 0, None), (4, 8, None)]),
        ([(10, [2])], (12, 5, (0, 4)), [(6, 0, None), (4, 8, 16), (4, 8, 8)]),
    ],
    ids=["round", "rest"],
)
def test_if_only_one_part_of_the_model_is_averaged_the_round_or_its_rest_begins_again(
    jobs, tmp_path, kills, half, expected
):
    """The second part has lost a rank. Of a rest, the replica that is still whole has applied two steps of 4."""
    events = jobs.run(
        f"half-{len(kills)}",
        "replica=3,shard=2",
        *("--sync", "local:4", "--epochs", "2", "--elastic", "--commit-every", "1"),
        *("--ledger", str(tmp_path / "ledger")),
        ranks=6,
        options=("--min-num-proc", "2"),
        kills=kills,
        half=half,
    )
    found = [each for each in events if each["event"] == "round" and each["rank"] == 0]
    assert [(each["size"], each["step"], each.get("kept_samples")) for each in found] == expected
    assert max(losses(events)) == 2 * STEPS_PER_EPOCH
    check_audit(tmp_path / "ledger")


def test_a_round_in_which_an_epoch_ends_is_begun_again_with_the_bits_of_a_job_that_continues_it(jobs):
    """A rank of the second replica is killed in step 8, the last of an epoch. The others go on from step 6."""
    words = ("--sync", "local:3", "--epochs", "2")
    events = jobs.run(
        "elastic",
        "replica=3,shard=2",
        *(*words, "--elastic", "--commit-every", "1"),
        ranks=6,
        options=("--min-num-proc", "4"),
        kills=[(7, [3])],
    )
    assert rounds(events) == [(6, 0), (4, 6)]
    assert "4 ranks train, and 1 other waits for more ranks: a replica of the model needs 2" in jobs.errors
    jobs.run("begun", "replica=3,shard=2", *words, "--max-steps", "6", ranks=6)
    jobs.run("begun", "replica=2,shard=2", *words, ranks=4)
    found, expected = jobs.weights("elastic"), jobs.weights("begun")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_part_that_no_rank_has_any_more_is_taken_from_the_newest_version(jobs, tmp_path):
    events = jobs.run(
        "restored",
        "replica=2,shard=2",
        *("--epochs", "2", "--elastic", "--commit-every", "2", "--checkpoint-every", "4", "--resume", "never"),
        *("--ledger", str(tmp_path / "ledger")),
        ranks=4,
        options=("--min-num-proc", "2"),
        kills=[(7, [1, 3])],
    )
    assert rounds(events) == [(4, 0), (2, 4)]
    (lost,) = [each for each in events if each["event"] == "state_lost"]
    assert (lost["parts"], lost["step"], lost["version"]) == ([1], 4, "restored@1")
    check_audit(tmp_path / "ledger")
    assert datasvc.open(jobs.url).models.restore("restored").entry["step"] == 2 * STEPS_PER_EPOCH


def test_a_pipeline_without_one_of_its_stages_is_taken_out(jobs, tmp_path):
    words = ("--epochs", "2", "--micro-batch", "2")
    jobs.run("stages", "data=3,pipeline=2", *words, ranks=6)
    events = jobs.run(
        "elastic-stages",
        "data=3,pipeline=2",
        *(*words, "--elastic", "--commit-every", "1000", "--ledger", str(tmp_path / "ledger")),
        ranks=6,
        options=("--min-num-proc", "4"),
        kills=[(10, [3])],
    )
    assert rounds(events) == [(6, 0), (4, 10)]
    check_audit(tmp_path / "ledger")
    found, expected = jobs.weights("elastic-stages"), jobs.weights("stages")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)


def test_replicas_that_make_each_step_together_go_on_after_the_last_one_with_the_bits_of_a_job_that_stopped_there(
    jobs, tmp_path
):
    """A rank is stopped: only the end of its connections lets the others leave their collectives."""
    words = ("--epochs", "2", "--optimizer", "adamw", "--learning-rate", "0.003", "--ema-decay", "0.9")
    events = jobs.run(
        "stepped",
        "replica=3,shard=2",
        *(*words, "--elastic", "--lost-after", "6", "--commit-every", "1000", "--ledger", str(tmp_path / "ledger")),
        ranks=6,
        options=("--min-num-proc", "4"),
        kills=[(11, [3])],
        number="SIGSTOP",
    )
    assert rounds(events) == [(6, 0), (4, 11)]
    assert "rank 3, worker localhost:3:3 gave no sign of life and is terminated" in jobs.errors
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    check_audit(tmp_path / "ledger")
    jobs.run("stopped", "data=3,shard=2", *words, "--max-steps", "11", ranks=6)
    jobs.run("stopped", "data=2,shard=2", *words, ranks=4)
    found, expected = jobs.weights("stepped"), jobs.weights("stopped")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
