import pytest
from torch import nn

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.models import build_model
from datasvc.trainer.recipes.optimizers.parameter_groups import group_parameters


def test_biases_and_normalisations_neither_decay_nor_adapt():
    model = build_model("resnet18", 10)
    decayed, spared = group_parameters(model, weight_decay=0.1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], decayed["adapt"]) == (0.1, True)
    assert (spared["weight_decay"], spared["adapt"]) == (0.0, False)
    modules = dict(model.named_modules())
    for parameter in decayed["params"]:
        module, _, kind = names[parameter].rpartition(".")
        assert isinstance(modules[module], nn.Conv2d | nn.Linear)
        assert kind == "weight"
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


def test_with_all_everything_is_in_one_group():
    model = build_model("small-cnn", 10)
    (group,) = group_parameters(model, weight_decay=0.1, decayed="all")
    assert list(map(id, group["params"])) == list(map(id, model.parameters()))


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(requires_grad=False)
    (group,) = group_parameters(model, weight_decay=0.1)
    assert [each.shape for each in group["params"]] == [(2, 2)]
    model.weight.requires_grad_(requires_grad=False)
    with pytest.raises(ConfigError, match="no parameters"):
        group_parameters(model, weight_decay=0.1)
    with pytest.raises(ConfigError, match="weights, all"):
        group_parameters(nn.Linear(2, 2), weight_decay=0.1, decayed="most")
