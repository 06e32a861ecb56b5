"""`forget` of 100 random samples gives the bits of a run that masked them from the start, for the cost it says."""

import json
import random
import subprocess
from pathlib import Path

import pytest

import datasvc
from datasvc.models import describe_model
from tests.support import warm_python

ROOT = Path(__file__).parents[3]
MAX_STEPS, FIRST_STEP = 12, 6  # of a run; the first step that has one of the samples

pytestmark = pytest.mark.slow

# Every rank runs the same list of trainings; "masked" are the samples of the plan for "model", "forget" continues it.
PROGRAM = """
import json, sys
import datasvc
import datasvc.trainer.recipes.train as recipe
from datasvc.models.provenance.forgetting import ForgetPlan
from datasvc.trainer.recipes.masking import configs_of_plan
from datasvc.trainer.recipes.settings.config import TrainConfig

url, trainings = sys.argv[1], json.loads(sys.argv[2])
repo, real, taken = datasvc.open(url), recipe.update, []

def counted(*arguments, **options):
    taken.append(1)
    return real(*arguments, **options)

recipe.update = counted
for each in trainings:
    plan, keys = None, each.pop("keys", None)
    taken.clear()
    if keys is not None:
        plan = repo.models.plan_forget(each.pop("model"), keys)
    if plan is not None and "name" not in each:
        for config in configs_of_plan(repo, plan):
            recipe.train(config, plan)
        assert abs(len(taken) - plan.num_steps) <= 0.05 * plan.num_steps, (len(taken), plan.num_steps)
        continue
    if plan is not None:
        plan = ForgetPlan(plan.model, 1, None, None, 0, 0, (), plan.masked)
    recipe.train(TrainConfig(repo=url, **each), plan)
"""


@pytest.fixture(scope="module")
def repo(digits_folder, tmp_path_factory):
    """Two data sets of digits: 324 and 287 samples to train on."""
    repo = datasvc.open(str(tmp_path_factory.mktemp("forget") / "repo"), create=True)
    repo.datasets.ingest(str(digits_folder / "val"), "digits", val_fraction=0.1)
    repo.datasets.ingest(str(digits_folder / "train"), "more", val_fraction=0.8)
    return repo


def run(repo, num_ranks, *trainings):
    ranks = ["-m", "datasvc.trainer.launch", "-np", str(num_ranks), warm_python.command()]
    program = ["-c", PROGRAM, repo.repository.url, json.dumps(trainings)]
    words = [warm_python.command(), *(ranks if num_ranks > 1 else []), *program]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def training(name, num_ranks, **settings):
    defaults = {"data": "digits@1", "size": 16, "scale": (0.8, 1.0), "flip": 0.0, "optimizer": "adamw"}
    defaults |= {"learning_rate": 0.003, "checkpoint_every": 3, "evaluate_every": 9, "epochs": 1}
    return defaults | {"name": name, "batch_size": 24 // num_ranks, "max_steps": MAX_STEPS} | settings


def keys_to_forget(repo, model, names):
    """Return 100 random keys of those that the model used first at `FIRST_STEP` or later."""
    keys = sorted({sample["key"] for name in names for sample in repo.dataset(name)["train"]})
    first = {}
    for use in repo.models.trained_on([model], keys=keys).all_uses():
        first[use.key] = min(first.get(use.key, use.step), use.step)
    return random.Random(7).sample(sorted(key for key, step in first.items() if step >= FIRST_STEP), 100)


def assert_forgotten(repo, model, reference, keys):
    forgot, masked = (describe_model(repo.repository, name).entry for name in (model, reference))
    assert (forgot["step"], forgot["content"]) == (MAX_STEPS, masked["content"])
    newest = str(repo.models.resolve(model))
    assert [uses.num_samples for uses in repo.models.trained_on([newest], keys=keys).versions] == [0]
    assert repo.models.plan_forget(newest, keys).num_steps == 0


@pytest.mark.parametrize(
    ("num_ranks", "data", "sync"),
    [
        (1, "digits@1", "bsp"),
        (2, "digits@1:0.6 more@1:0.4", "bsp"),
        (2, "digits@1", "local:4"),  # it continues in the middle of a round
        (4, "digits@1", "bsp"),  # three ranks: a resumed run, below
    ],
)
def test_a_run_of_any_number_of_ranks_forgets(repo, num_ranks, data, sync):
    model, reference = (f"{kind}{num_ranks}-{sync.partition(':')[0]}" for kind in ("m", "masked"))
    run(repo, num_ranks, training(model, num_ranks, data=data, sync=sync))
    keys = keys_to_forget(repo, model, ["digits", "more"][: len(data.split())])
    plan = repo.models.plan_forget(model, keys)
    assert (plan.num_samples, plan.first_step, plan.start_step, plan.num_steps) == (100, FIRST_STEP, 3, 9)
    version = f"{model}@{plan.model.partition('@')[2]}"
    masked = training(reference, num_ranks, data=data, sync=sync, keys=keys, model=version)
    run(repo, num_ranks, masked, {"keys": keys, "model": plan.model})
    assert_forgotten(repo, model, reference, keys)


def test_a_run_that_was_resumed_by_more_ranks_forgets(repo):
    run(repo, 1, training("grown", 1, max_steps=4))
    run(repo, 3, training("grown", 3, elastic=True))
    keys = keys_to_forget(repo, "grown", ["digits"])
    plan = repo.models.plan_forget("grown", keys)
    assert plan.start_step == 4
    run(repo, 1, training("masked", 1, max_steps=4, keys=keys, model=plan.model))
    run(repo, 3, training("masked", 3), {"keys": keys, "model": plan.model})
    assert_forgotten(repo, "grown", "masked", keys)
