"""`trained-on`, `replay` and `forget` over an elastic run that lost a rank, against what its ranks recorded.

Rank 2 of 3 is killed in step 9. The other two fail as in their update, and continue from the copy of step 6. So they
repeat the steps 7 and 8, which version 2 has: no version continues that one.
"""

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

import datasvc
from datasvc.errors import ConfigError
from datasvc.models import describe_model
from datasvc.models.provenance.forgetting import RepeatedSteps
from tests.support import warm_python

ROOT = Path(__file__).parents[2]
KILLED_STEP, COPIED_STEP, MAX_STEPS = 9, 6, 14
JOB_TIMEOUT_S = 500.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Each rank records its part of each step before it trains; worker 2 kills itself in the backward pass of a step.
PROGRAM = """
import json, os, signal, sys
from hashlib import sha256
import datasvc
import datasvc.trainer as hvd
import datasvc.trainer.recipes.train as recipe
from datasvc.models.provenance.forgetting import ForgetPlan

folder, killed_step, job = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
is_victim = os.environ.get("TRAINER_ELASTIC_WORKER", "").endswith(":2")
real = recipe.update

def update(run, batch, mark):
    for handle, _ in run.saves:
        handle.wait()  # which versions a rank has saved when it is lost depends on no time
    step = run.step + 1
    seen = {
        "step": step, "rank": hvd.rank(), "size": hvd.size(), "epoch": batch.epoch, "keys": batch.keys,
        "positions": batch.positions.tolist(), "mask": batch.mask.tolist(),
        "pixels": sha256(batch.images.numpy().tobytes()).hexdigest(),
    }
    with open(f"{folder}/{os.getpid()}", "a") as file:
        file.write(json.dumps(seen) + "\\n")
    if is_victim and step == killed_step:
        parameter = run.optimizer.param_groups[0]["params"][0]
        parameter.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    try:
        return real(run, batch, mark)
    except hvd.HorovodInternalError:
        run.is_updating = True
        raise

recipe.update = update
if "words" in job:
    from datasvc.cli.main import main
    sys.argv[1:] = job["words"]
    main()
else:
    plan = None
    if job["keys"]:  # the samples of the plan, masked from the beginning
        plan = datasvc.open(job["config"]["repo"]).models.plan_forget(job["model"], job["keys"])
        plan = ForgetPlan(plan.model, 1, None, None, 0, 0, (), plan.masked)
    recipe.train(recipe.TrainConfig(**job["config"]), plan)
"""


class Job:
    """Trainings with the data of one repository, and what their ranks saw."""

    def __init__(self, repo, folder):
        self.repo, self.folder = repo, folder

    def run(self, num_ranks, job, *, killed_step=0):
        """Run a job, elastic if a step is given in which a rank is killed; return what its ranks saw."""
        folder = self.folder / f"seen-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        ranks = [sys.executable, "-m", "datasvc.trainer.launch", "-np", str(num_ranks), "--no-prefix"]
        elastic = ["--min-num-proc", "2", "-H", f"localhost:{num_ranks}"] if killed_step else []
        program = [warm_python.command(), "-c", PROGRAM, str(folder), str(killed_step), json.dumps(job)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*ranks, *elastic, *program],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=JOB_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]

    def entry(self, ref):
        return describe_model(self.repo.repository, ref).entry

    def train(self, name, num_ranks, *, keys=(), killed_step=0, **settings):
        config = {"repo": self.repo.repository.url, "name": name, "data": "digits@1", "size": 16, "scale": (0.8, 1.0)}
        config |= {"optimizer": "adamw", "learning_rate": 0.003, "epochs": 2, "max_steps": MAX_STEPS, "elastic": True}
        config |= {"global_batch": 24, "checkpoint_every": 4, "commit_every": 3, "evaluate_every": 9} | settings
        return self.run(num_ranks, {"config": config, "keys": keys, "model": "m@5"}, killed_step=killed_step)

    def forget(self, ref, num_ranks, keys, *, killed_step=0):
        (self.folder / "keys").write_text("\n".join(keys))
        words = ["forget", ref, "--keys", str(self.folder / "keys"), "--repo", self.repo.repository.url, "--yes"]
        return self.run(num_ranks, {"words": words}, killed_step=killed_step)


@pytest.fixture(scope="module")
def job(digits_folder, tmp_path_factory):
    repo = datasvc.open(str(tmp_path_factory.mktemp("elastic") / "repo"), create=True)
    repo.datasets.ingest(str(digits_folder / "val"), "digits", val_fraction=0.1)
    return Job(repo, tmp_path_factory.mktemp("seen"))


@pytest.fixture(scope="module")
def seen(job):
    return job.train("m", 3, killed_step=KILLED_STEP)


def last(seen):
    """Return what went into the weights: of a step that was repeated, the repetition, by the fewer ranks."""
    sizes = {}
    for part in seen:
        sizes[part["step"]] = min(part["size"], sizes.get(part["step"], part["size"]))
    return [part for part in seen if part["size"] == sizes[part["step"]]]


def uses(seen):
    """Return key, epoch, position and step of each sample that a loss counted."""
    return sorted(
        (key, part["epoch"], position, part["step"])
        for part in seen
        for key, position, counts in zip(part["keys"], part["positions"], part["mask"], strict=True)
        if counts
    )


@pytest.fixture(scope="module")
def keys(seen):
    """Return keys that were first used in a range of steps."""
    first = {}
    for key, _, _, step in uses(last(seen)):
        first[key] = min(step, first.get(key, step))

    def choose(start, stop, number):
        return sorted(key for key, step in first.items() if start <= step < stop)[:number]

    return choose


def assert_forgotten(job, plan, seen, reference, keys):
    """Check the newest version of "m" against a masked run, and the steps that it took."""
    assert sorted({part["step"] for part in seen}) == list(range(plan.start_step + 1, MAX_STEPS + 1))
    newest = str(job.repo.models.resolve("m"))
    forgot, masked = job.entry(newest), job.entry(reference)
    assert (forgot["step"], forgot["content"]) == (MAX_STEPS, masked["content"])
    report = job.repo.models.trained_on([newest], keys=keys)
    assert [(found.num_samples, found.is_complete) for found in report.versions] == [(0, True)]
    assert sum(len(item["rows"]) for item in forgot["data"][0]["state"]["masked"]["samples"]) == len(keys)
    first = forgot  # the first version of the training again, which says from where
    while first["parent"] != plan.start:
        first = job.entry(first["parent"])
    assert (first["config"]["resume"], first["data"][0]["spans"][0]["step"]) == (plan.start, plan.start_step)
    masked_keys = {key for part in seen for key, counts in zip(part["keys"], part["mask"], strict=True) if not counts}
    assert set(keys) <= masked_keys
    assert not set(keys) & {key for key, *_ in uses(seen)}


def test_trained_on_counts_a_repeated_step_once_with_its_positions(job, seen):
    versions = [job.entry(str(each)) for each in job.repo.models.versions("m")][:5]
    assert [(entry["step"], entry["parent"]) for entry in versions] == [
        (4, None), (8, "m@1"), (8, "m@1"), (12, "m@3"), (14, "m@4"),
    ]  # fmt: skip
    spans = [(span["step"], span["ranks"], span["global_batch"]) for span in versions[4]["data"][0]["spans"]]
    assert spans == [(0, 3, 24), (COPIED_STEP, 2, 24)]
    every = [sample["key"] for sample in job.repo.dataset("digits@1")["train"]]
    by_version = {"m@5": last(seen), "m@3": [part for part in last(seen) if part["step"] <= 8]}
    by_version["m@2"] = [part for part in seen if part["size"] == 3 and part["step"] <= 8]
    for version, parts in by_version.items():
        report = job.repo.models.trained_on([version], keys=every)
        assert sorted((use.key, use.epoch, use.position, use.step) for use in report.all_uses()) == uses(parts)
        assert not report.gaps


def test_replay_gives_each_rank_of_each_step_what_it_saw(job, seen):
    run = job.entry("m@5")["run"]

    def check(part, ref, step):
        found = job.repo.models.batch_at(ref, step, rank=part["rank"])
        pixels = sha256(found.batch.images.numpy().tobytes()).hexdigest()
        assert (found.step.ranks, found.keys, pixels) == (part["size"], part["keys"], part["pixels"])

    for part in last(seen):
        if part["step"] in (1, COPIED_STEP, COPIED_STEP + 1, 8, KILLED_STEP, MAX_STEPS):
            check(part, run, part["step"])
    for part in seen:  # the version that no other continues has what its ranks saw
        if part["size"] == 3 and part["step"] == 8:
            check(part, "m@2", 8)
    with pytest.raises(ConfigError, match="step 7 had 2 data ranks"):
        job.repo.models.batch_at(run, COPIED_STEP + 1, rank=2)


def test_samples_that_were_first_used_after_the_loss_are_forgotten_by_the_ranks_that_were_left(job, seen, keys):
    late = keys(KILLED_STEP, MAX_STEPS, 20)
    plan = job.repo.models.plan_forget("m@5", late)
    assert (plan.start, plan.num_steps, plan.repeated) == ("m@3", 6, (RepeatedSteps(MAX_STEPS, 24, 2),))
    forgot = job.forget("m@5", 2, late)
    # The ranks of the masked run are those of the run: three, and two from the copy of step 6 on.
    job.train("masked-late", 3, keys=late, killed_step=KILLED_STEP)
    assert_forgotten(job, plan, forgot, "masked-late", late)


def keys_of_both(keys):
    """Return keys first used before the loss, in a step that was repeated, and after it."""
    return [*keys(5, 7, 8), *keys(7, KILLED_STEP, 4), *keys(KILLED_STEP, MAX_STEPS, 8)]


def test_samples_that_were_first_used_before_the_loss_are_forgotten_at_any_fixed_number_of_ranks(job, seen, keys):
    both = keys_of_both(keys)
    plan = job.repo.models.plan_forget("m@5", both)
    assert (plan.start, plan.num_steps) == ("m@1", 10)
    assert plan.repeated == (RepeatedSteps(COPIED_STEP, 24, 3), RepeatedSteps(MAX_STEPS, 24, 2))
    forgot = job.forget("m@5", 2, both)
    # The masked run has the ranks of the run up to the start, then those with which the model forgets.
    job.train("masked-fixed", 3, keys=both, max_steps=plan.start_step)
    job.train("masked-fixed", 2, keys=both)
    assert_forgotten(job, plan, forgot, "masked-fixed", both)


def test_an_elastic_job_that_loses_a_rank_forgets_as_a_masked_run_that_loses_it_at_the_same_step(job, seen, keys):
    both = keys_of_both(keys)
    plan = job.repo.models.plan_forget("m@5", both)
    forgot = job.forget("m@5", 3, both, killed_step=KILLED_STEP)
    job.train("masked-elastic", 3, keys=both, killed_step=KILLED_STEP)
    assert_forgotten(job, plan, forgot, "masked-elastic", both)
