"""The weights of a server: pushes change nothing until they are applied, and delayed gradients have a known bound."""

import math

import pytest
import torch
from torch import nn

from datasvc.trainer.servers.parameter_shard import ParameterShard, put_back, take_shard


def make_sgd(groups):
    return torch.optim.SGD(groups, 0.1, momentum=0.9)


def shard_of(*weights, groups=None, make=make_sgd):
    named = {f"w{number}": torch.as_tensor(weight, dtype=torch.float32) for number, weight in enumerate(weights)}
    return ParameterShard({"weights": named, "moments": {}, "groups": groups or [{"params": list(named)}]}, make)


def test_a_push_changes_nothing_until_it_is_applied_nor_after_it_is_discarded():
    shard = shard_of([1.0, 2.0], 3.0)
    shard.stage((0, 7), torch.ones(3))
    shard.stage((1, 8), torch.full((3,), 3.0))
    assert shard.pull().tolist() == [1, 2, 3]
    shard.discard((1, 8))
    shard.apply([(0, 7)], num_targets=1, rate=1.0)
    assert shard.pull().tolist() == [0, 1, 2]
    with pytest.raises(KeyError):
        shard.apply([(1, 8)], num_targets=1, rate=1.0)


def test_an_update_without_targets_moves_nothing():
    shard = shard_of([1.0], groups=[{"params": ["w0"], "weight_decay": 0.5}])
    shard.stage((0, 0), torch.ones(1))
    shard.apply([(0, 0)], num_targets=0, rate=1.0)
    assert shard.pull().tolist() == [1]


@pytest.mark.parametrize(
    "make", [lambda each: torch.optim.SGD(each, 0.1, momentum=0.9), lambda each: torch.optim.AdamW(each, 0.1)]
)
def test_shards_make_the_steps_of_one_optimizer_and_continue_its_moments(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": [model[0].weight, model[1].weight], "weight_decay": 0.1}]
    optimizer = make([*groups, {"params": [model[0].bias, model[1].bias], "weight_decay": 0.0}])
    parameters = dict(model.named_parameters())

    def step(rate):
        gradients = {name: torch.randn_like(weight) for name, weight in parameters.items()}
        for name, weight in parameters.items():
            weight.grad = gradients[name]
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        return gradients

    step(0.2)
    parts = [{name: parameters[name] for name in names} for names in (["0.weight", "1.bias"], ["0.bias", "1.weight"])]
    shards = [ParameterShard(take_shard(part, optimizer), make) for part in parts]
    for number in range(3):
        gradients = step(0.3)
        for shard in shards:
            flat = torch.cat([gradients[name].flatten() for name in shard.names])
            shard.stage((0, number), 5 * flat / 2)
            shard.stage((1, number), 5 * flat / 2)
            shard.apply([(0, number), (1, number)], num_targets=5, rate=0.3)
    expected = {name: weight.detach().clone() for name, weight in parameters.items()}
    moments = {name: dict(optimizer.state[weight]) for name, weight in parameters.items()}
    optimizer.state.clear()
    for shard, part in zip(shards, parts, strict=True):
        put_back(shard.state(), part, optimizer)
    for name, weight in parameters.items():
        torch.testing.assert_close(weight.detach(), expected[name])
        torch.testing.assert_close(dict(optimizer.state[weight]), moments[name])


@pytest.mark.parametrize("delay", [1, 2, 5])
@pytest.mark.parametrize(("factor", "converges"), [(0.9, True), (1.1, False)])
def test_delayed_gradients_converge_below_the_known_rate_and_diverge_above(delay, factor, converges):
    """x' = x - rate * curvature * x_old, stable if rate * curvature < 2 sin(pi / (2 (2 delay + 1)))."""
    curvature = 4.0
    shard = shard_of([1.0], make=lambda groups: torch.optim.SGD(groups, 0.1))
    rate = factor * 2 * math.sin(math.pi / (2 * (2 * delay + 1))) / curvature
    pulled = [shard.pull()] * delay
    for number in range(400):
        pulled.append(shard.pull())
        shard.stage((0, number), curvature * pulled.pop(0))
        shard.apply([(0, number)], num_targets=1, rate=rate)
    assert (shard.pull().abs().item() < 0.1) is converges
    assert converges or shard.pull().abs().item() > 10
