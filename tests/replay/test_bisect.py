"""A bad sample is named in ceil(log2 of the batch) short runs, wherever in the batch it is."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import datasvc
from datasvc.errors import ConfigError
from datasvc.loaders import ImageLoader
from datasvc.models import ConsumptionTracker
from datasvc.replay.batch_at import batch_at
from datasvc.replay.bisect import BisectPlan, find_sample, plan_bisect
from datasvc.runs import RunLog
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train
from tests.cli.command import run
from tests.models.trainings import commit

BLOCK, VOCABULARY = 8, 11


class Batch:
    def __init__(self, size):
        self.keys = list(map(str, range(size)))


@pytest.mark.parametrize("size", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("spike", [50.0, math.nan, -3.0])
def test_every_sample_of_a_batch_is_found_in_at_most_the_logarithm_of_runs(size, spike):
    plan = BisectPlan(Batch(size), "net@1", "loss", 1.0, spike)
    for bad in range(size):
        runs = []
        found = find_sample(
            plan, lambda masked, bad=bad: 1.1 if masked[0] <= bad <= masked[1] else spike, runs.append
        )
        assert found == bad
        assert len(runs) <= plan.num_runs == math.ceil(math.log2(size))


def test_a_run_of_another_program_says_how_to_search_in_python(digits):
    repository = digits.repository
    log = RunLog.open(repository, "own", config={}, data=["digits@1"], world_size=1)
    for step in range(1, 5):
        log.report("step", step=step, loss=9.0 if step == 4 else 1.0)
    log.report("evaluation", step=4, val_loss=2.0)
    log.close()
    loader = ImageLoader(digits["train"], batch_size=8, training=True, size=16)
    reading, stream = ConsumptionTracker(loader), iter(loader)
    for step in range(1, 5):
        next(stream)
        if step in (2, 4):
            commit(repository, "own", step, [reading.use()], run=log.ref, parent=None if step == 2 else "own@1")
    plan = plan_bisect(repository, "own", 4)
    assert (plan.start, plan.usual, plan.spike, len(plan.batch.keys)) == ("own@1", 1.0, 9.0, 8)
    refused = run("bisect", "own", "--from", 4, "--repo", repository.url)
    assert refused.returncode == 2
    assert "own@2 was not trained by `datasvc train`, so its program is not known: run it from" in refused.stderr
    assert "datasvc.replay.bisect.find_sample searches" in refused.stderr
    with pytest.raises(ConfigError, match=r"'val_loss' is a metric of evaluations, and many steps .* steps are loss"):
        plan_bisect(repository, "own", 4, "val_loss")


def test_a_run_starts_from_the_version_of_another_name_that_it_continues_but_not_from_its_pretrained_one(digits):
    repository = digits.repository
    other = commit(repository, "base", 1, [])
    for name, config, start in (("tuned", {"init_from": other}, None), ("continued", {}, other)):
        log = RunLog.open(repository, name, config={}, data=["digits@1"], world_size=1)
        for step in (1, 2):
            log.report("step", step=step, loss=float(step))
        log.close()
        loader = ImageLoader(digits["train"], batch_size=8, training=True, size=16)
        reading, stream = ConsumptionTracker(loader), iter(loader)
        next(stream), next(stream)
        commit(repository, name, 2, [reading.use()], config=config, run=log.ref, parent=other)
        assert plan_bisect(repository, name, 2).start == start


def ingest_blocks(folder, num_blocks, poisoned):
    """Ingest blocks in which each token follows from the one before, and one block of which none does."""
    blocks = (np.arange(num_blocks)[:, None] % VOCABULARY + 3 * np.arange(BLOCK)[None]) % VOCABULARY
    blocks[poisoned] = [0, 0, 7, 0, 0, 7, 7, 0]
    (folder / "tokens" / "train").mkdir(parents=True)
    column = pa.array(blocks.tolist(), pa.list_(pa.int32(), BLOCK))
    keys = list(map(str, range(num_blocks)))
    pq.write_table(pa.table({"tokens": column, "key": keys}), folder / "tokens/train/a.parquet")
    repo = datasvc.open(str(folder / "repo"), create=True)
    repo.datasets.ingest(str(folder / "tokens"), "tokens", workers=1)
    return repo


def settings_of(repo, **settings):
    options = ("layers=1", "heads=2", "width=32", "dropout=0.0", f"context={BLOCK}")
    defaults = {"data": "tokens", "vocabulary": VOCABULARY, "model_option": options, "optimizer": "adamw"}
    defaults |= {"learning_rate": 0.02, "weight_decay": 0.0, "report_every": 1, "evaluate_every": 1, "device": "cpu"}
    return TrainConfig(repo=repo.repository.url, name="gpt", **(defaults | settings))


# At a higher rate DiLoCo's outer momentum makes jumps of its own, on some processors more than on others.
@pytest.mark.slow
@pytest.mark.parametrize(("sync", "rate"), [("bsp", 0.02), pytest.param("diloco:8", 0.002, marks=pytest.mark.slow)])
def test_a_poisoned_block_of_a_run_is_named_and_can_be_skipped(tmp_path, one_thread, sync, rate):
    repo = ingest_blocks(tmp_path, 64, 37)
    url = repo.repository.url
    train(settings_of(repo, batch_size=4, epochs=12, sync=sync, learning_rate=rate))
    keys = {step: batch_at(repo.repository, f"gpt@{step}").keys for step in range(177, 193)}
    (step,) = [number for number, found in keys.items() if "37" in found]
    # A newer version of the data, and a model of the user's that has the name of the short runs.
    repo.datasets.delete("tokens", keys=["1"])
    kept = str(repo.models.save("gpt-bisect", {"w": 1}, step=1))
    ran = run("bisect", "gpt", "--from", step, "--repo", url)
    assert ran.returncode == 0, ran.stderr
    last = ran.stdout.splitlines()[-1]
    index = keys[step].index("37")
    assert last.startswith(f"37 of tokens@1/train made the jump, after 2 runs; --skip {step}:{index} leaves")
    assert list(map(str, repo.models.versions("gpt-bisect"))) == [kept]
    with pytest.raises(ConfigError, match="has no metric 'accuracy'; the metrics of its steps are"):
        plan_bisect(repo.repository, "gpt", step, "accuracy")
    with pytest.raises(ConfigError, match="has no loss of step 4000"):
        plan_bisect(repo.repository, "gpt", 4000)


def test_a_batch_of_one_sample_needs_no_run(tmp_path, one_thread):
    repo = ingest_blocks(tmp_path, 4, 2)
    train(settings_of(repo, batch_size=1, max_steps=3))
    ran = run("bisect", "gpt", "--from", 3, "--repo", repo.repository.url)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 2
    (key,) = batch_at(repo.repository, "gpt@1", 3).keys
    assert ran.stdout.splitlines()[1].startswith(f"{key} of tokens@1/train made the jump, after 0 runs")


@pytest.mark.long
@pytest.mark.timeout(900)  # ingest, a training and eight short runs: a minute of an idle machine
def test_one_of_100_000_samples_is_named_in_a_run_for_each_bit_of_its_place_in_the_batch(tmp_path, one_thread):
    poisoned, batch = "63711", 256
    repo = ingest_blocks(tmp_path, 100_000, int(poisoned))
    train(settings_of(repo, batch_size=batch, max_steps=120, checkpoint_every=110))
    (use,) = repo.models.trained_on(["gpt"], keys=[poisoned]).all_uses()
    assert use.step > 110  # the runs take few steps each, from a model that predicts the other blocks
    ran = run("bisect", "gpt", "--from", use.step, "--repo", repo.repository.url)
    assert ran.returncode == 0, ran.stderr
    index = repo.models.batch_at(f"gpt@{use.step}").keys.index(poisoned)
    last = ran.stdout.splitlines()[-1]
    assert last.startswith(f"{poisoned} of tokens@1/train made the jump, after 8 runs; --skip {use.step}:{index} ")
