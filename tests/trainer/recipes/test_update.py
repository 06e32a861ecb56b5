import copy

import pytest
import torch
from torch import nn

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.update import WeightAverage


def step(model, by):
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(by)


def test_the_average_follows_the_weights_by_its_decay_and_faster_at_first():
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    average = WeightAverage(model, 0.5)
    wanted, weight = 0.0, 0.0
    for number in range(1, 30):
        step(model, 1.0)
        weight += 1.0
        average.update()
        decay = min(0.5, (1 + number) / (10 + number))
        wanted = decay * wanted + (1 - decay) * weight
    with average.applied():
        assert model.weight.item() == pytest.approx(wanted)
    assert model.weight.item() == weight


def test_an_error_inside_leaves_the_model_its_own_weights():
    model = nn.Linear(2, 2)
    average = WeightAverage(model, 0.9)
    step(model, 1.0)
    held = copy.deepcopy(model.state_dict())
    with pytest.raises(ZeroDivisionError), average.applied():
        raise ZeroDivisionError
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())


def test_a_restored_average_goes_on_as_if_nothing_had_been():
    model = nn.Linear(2, 2)
    whole = WeightAverage(model, 0.9)
    step(model, 1.0)
    whole.update()
    restored = WeightAverage(nn.Linear(2, 2), 0.9)
    restored.load_state_dict(copy.deepcopy(whole.state_dict()))
    other = copy.deepcopy(model)
    restored_on = WeightAverage(other, 0.9)
    restored_on.load_state_dict(copy.deepcopy(whole.state_dict()))
    for each, of in ((whole, model), (restored_on, other)):
        step(of, 1.0)
        each.update()
    assert torch.equal(whole.state_dict()["averages"]["weight"], restored_on.state_dict()["averages"]["weight"])
    assert whole.state_dict()["num_updates"] == restored_on.state_dict()["num_updates"] == 2


def test_an_average_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="other names or shapes"):
        WeightAverage(nn.Linear(2, 3), 0.9).load_state_dict(WeightAverage(nn.Linear(2, 2), 0.9).state_dict())
