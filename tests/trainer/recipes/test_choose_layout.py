"""What is refused before the ranks connect: layouts that do not divide the model, and settings that need replicas."""

from types import SimpleNamespace

import pytest
from torch import nn

from datasvc.errors import ConfigError
from datasvc.planning.layout import Layout
from datasvc.trainer.recipes.build import build_model as build_configured
from datasvc.trainer.recipes.choose_layout import choose_layout
from datasvc.trainer.recipes.models import build_model
from datasvc.trainer.recipes.settings.config import TrainConfig


class NormalisedStages(nn.Sequential):
    """A model that can be cut into stages and has batch normalisation."""

    def __init__(self, num_classes):
        super().__init__(nn.BatchNorm1d(3), nn.Linear(3, num_classes))

    def sizes(self):
        return {"layers": 4}

    def stage(self, index, num_stages):
        raise NotImplementedError


GPT = {"model": "gpt", "vocabulary": 11, "model_option": ("layers=4", "heads=4", "width=16"), "global_batch": 8}


def choose(world_size, **settings):
    return choose_layout(TrainConfig(data="a@1", repo="r", name="n", **settings), world_size)


def test_without_a_layout_each_rank_has_the_whole_model():
    assert choose(3, compile="inductor") == Layout(data=3)
    assert choose(3, layout="data=3", precision="fp16") == Layout(data=3)


@pytest.mark.parametrize(
    ("text", "sync", "expected"),
    [
        ("replica=2,shard=2", "bsp", Layout(data=2, shard=2)),
        ("replica=2,shard=2", "local:8", Layout(replica=2, shard=2)),
        ("replica=2", "local:8", Layout(replica=2, data=2)),
        ("replica=4", "local:8", Layout(data=4)),
        ("data=4", "local:8", Layout(data=4)),
    ],
)
def test_replicas_of_several_ranks_are_an_axis_only_if_they_average_weights(text, sync, expected):
    assert choose(4, layout=text, sync=sync) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {**GPT, "layout": "tensor=2,pipeline=2", "micro_batch": 2},
        {**GPT, "layout": "shard=2,context=2", "optimizer": "adamw", "zero": 2},
        {**GPT, "layout": "pipeline=2,tensor=2", "pipeline_schedule": "zbv", "micro_batch": 2},
        {**GPT, "layout": "data=2,pipeline=2", "pipeline_schedule": "zbv", "micro_batch": 1},
        {"layout": "shard=2", "model": "resnet18", "optimizer": "lars", "offload": True},
        {"layout": "data=2,shard=2", "zero": 1, "channels_last": True},
        {"layout": "shard=4", "zero": 1, "optimizer": "lamb"},
        {"layout": "shard=4", "zero": 1, "compression": "bf16", "bucket": "auto", "compile": "inductor"},
        {**GPT, "layout": "tensor=4", "optimizer": "lars"},
        {"layout": "shard=4", "init_from": "a@1"},
    ],
)
def test_a_layout_that_divides_everything_is_chosen(settings):
    assert choose(4, **settings).size == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "shard=3"}, "need a multiple of 3 ranks, and there are 4; shard may be 1, 2, 4"),
        ({"layout": "tensor=2", "model": "resnet18"}, "no plan for `tensor`"),
        ({"layout": "pipeline=2", "model": "resnet18", "micro_batch": 8}, "the model cannot be cut"),
        (
            {"layout": "pipeline=2", "model": f"{__name__}:NormalisedStages", "micro_batch": 8},
            "has batch normalisation, whose statistics are averaged over whole models; use the axes data and shard",
        ),
        ({"layout": "context=2", "model": "resnet18"}, "the model cannot divide them"),
        ({**GPT, "layout": "tensor=4", "model_option": ("heads=6", "width=24")}, "tensor may be 1, 2, 3, 6"),
        (
            {**GPT, "layout": "pipeline=4", "model_option": ("layers=6",), "micro_batch": 2},
            "pipeline may be 1, 2, 3, 6",
        ),
        ({**GPT, "layout": "pipeline=4"}, "micro_batch may be 1, 2"),
        (
            {**GPT, "layout": "shard=2,tensor=2", "global_batch": 9},
            "data x shard may be 1, 3, 9, or use a global batch that is a multiple of 2",
        ),
        (
            {**GPT, "layout": "context=4", "block_tokens": 30},
            "a block has 30 tokens; context may be 1, 2, 3, 5, 6, 10, 15, 30",
        ),
        *(
            (
                {
                    **GPT,
                    "layout": f"{axis}=2,pipeline=2",
                    "pipeline_schedule": "zbv",
                    "micro_batch": 1,
                    "model_option": ("layers=4", "heads=4", "width=16", f"tie_weights={tied}"),
                },
                "does not work with the schedule zbv",
            )
            for axis in ("shard", "context")
            for tied in ("true", "false")
        ),
        ({"recompute": True}, "--recompute: the model 'small-cnn' has no blocks to compute again"),
        ({"offload_activations": True}, "--offload-activations: the model 'small-cnn' has no blocks to copy"),
        ({"offload_activations": True, "layout": "shard=4"}, "needs the whole model on each rank"),
        ({"offload_activations": True, "recompute": True}, "give --recompute or --offload-activations"),
        ({"offload_activations": True, "compile": "inductor"}, "does not go with --compile"),
        ({**GPT, "sync_batch_norm": True}, "--sync-batch-norm: the model 'gpt' has no batch normalisation"),
        ({**GPT, "statistics": "recompute"}, "--statistics recompute: the model 'gpt' has no batch normalisation"),
        ({"layout": "shard=4", "precision": "fp16"}, "use bf16"),
        ({"layout": "shard=4", "compile": "inductor"}, "leave it out, or use zero 1, with which each rank has"),
        ({"layout": "shard=4", "zero": 1, "compression": "topk:0.1"}, "save what it has not sent of each gradient"),
        ({"layout": "shard=4", "compression": "bf16"}, "compression bf16 does not work with layout shard=4"),
        (
            {"layout": "shard=4", "bucket": "auto"},
            "bucket auto does not work with layout shard=4; leave it out, or use zero 1",
        ),
        (
            {"layout": "shard=4", "channels_last": True},
            "channels_last does not work with layout shard=4; leave it out",
        ),
        ({"layout": "shard=4", "zero": 4}, "zero is 4; expected 1 <= zero < 4"),
        ({"zero": 3}, "zero is for the axis shard"),
        ({"layout": "tensor=4", "offload": True}, "offload is for the axis shard"),
        ({"layout": "shard=4", "zero": 1, "offload": True}, "with zero 1 they are not divided"),
        ({"layout": "shard=2,tensor=2", "zero": 1}, "axes data and shard only, not with tensor"),
        ({"layout": "shard=4", "pipeline_schedule": "gpipe"}, "it is for the axis pipeline"),
        ({"layout": "depth=4"}, "the axes are replica, data, shard, tensor, pipeline, context"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(settings, message):
    with pytest.raises(ConfigError) as refusal:
        choose(4, **settings)
    assert message in str(refusal.value)


def test_adasum_is_refused_for_other_numbers_of_ranks_than_powers_of_two():
    assert choose(4, op="adasum").size == 4
    with pytest.raises(
        ConfigError, match="in pairs, and the job has 3 ranks; start 2 or 4 ranks, or give --op average"
    ):
        choose(3, op="adasum")


def test_a_block_of_the_data_must_be_divided_unless_a_setting_has_another():
    config = TrainConfig(data="a@1", repo="r", name="n", **GPT, layout="context=4")
    with pytest.raises(ConfigError, match="a block has 30 tokens; context may be 1, 2, 3, 5, 6, 10, 15, 30"):
        choose_layout(config, 4, block=30)
    assert choose_layout(config, 4, block=32).context == 4


class ReadsValues(nn.Sequential):
    """A model with a block that cannot be built on the device "meta"."""

    def __init__(self, num_classes):
        super().__init__(nn.Sequential(nn.Sequential(nn.Linear(3, num_classes)), nn.Sequential(nn.Linear(1, 1))))
        self.first = self[0][0][0].weight.flatten()[0].item()


def test_options_of_a_model_that_cannot_be_built_without_memory_are_checked_with_the_real_one():
    assert choose(2, model=f"{__name__}:ReadsValues", recompute=True) == Layout(data=2)


def build(model, **settings):
    task = SimpleNamespace(build_model=lambda name, _options: build_model(name, 10))
    return build_configured(TrainConfig(data="a@1", repo="r", name="n", model=model, **settings), task)


def test_recomputation_is_refused_for_a_model_without_blocks():
    with pytest.raises(ConfigError, match=r"'small-cnn' has no blocks to compute again.*resnet50.*`shard_units`"):
        build("small-cnn", recompute=True)
    build("small-cnn")
    build("resnet18", recompute=True)
