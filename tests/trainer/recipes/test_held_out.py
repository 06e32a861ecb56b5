"""On which samples a run judges its replicas."""

import pytest
import torch

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.classification import Classification
from datasvc.trainer.recipes.tasks.held_out import make_judge, read_held_out
from datasvc.trainer.recipes.tasks.task import DataPlacement, evaluate

PLACE = DataPlacement(rank=3, world_size=4, device=torch.device("cpu"), num_threads=1)


def read(digits, sync, **changes):
    config = TrainConfig(data="digits@1", repo="unused", name="unused", size=32, resize=32, sync=sync)
    task = Classification(config, digits["train"])
    options = {"batch_size": 7, "versions": ["digits@1"], "cache": None, "place": PLACE}
    return config, task, read_held_out(config, task, digits["val"], **{**options, **changes})


def test_every_rank_judges_on_the_same_evenly_spaced_samples_of_val(digits):
    val = digits["val"]
    for samples in (20, len(val) - 1, 10_000):
        _, _, batches = read(digits, f"tournament:8:samples={samples}")
        every = -(-len(val) // samples)
        labels = torch.cat([batch.targets for batch in batches]).tolist()
        assert labels == [val[number]["label"] for number in range(0, len(val), every)]
        assert len(labels) <= samples
        assert {len(batch.targets) for batch in batches[:-1]} <= {7}
        assert all(bool(batch.mask.all()) for batch in batches)
    assert read(digits, "local:8")[2] == []


def test_the_judge_gives_the_loss_of_an_evaluation_and_leaves_the_model_in_training(digits):
    hvd.init()
    try:
        config, task, batches = read(digits, "tournament:8:samples=10000")
        model = task.build_model("small-cnn", {})
        loss = make_judge(config, task, model, batches)()
        assert model.training
        alone = DataPlacement(0, 1, PLACE.device, 1)
        with task.open_loader(digits["val"], training=False, batch_size=32, cache=None, place=alone) as loader:
            assert loss == pytest.approx(evaluate(task, model, loader, PLACE.device, "fp32")["val_loss"], rel=1e-5)
    finally:
        hvd.shutdown()


def test_a_run_without_a_validation_split_is_refused_with_what_to_do(digits):
    config = TrainConfig(data="digits@1", repo="unused", name="unused", sync="tournament:8")
    task = Classification(config, digits["train"])
    with pytest.raises(ConfigError, match=r"the split 'val', and a@1 \+ b@2 has none; ingest .*--val-fraction"):
        read_held_out(config, task, None, batch_size=7, versions=["a@1", "b@2"], cache=None, place=PLACE)
