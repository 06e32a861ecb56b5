"""Stages of a pipeline: which rank has which, and that together they are the model."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

import datasvc.trainer as hvd
from datasvc.planning.layout import PIPELINE_SCHEDULES, ModelSizes, stages_per_rank
from datasvc.trainer.recipes.layouts.divided_model import find_tied_weights, read_sizes
from datasvc.trainer.recipes.layouts.pipeline import Pipeline, join_stages, plan_stages
from datasvc.trainer.recipes.layouts.shard import find_units
from datasvc.trainer.recipes.models import build_model
from datasvc.trainer.recipes.models.gpt import GPT


def make_gpt(**options):
    torch.manual_seed(0)
    return GPT(11, context=8, layers=4, heads=2, width=8, dropout=0.0, **options)


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_the_ranks_have_every_stage_once(schedule):
    stages = [plan_stages(index, 3, schedule) for index in range(3)]
    assert sorted(number for numbers in stages for number in numbers) == list(range(len(stages[0]) * 3))
    if schedule == "zbv":
        assert stages[0] == [0, 5]


SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


@pytest.fixture
def group():
    """The group of a pipeline of one rank."""
    hvd.init()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()
    hvd.shutdown()


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_each_name_of_a_schedule_gives_that_schedule(group, monkeypatch, name):
    ran = []

    def step(schedule, *_arguments, losses, **_options):
        ran.append((type(schedule), schedule._n_microbatches))
        losses.append(torch.zeros(()))

    for schedule in SCHEDULES.values():
        monkeypatch.setattr(schedule, "step", step)
    stages = [nn.Linear(2, 2) for _ in range(stages_per_rank(name))]
    pipeline = Pipeline(stages, schedule=name, num_micro_batches=4, device=torch.device("cpu"), group=group)
    x = torch.zeros(4, 2)
    pipeline.step(x, x, {}, lambda outputs, targets: (outputs - targets).sum())
    assert ran == [(SCHEDULES[name], 4)]


@pytest.mark.parametrize("tie_weights", [True, False])
def test_stages_in_turn_compute_what_the_model_computes(tie_weights):
    model = make_gpt(tie_weights=tie_weights)
    tokens = torch.arange(8)[None]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    x = tokens
    for index in range(4):
        x = model.stage(index, 4)(x, document_ids=documents)
    torch.testing.assert_close(x, model(tokens, document_ids=documents), rtol=0, atol=0)
    assert find_tied_weights(model, 4) == ("tokens.weight" if tie_weights else None)


def test_joined_stages_have_the_names_of_the_whole_model():
    model = make_gpt(tie_weights=False)
    joined = join_stages([model.stage(0, 4), model.stage(3, 4)])
    expected = {name for name in model.state_dict() if not name.startswith(("blocks.1.", "blocks.2."))}
    assert set(joined.state_dict()) == expected
    assert set(model.stage(0, 4).blocks) == {"0"}  # joining changes no stage


def test_the_sizes_of_a_model_say_which_axes_it_has():
    assert read_sizes(make_gpt(), block=8) == ModelSizes(4, 2, 8, block=8, splits_tokens=True)
    assert read_sizes(build_model("resnet18", 10)) == ModelSizes()


def test_units_are_the_blocks_of_a_model():
    gpt = make_gpt()
    assert find_units(gpt) == list(gpt.blocks)
    resnet = build_model("resnet18", 10)
    units = find_units(resnet)
    assert len(units) == 8
    assert all(any(unit is module for module in resnet.modules()) for unit in units)
