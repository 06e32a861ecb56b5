"""Replicas slowed 1 : 2 : 4 get leases of 4 : 2 : 1, and what each trained on is known exactly afterwards.

A global batch has 12 samples, and a whole round 7 of them: 21 batches of 4 for three replicas. An epoch of 360
samples has 30 global batches: four whole rounds, and one of two.
"""

import json
import shutil
from hashlib import sha256

import pytest

import datasvc
from datasvc.errors import ConfigError, NotFoundError
from datasvc.ledger.audit import audit_folders
from datasvc.models import describe_model
from tests.support import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SLOWNESS = [1.0, 2.0, 4.0]
EQUAL, WHOLE, LAST = (7, 7, 7), (12, 6, 3), (3, 2, 1)
ROUNDS = [(0, EQUAL), (0, EQUAL), (0, WHOLE), (0, WHOLE), (0, LAST), *[(1, WHOLE)] * 4, (1, LAST)]
SAVED_STEP = 26  # after the third round
NUM_STEPS = 7 + 7 + 12 + 12 + 3 + 12 * 4 + 3


class Jobs:
    """Runs jobs with the data of one repository, and keeps what their ranks trained on."""

    def __init__(self, launcher, repo, folder):
        self.launcher, self.repo, self.folder = launcher, repo, folder

    def plan(self, log, *, slowness=SLOWNESS, kill_at=None, forget=None, is_new=True, **settings):
        (self.folder / f"log-{log}").mkdir()
        defaults = {
            "repo": self.repo.repository.url, "data": "digits@1", "name": log, "size": 16, "epochs": 2,
            "scale": (0.8, 1.0), "global_batch": 12, "sync": "local:7", "leases": "measured", "learning_rate": 0.01,
            "optimizer": "sgd", "warmup_epochs": 0.0, "evaluate_every": None, "checkpoint_every": 24,
            "report_every": 24, "ledger": str(self.folder / f"ledger-{log}"),
        }  # fmt: skip
        job = {
            "repo": defaults["repo"],
            "slowness": slowness,
            "log": str(self.folder / f"log-{log}"),
            "kill_at": kill_at,
        }
        job |= {"settings": defaults | settings} if is_new else {}
        return job | ({} if forget is None else {"forget": forget})

    def run(self, *planned, ranks=3, fails=False):
        program = self.launcher.program("leased_rounds.py")
        done = self.launcher.run(ranks, warm_python.command(), program, json.dumps(planned), timeout_s=600)
        assert (done.returncode != 0) == fails, f"{done.stdout}\n{done.stderr}"

    def seen(self, name):
        files = (self.folder / f"log-{name}").iterdir()
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def entry(self, ref):
        return describe_model(self.repo.repository, ref).entry


@pytest.fixture
def jobs(launcher, digits_folder, memory_path):
    repo = datasvc.open(str(memory_path / "repo"), create=True)
    repo.datasets.ingest(str(digits_folder / "val"), "digits")
    return Jobs(launcher, repo, memory_path)


def uses(seen):
    """Return key, epoch, position and step of each sample that a loss counted."""
    return sorted(
        (key, part["epoch"], position, part["step"])
        for part in seen
        for key, position, counts in zip(part["keys"], part["positions"], part["mask"], strict=True)
        if counts
    )


def check_each_sample_and_step_is_known(jobs, seen):
    repo = jobs.repo
    start = [0, 0]
    for epoch, shares in ROUNDS:  # by the positions of each rank: one run in each round
        first = start[epoch]
        for rank, share in enumerate(shares):
            run = range(first, first + share * 4)
            own = [part for part in seen if (part["rank"], part["epoch"]) == (rank, epoch)]
            own = sorted((part for part in own if part["positions"][0] in run), key=lambda part: part["step"])
            assert [position for part in own for position in part["positions"]] == list(run)
            # A state is before the round until the last batch of a run is handed over.
            stop = start[epoch] + sum(shares) * 4
            assert [part["state"] for part in own] == [[epoch, start[epoch]]] * (share - 1) + [[epoch, stop]]
            progress = [
                epoch + (start[epoch] + sum(shares) * 4 * (number + 1) / share) / 360 for number in range(share)
            ]
            assert [part["progress"] for part in own] == pytest.approx(progress)
            first = run.stop
        start[epoch] = first
    assert start == [360, 360]
    every = [sample["key"] for sample in repo.dataset("digits@1")["train"]]
    versions = [str(version) for version in repo.models.versions("m")]
    steps = [jobs.entry(version)["step"] for version in versions]
    assert (steps[0], steps[-1]) == (SAVED_STEP, NUM_STEPS)
    for version, step in zip(versions, steps, strict=True):
        report = repo.models.trained_on([version], keys=every)
        found = sorted((use.key, use.epoch, use.position, use.step) for use in report.all_uses())
        assert found == uses([part for part in seen if part["step"] <= step]), version
        assert not report.gaps
    spans = jobs.entry(versions[-1])["data"][0]["spans"]
    assert [(span["step"], span["leases"]) for span in spans] == [
        (0, {"steps": 7, "shares": list(EQUAL)}), (14, {"steps": 7, "shares": list(WHOLE)}),
    ]  # fmt: skip
    result = audit_folders([jobs.folder / "ledger-m"])
    assert result.is_proven
    assert [each.served for each in result.epochs] == [360, 360]


def check_replay(jobs, seen):
    models = jobs.repo.models
    for part in seen[:: len(seen) // 12]:
        batch = models.batch_at("m", part["step"], rank=part["rank"])
        assert (batch.keys, batch.positions.tolist()) == (part["keys"], part["positions"])
        assert sha256(batch.batch.images.numpy().tobytes()).hexdigest() == part["pixels"]
    of_step = [part for part in seen if part["step"] == 20]  # of the third round, in which rank 2 has made its steps
    assert {part["rank"] for part in of_step} == {0, 1}
    assert models.batch_at("m", 20).keys == [
        key for part in sorted(of_step, key=lambda each: each["rank"]) for key in part["keys"]
    ]
    with pytest.raises(ConfigError, match="rank 2 made no step 20"):
        models.batch_at("m", 20, rank=2)
    with pytest.raises(ConfigError, match="give the rank"):
        models.batch_at("m", 20).batch  # noqa: B018
    with pytest.raises(NotFoundError, match="in the rounds after it"):
        models.batch_at("m", NUM_STEPS + 1)


def test_what_replicas_of_unequal_speed_trained_on_is_known_exactly_and_repeated_with_the_same_bits(jobs):
    models = jobs.repo.models
    # Rank 0 is killed in the fourth round, with 31 steps of its own.
    jobs.run(jobs.plan("m"))
    jobs.run(jobs.plan("killed", kill_at=[0, 31]), fails=True)
    assert jobs.entry("killed@1")["step"] == SAVED_STEP
    seen = jobs.seen("m")
    check_each_sample_and_step_is_known(jobs, seen)
    check_replay(jobs, seen)

    first = {}
    for key, _, _, step in uses(seen):
        first[key] = min(step, first.get(key, step))
    keys = sorted(key for key, step in first.items() if step > SAVED_STEP)[:3]
    newest = str(models.resolve("m"))
    plan = models.plan_forget(newest, keys)
    assert plan.start == "m@1"
    shutil.copytree(jobs.folder / "ledger-killed", jobs.folder / "ledger-fewer")
    jobs.run(
        jobs.plan("resumed", name="killed", ledger=str(jobs.folder / "ledger-killed")),
        # What is measured now plays no part: the leases are those that the run had.
        jobs.plan("forgot", is_new=False, slowness=[1.0, 1.0, 1.0], forget=[newest, keys]),
        jobs.plan("masked", forget=[newest, keys], checkpoint_every=1000),
    )
    assert jobs.entry("killed")["content"] == jobs.entry("m@4")["content"]
    assert jobs.entry("killed")["step"] == NUM_STEPS
    assert audit_folders([jobs.folder / "ledger-killed"]).is_proven
    assert jobs.entry("m")["content"] == jobs.entry("masked")["content"] != jobs.entry(newest)["content"]
    assert not {key for key, *_ in uses(jobs.seen("forgot"))} & set(keys)

    fewer = jobs.plan("fewer", resume="killed@1")
    jobs.run(fewer, ranks=2)
    result = audit_folders([jobs.folder / "ledger-fewer"])
    assert result.is_proven
    assert list(result.world_sizes) == [3, 2]
    both = [part for part in jobs.seen("killed") if part["step"] <= SAVED_STEP] + jobs.seen("fewer")
    every = [sample["key"] for sample in jobs.repo.dataset("digits@1")["train"]]
    found = models.trained_on(["fewer"], keys=every).all_uses()
    assert sorted((use.key, use.epoch, use.position, use.step) for use in found) == uses(both)
