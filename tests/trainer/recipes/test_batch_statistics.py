"""Statistics of batch normalisation before an evaluation: what they are, and what they must not change."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import datasvc
import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.loaders import AugmentConfig, ImageLoader, OrderConfig
from datasvc.models import describe_model
from datasvc.repository import Repository
from datasvc.shards import ingest
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.batch_statistics import batch_statistics, keeping_statistics, recompute_statistics
from datasvc.trainer.recipes.tasks.task import Examples
from datasvc.trainer.recipes.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


def make_normalised(num_classes):
    """A small model with batch normalisation, before which random numbers are drawn."""
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.Dropout(0.2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, num_classes))


@pytest.fixture
def world_of_one():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_computed_anew_are_those_of_torch_and_counts_of_batches_remain(momentum):
    torch.manual_seed(0)
    model, reference = make_normalised(4), make_normalised(4)
    model[2].momentum = reference[2].momentum = momentum
    model(torch.randn(8, 3, 9, 9))
    reference.load_state_dict(model.state_dict())
    batches = [torch.randn(size, 3, 9, 9) for size in (8, 8, 4)]
    model.eval()
    state = torch.get_rng_state()
    examples = [
        Examples(batch, torch.zeros(len(batch)), torch.ones(len(batch), dtype=torch.bool)) for batch in batches
    ]
    recompute_statistics(model, examples)
    assert (model[2].momentum, model[2].num_batches_tracked.item()) == (momentum, 1)
    torch.set_rng_state(state)
    update_bn(batches, reference)
    for name, value in batch_statistics(reference).items():
        assert torch.equal(batch_statistics(model)[name], value)


def test_statistics_are_kept_over_an_evaluation_of_other_weights():
    model = make_normalised(4)
    with pytest.raises(ZeroDivisionError), keeping_statistics(model):
        model[2].running_mean += 1
        raise ZeroDivisionError
    assert torch.equal(model[2].running_mean, torch.zeros(8))


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    """A repository with 324 digits to train on and 36 held out."""
    repository = Repository.create(str(tmp_path_factory.mktemp("statistics") / "repo"))
    ingest(repository, str(digits_folder / "val"), "digits", val_fraction=0.1)
    return repository


NORMALISED = f"{__name__}:make_normalised"


def run(repository, name, **settings):
    defaults = {"data": "digits", "size": 16, "scale": (0.8, 1.0), "batch_size": 32, "epochs": 2, "evaluate_every": 1}
    defaults |= {"model": NORMALISED, "micro_batch": 20}
    if settings.get("statistics") != "average":
        defaults |= {"statistics": "recompute", "statistics_batches": 3}
    train(TrainConfig(repo=repository.url, name=name, **{**defaults, **settings}))
    return datasvc.open(repository.url).models.restore(name)


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_a_saved_model_has_the_statistics_that_it_was_evaluated_with(repository):
    """The three batches after the last one of the run: the last two of the epoch, and the first of the next one."""
    found = run(repository, "evaluated", max_steps=18, ema_decay=0.5)  # of 20 in two epochs
    model = make_normalised(10)
    model.load_state_dict(found.state["model"])
    augment = AugmentConfig(scale=(0.8, 1.0))
    split = datasvc.open(repository.url).dataset("digits")["train"]
    order = OrderConfig(0, "global")
    with ImageLoader(split, batch_size=32, training=True, size=16, order=order, augment=augment) as loader:
        loader.load_state_dict(found.state["loader"])
        batches = [batch.images for _ in range(2) for batch in loader][:3]
    torch.set_rng_state(found.state["rank_state"][0]["random"]["torch"])
    update_bn([part for batch in batches for part in batch.split(20)], model)
    for name, value in batch_statistics(model).items():
        torch.testing.assert_close(found.state["model"][name], value)
    averaged = found.state["ema"]
    assert averaged["batch_statistics"].keys() == batch_statistics(model).keys()
    assert not torch.equal(averaged["batch_statistics"]["2.running_mean"], found.state["model"]["2.running_mean"])


@pytest.mark.slow
def test_statistics_computed_anew_change_neither_the_training_nor_what_a_resumed_run_ends_with(repository):
    whole, plain = run(repository, "whole"), run(repository, "plain", statistics="average")
    parameters = [name for name in whole.state["model"] if "running_" not in name]
    assert_equal(*({name: found.state["model"][name] for name in parameters} for found in (whole, plain)))
    assert not torch.equal(whole.state["model"]["2.running_mean"], plain.state["model"]["2.running_mean"])
    assert torch.equal(*(found.state["rank_state"][0]["random"]["torch"] for found in (whole, plain)))
    # Ten steps are an epoch, whose evaluation the second start makes.
    run(repository, "resumed", max_steps=10, checkpoint_every=3)
    run(repository, "resumed", max_steps=14, checkpoint_every=3)
    run(repository, "resumed")
    entries = [describe_model(repository, name).entry for name in ("whole", "resumed")]
    # The layers are counted once, and each version has them.
    names = ("adaptive_avg_pool2d", "batch_norm", "conv2d", "dropout", "flatten", "linear", "relu")
    counts = dict.fromkeys(names, 1)
    assert [entry["ops"] for entry in entries] == [counts, counts]
    assert entries[1]["modules"]["BatchNorm2d"] == 1
    assert entries[0]["content"] == entries[1]["content"]
    assert entries[0]["metrics"] == entries[1]["metrics"]


def test_without_a_validation_split_the_last_version_has_statistics_computed_anew_too(repository, digits_folder):
    ingest(repository, str(digits_folder / "val"), "unsplit")
    found = {
        kind: run(repository, f"unsplit-{kind}", data="unsplit", epochs=1, statistics=kind)
        for kind in ("average", "recompute")
    }
    means = [each.state["model"]["2.running_mean"] for each in found.values()]
    assert not torch.equal(*means)


def test_options_for_batch_normalisation_are_refused_for_a_model_without_it(repository):
    with pytest.raises(ConfigError, match="--statistics recompute: the model 'small-cnn' has no batch normalisation"):
        run(repository, "without", model=None)
    with pytest.raises(ConfigError, match="--sync-batch-norm: the model"):
        run(repository, "without", model=None, statistics="average", sync_batch_norm=True)


def test_a_compiled_model_recomputes_statistics_too(repository):
    plain = run(repository, "uncompiled", max_steps=3)
    compiled = run(repository, "compiled", max_steps=3, compile="eager")
    for name, value in plain.state["model"].items():
        torch.testing.assert_close(compiled.state["model"][name], value)
