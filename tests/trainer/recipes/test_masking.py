"""`forget`: training again from before the first exposure gives the bits of a run that never had the samples."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import datasvc
from datasvc.errors import ConfigError, NotFoundError
from datasvc.ledger.masked import Masked
from datasvc.models import describe_model
from datasvc.models.provenance.forgetting import ForgetPlan, RepeatedSteps
from datasvc.models.registry.retention import remove
from datasvc.trainer.recipes.masking import config_of_version, configs_of_plan
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train
from tests.cli.command import run as run_command

MODEL = "cnn@6"  # the last version of its run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def repo(digits_folder, tmp_path_factory):
    """324 digits to train on, and a model of two epochs of 10 steps with a version every 4 steps."""
    repo = datasvc.open(str(tmp_path_factory.mktemp("forget") / "repo"), create=True)
    repo.datasets.ingest(str(digits_folder / "val"), "digits", val_fraction=0.1)
    train(config(repo, "cnn"))
    return repo


def config(repo, name, **settings):
    defaults = {"data": "digits", "size": 16, "scale": (0.8, 1.0), "flip": 0.0, "batch_size": 32, "epochs": 2}
    defaults |= {"optimizer": "adamw", "learning_rate": 0.003, "checkpoint_every": 4, "evaluate_every": 1}
    return TrainConfig(repo=repo.repository.url, name=name, **(defaults | settings))


def step_of(repo, ref):
    return describe_model(repo.repository, ref).entry["step"]


def content_of(repo, ref):
    return describe_model(repo.repository, ref).entry["content"]


def used_first_at(repo, step):
    """Return the key of a sample that the model first used at a step, from what `trained-on` says of all keys."""
    keys = [sample["key"] for sample in repo.dataset("digits")["train"]]
    first = {}
    for use in repo.models.trained_on([MODEL], keys=keys).all_uses():
        first[use.key] = min(first.get(use.key, use.step), use.step)
    return next(key for key, found in first.items() if found == step)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "start_step"), [(7, 4), (2, 0)])
def test_a_model_that_forgot_has_the_weights_of_one_that_masked_the_samples_from_the_start(repo, step, start_step):
    key = used_first_at(repo, step)
    plan = repo.models.plan_forget(MODEL, [key])
    assert (plan.num_samples, plan.first_step, plan.start_step) == (1, step, start_step)
    assert plan.num_steps == 20 - start_step
    name = f"masked-{step}"
    never = ForgetPlan("cnn@1", 1, None, None, 0, 20, (), plan.masked)
    train(config(repo, name), never)
    version = train(*configs_of_plan(repo, plan), plan)
    assert (
        describe_model(repo.repository, version).entry["content"]
        == (describe_model(repo.repository, name).entry["content"])
    )
    forgot = describe_model(repo.repository, version).entry
    assert Masked.from_dict(forgot["data"][0]["state"]["masked"]).samples[0].rows == plan.masked.samples[0].rows
    assert forgot["parent"] == plan.start or forgot["parent"].startswith("cnn@")
    report = repo.models.trained_on([version], keys=[key])
    assert [(uses.num_samples, uses.is_complete) for uses in report.versions] == [(0, True)]
    assert repo.models.plan_forget(version, [key]).num_steps == 0


@pytest.mark.slow
def test_a_second_forget_keeps_what_the_first_one_has_masked_and_reads_the_same_version(repo):
    late, early = used_first_at(repo, 11), used_first_at(repo, 3)
    train(config(repo, "twice", data="digits@1"))
    for key in (late, early):
        plan = repo.models.plan_forget("twice", [key])
        (again,) = configs_of_plan(repo, plan)
        assert again.data == "digits@1"
        train(*configs_of_plan(repo, plan), plan)
    newest = str(repo.models.resolve("twice"))
    assert repo.models.trained_on([newest], keys=[late, early]).versions[0].num_samples == 0


@pytest.mark.slow
def test_a_version_in_the_middle_of_its_run_is_trained_again_up_to_its_own_step(repo):
    middle = next(str(each) for each in repo.models.versions("cnn") if step_of(repo, str(each)) == 12)
    plan = repo.models.plan_forget(middle, [used_first_at(repo, 7)])
    assert (plan.start_step, plan.num_steps, plan.repeated) == (4, 8, (RepeatedSteps(12, 32, 1),))
    version = train(*configs_of_plan(repo, plan), plan)
    assert step_of(repo, version) == 12
    masked = train(config(repo, "masked-middle", max_steps=12), replace(plan, start=None))
    assert content_of(repo, version) == content_of(repo, masked)


@pytest.mark.slow
def test_each_step_has_the_batch_size_that_it_had_also_if_that_changed_in_the_run(repo):
    steps = [{"max_steps": 6}, {"batch_size": 48, "max_steps": 12}]
    for settings in steps:
        train(config(repo, "grown", **settings))
    key = used_first_at(repo, 5)
    plan = repo.models.plan_forget("grown", [key])
    assert plan.repeated == (RepeatedSteps(6, 32, 1), RepeatedSteps(12, 48, 1))
    output = run_command("forget", "grown", "--sample", key, "--repo", repo.repository.url, "--yes").stdout
    assert "to step 6 with 1 rank and batches of 32, to step 12 with 1 rank and batches of 48" in output
    for settings in steps:
        masked = train(config(repo, "masked-grown", **settings), replace(plan, start=None))
    assert content_of(repo, "grown") == content_of(repo, masked)
    assert repo.models.plan_forget("grown", [key]).num_steps == 0


def test_an_elastic_job_forgets_from_a_version_that_later_ranks_find_too(repo):
    words = ("--sample", used_first_at(repo, 7), "--repo", repo.repository.url, "--yes")
    done = run_command("forget", "cnn", *words, TRAINER_ELASTIC_WORKER="localhost:0:1")
    assert done.returncode
    assert "in an elastic job, give it, such as cnn@9" in done.stderr


def test_a_run_that_reads_other_data_is_refused(repo):
    plan = repo.models.plan_forget(MODEL, [used_first_at(repo, 7)])
    other = replace(plan, masked=Masked.rows("ab" * 32, {0: [1]}))
    with pytest.raises(ConfigError, match="read other data than this run"):
        train(*configs_of_plan(repo, other), other)


def test_a_start_that_was_removed_is_named_and_the_one_before_it_is_taken(repo):
    train(config(repo, "pruned"))
    steps = {describe_model(repo.repository, f"pruned@{number}").entry["step"]: number for number in range(1, 7)}
    key = used_first_at(repo, 11)
    assert repo.models.plan_forget("pruned", [key]).start == f"pruned@{steps[10]}"
    remove(repo.repository, [f"pruned@{steps[10]}", f"pruned@{steps[8]}"])
    plan = repo.models.plan_forget("pruned", [key])
    assert (plan.start, plan.removed) == (f"pruned@{steps[4]}", (f"pruned@{steps[10]}", f"pruned@{steps[8]}"))
    assert (
        "would have saved steps"
        in run_command("forget", "pruned", "--sample", key, "--repo", repo.repository.url).stdout
    )


def test_keys_that_the_model_did_not_read_are_listed_and_nothing_is_done(repo):
    with pytest.raises(NotFoundError, match=r"1 key is in no data that cnn@6 read: absent\.jpg; nothing was done"):
        repo.models.plan_forget(MODEL, ["absent.jpg"])
    assert repo.models.plan_forget(MODEL, ["absent.jpg"], missing="ok").num_samples == 0


def test_a_pretrained_model_forgets_first(repo):
    key = used_first_at(repo, 7)
    train(config(repo, "tuned", init_from="cnn@4", epochs=1))
    with pytest.raises(ConfigError, match=r"cnn@4, which tuned@\d+ continues, was trained on the samples: let cnn"):
        repo.models.plan_forget("tuned", [key])
    newest = str(repo.models.resolve("tuned"))
    assert config_of_version(repo, newest, None, advice="").init_from == "cnn@4"
    assert config_of_version(repo, newest, newest, advice="").init_from is None  # it has these weights already


def test_a_program_of_the_users_gets_the_samples_to_mask(repo):
    plan = ForgetPlan(str(repo.models.save("own", {"w": 1}, step=1)), 1, None, None, 0, 1, (), Masked())
    with pytest.raises(ConfigError, match="was not trained by `datasvc train`"):
        configs_of_plan(repo, plan)


@pytest.mark.slow
def test_two_ranks_forget_as_one_masks(repo):
    key = used_first_at(repo, 7)
    plan = repo.models.plan_forget(MODEL, [key])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "datasvc.trainer.launch", "-np", "2", sys.executable, "-m", "datasvc"),
            *("forget", plan.model, "--sample", key, "--repo", repo.repository.url, "--yes"),
        ],
        cwd=Path(__file__).parents[3], env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    newest = str(repo.models.resolve("cnn"))
    assert [uses.num_samples for uses in repo.models.trained_on([newest], keys=[key]).versions] == [0]
    entry = describe_model(repo.repository, newest).entry
    assert (entry["step"], entry["data"][0]["spans"][-1]["global_batch"]) == (20, 32)
