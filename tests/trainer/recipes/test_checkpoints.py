"""What a checkpoint says about the layout of its run, and what a rank restores of an optimizer it has in part."""

from types import SimpleNamespace

import pytest
import torch

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.planning.layout import Layout
from datasvc.trainer.recipes.checkpoints import _resume_optimizer, plan_restore
from datasvc.trainer.recipes.choose_layout import read_layout
from datasvc.trainer.recipes.layouts.execution import describe_execution
from datasvc.trainer.recipes.layouts.optimizer import LayoutOptimizer
from datasvc.trainer.recipes.model_check import describe_misfit
from datasvc.trainer.recipes.settings.config import TrainConfig


@pytest.mark.parametrize(
    ("layout", "zero", "size", "parallelism", "communication"),
    [
        (None, None, 1, "none", ""),
        (None, None, 4, "data", "all-reduce"),
        ("shard=4", None, 4, "data", "reduce-scatter, all-gather"),
        ("shard=4", 1, 4, "data", "all-reduce, broadcast"),
        ("pipeline=4", None, 4, "model", "all-reduce, point-to-point"),
        ("tensor=2", None, 4, "hybrid", "all-reduce"),
        ("context=4", None, 4, "model", "reduce-scatter, all-gather"),
        ("data=2,context=2", None, 4, "hybrid", "all-reduce, reduce-scatter, all-gather"),
    ],
)
def test_the_entry_has_all_axes_and_what_is_divided(layout, zero, size, parallelism, communication):
    config = TrainConfig(data="tokens@1", repo="repo", name="net", layout=layout, zero=zero)
    execution = describe_execution(read_layout(config, size), zero=config.zero)
    assert (execution.parallelism, execution.communication) == (parallelism, communication)
    assert (execution.consistency, execution.topology) == ("synchronous", "decentralised")
    assert execution.layout.keys() == {"replica", "data", "shard", "tensor", "pipeline", "context"}
    assert torch.tensor(list(execution.layout.values())).prod() == size


def test_the_entry_has_the_exchange_of_heads():
    execution = describe_execution(Layout(tensor=2, pipeline=2), exchanges_heads=True)
    assert execution.communication == "all-reduce, all-to-all, point-to-point"


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ("bsp", ("bsp", 1, "", "synchronous", "all-reduce")),
        ("postlocal:100:8", ("postlocal:100:8", 8, "", "bounded", "all-reduce")),
        ("easgd:4:0.9", ("easgd:4:0.9", 4, "center", "bounded", "all-reduce")),
        ("diloco:32", ("diloco:32", 32, "nesterov", "bounded", "all-reduce")),
        ("gossip:ring", ("gossip:ring", 1, "", "bounded", "all-to-all")),
        ("tournament:8", ("tournament:8", 8, "", "bounded", "all-gather, all-to-all")),
        ("hierarchical:2,8", ("hierarchical:2,8", 8, "", "bounded", "all-reduce")),
        (
            "diloco:16:fragments=4,codec=int8",
            ("diloco:16:fragments=4,codec=int8", 16, "nesterov", "bounded", "all-to-all, all-gather"),
        ),
    ],
)
def test_the_entry_has_who_waits_for_whom(sync, expected):
    made = describe_execution(Layout(data=2), sync=sync)
    assert (made.sync, made.sync_steps, made.outer_optimizer, made.consistency, made.communication) == expected


@pytest.mark.parametrize(
    ("sync", "communication"),
    [
        ("local:8", "all-reduce, reduce-scatter, all-gather"),
        ("gossip:ring", "all-to-all, reduce-scatter, all-gather"),
    ],
)
def test_the_entry_has_rounds_and_what_the_ranks_of_a_replica_exchange(sync, communication):
    made = describe_execution(Layout(replica=2, shard=2), sync=sync)
    assert (made.parallelism, made.consistency, made.communication) == ("data", "bounded", communication)


def test_a_rank_restores_the_state_of_its_own_parameters():
    stage = torch.nn.ModuleDict({"last": torch.nn.Linear(3, 2)})
    optimizer = LayoutOptimizer(
        torch.optim.AdamW(stage.parameters()), stage, [["first.weight", "last.weight"], ["first.bias", "last.bias"]]
    )
    stored = {
        f"{number}.{name}": (torch.float32, shape)
        for number, weight in enumerate([(3, 3), (2, 3), (3,), (2,)])
        for name, shape in (("step", ()), ("exp_avg", weight))
    }
    made = optimizer.make_state({**stored, "odd": (torch.float32, ())})
    assert {
        number: {name: tuple(tensor.shape) for name, tensor in state.items()} for number, state in made.items()
    } == {
        1: {"step": (), "exp_avg": (2, 3)},
        3: {"step": (), "exp_avg": (2,)},
    }


@pytest.fixture
def one_rank():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize(
    ("saved", "resumed", "num_steps"),
    [
        ("gossip:ring", "gossip:ring:1", 5),
        ("diloco:8", "diloco:8:delay=0", 5),
        ("gossip:ring", "gossip:exponential", 0),
        ("gossip:ring", "bsp", None),
    ],
)
def test_a_sync_that_is_written_in_another_way_continues_the_rounds(one_rank, saved, resumed, num_steps):
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    averages = resumed != "bsp"
    config = SimpleNamespace(sync=resumed, averages_weights=averages, combines_steps=False)
    run = SimpleNamespace(
        config=config,
        model=layer,
        optimizer=hvd.Averaging(optimizer, resumed) if averages else optimizer,
        loss_scale=None,
    )
    averaging = {"sync": saved, "num_steps": 5, "outer": None}
    state = {"optimizer": optimizer.state_dict()}
    _resume_optimizer(run, SimpleNamespace(version="net@1"), state, {"averaging": averaging}, has_same_ranks=True)
    assert getattr(run.optimizer, "num_steps", None) == num_steps


def linear_run(**sizes):
    layer = torch.nn.Linear(3, 2)
    optimizer = LayoutOptimizer(torch.optim.SGD(layer.parameters()), layer, [["weight", "bias"]])
    config = SimpleNamespace(model="gpt")
    return SimpleNamespace(optimizer=optimizer, config=config, model=layer, average=None, model_sizes=sizes)


def test_a_checkpoint_of_another_model_is_refused_before_its_tensors_are_read(one_rank):
    def records(**shapes):
        return tuple(
            SimpleNamespace(name=f"model.{name}", dtype="float32", shape=shape) for name, shape in shapes.items()
        )

    stored = SimpleNamespace(version="net@1", entry={}, records=records(weight=(2, 3), bias=(2,)))
    run = linear_run(layers=2, heads=4)
    assert plan_restore(run, stored)["model"].keys() == {"weight", "bias"}
    stored.entry = {"config": {"model": "gpt2"}}
    with pytest.raises(ConfigError, match="net@1 has the model 'gpt2', this run has 'gpt'; use another --name"):
        plan_restore(run, stored)
    stored.entry = {"config": {"model": "gpt", "model_sizes": {"layers": 2, "heads": 2, "old": 1}}}
    message = (
        "net@1 has a model with layers=2, heads=2, and .* has layers=2, heads=4; .*--model-option heads=2.*, or use"
    )
    with pytest.raises(ConfigError, match=message):
        plan_restore(run, stored)
    # Sizes that one of the two lacks are not compared.
    stored.entry["config"]["model_sizes"] = {"layers": 2, "old": 1}
    assert plan_restore(run, stored)
    for other in (records(weight=(2, 3)), records(weight=(2, 3), bias=(3,)), records(weight=(2, 3), bias=(2,), b=())):
        stored.records = other
        with pytest.raises(ConfigError, match="net@1 does not fit the model 'gpt' of this run: "):
            plan_restore(run, stored)


def test_only_the_first_rank_lists_how_a_version_differs_from_the_model(monkeypatch):
    error = RuntimeError("a table")
    texts = []
    for rank in (0, 1):
        monkeypatch.setattr(hvd, "rank", lambda rank=rank: rank)
        texts.append(describe_misfit(linear_run(), "net@1", error))
    assert ["a table" in text for text in texts] == [True, False]
    assert "rank 0 prints the differences" in texts[1]


def test_the_states_of_a_rank_are_those_of_the_parameters_that_it_updates():
    layer = torch.nn.Linear(3, 2)
    optimizer = LayoutOptimizer(torch.optim.AdamW(layer.parameters()), layer, [["weight", "bias"]])
    assert not optimizer.states
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.states.keys() == set(layer.parameters())
