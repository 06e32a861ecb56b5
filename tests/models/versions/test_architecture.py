"""What a network consists of: counted without a change of it, in the entry, printed by `show`, found by `find`."""

import logging
from collections import Counter

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import datasvc
from datasvc.cli.main import make_app
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models import Architecture, describe_architecture, describe_model, save
from datasvc.models.dcp import DcpWriter
from datasvc.models.versions.entry_fields import check_fields
from datasvc.trainer.recipes.models import build_model

STATE = {"w": torch.ones(2)}
INPUTS = {
    "resnet18": torch.zeros(1, 3, 64, 64),
    "googlenet": torch.zeros(1, 3, 64, 64),
    "gpt": torch.zeros(1, 8, dtype=torch.int64),
}


class DependsOnValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


class Mutable(nn.Module):
    """Has what a forward pass could change: statistics, random numbers, an attribute, and tied weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        self.calls += 1
        return self.second(self.norm(self.first(x) + torch.rand(4).to(x.device)))


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_operators_are_counted_as_torch_exports_them(name):
    model = build_model(name, 10).eval()
    exported = torch.export.export(model, (INPUTS[name],), strict=False)
    nodes = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    expected = Counter(target.overloadpacket.__name__ for target in nodes if hasattr(target, "overloadpacket"))
    found = describe_architecture(model, INPUTS[name])
    assert found.ops == expected
    assert found.modules == Counter(type(module).__name__ for module in model.modules())


def test_the_network_its_mode_and_the_random_numbers_stay_as_they_are():
    model = Mutable().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    assert describe_architecture(model, torch.ones(2, 4)).ops["linear"] == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert (model.training, model.calls, model.second.weight is model.first.weight) == (True, 0, True)
    model(torch.ones(2, 4)).sum().backward()
    assert model.first.weight.grad is not None


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [(DependsOnValues(), {}, "meta tensors"), (nn.Linear(2, 2), {"timeout_s": -1.0}, "takes too long")],
)
def test_a_forward_pass_that_cannot_be_traced_leaves_the_classes_of_modules(model, options, reason, caplog):
    with caplog.at_level(logging.INFO, "datasvc"):
        found = describe_architecture(model, torch.ones(1, 2), **options)
    assert found.ops == {}
    assert found.modules["Linear"] == 1
    assert found.to_dict().keys() == {"modules"}
    assert reason in caplog.text


def test_a_version_has_the_counts_show_prints_the_largest_and_find_compares_them(repository):
    save(repository, "net", STATE, step=1)
    small = Architecture({"BatchNorm2d": 2, "Sequential": 1}, {"conv2d": 20})
    large = Architecture({"BatchNorm2d": 53}, {"conv2d": 53, "relu_": 49, "add": 16, "linear": 1, "to": 1, "cat": 1})
    save(repository, "net", STATE, step=2, architecture=small)
    with datasvc.open(repository.url).models.manager("net") as model:
        model.save(STATE, step=3, architecture=large, wait=True)
    assert "ops" not in describe_model(repository, "net@1").entry
    assert describe_model(repository, "net@3").entry["ops"] == large.ops
    for condition, versions in (
        ("ops.conv2d > 50", [3]),
        ("modules.BatchNorm2d::int >= 2", [3, 2]),
        ("modules.sequential = 1", [2]),
        ("ops.linear is null", [2, 1]),
    ):
        assert [found.version for found in datasvc.open(repository.url).models.find(condition)] == versions
    shown = CliRunner().invoke(
        make_app(), ["models", "show", "net@3", "--repo", repository.url], env={"COLUMNS": "200"}
    )
    assert "53 conv2d, 49 relu_, 16 add, 1 cat, and 2 more" in shown.stdout
    assert "53 BatchNorm2d" in shown.stdout


def test_the_planners_of_torch_take_it_too(tmp_path):
    writer = DcpWriter(tmp_path, architecture=Architecture({"Linear": 1}))
    assert writer.version_metadata.architecture == Architecture({"Linear": 1})


def test_what_is_no_count_is_refused(repository):
    with pytest.raises(ConfigError, match="ops has 'conv2d': True; expected a name and a count"):
        Architecture(ops={"conv2d": True})
    with pytest.raises(ConfigError, match="architecture is a dict; expected the result of describe_architecture"):
        save(repository, "net", STATE, step=1, architecture={"conv2d": 1})
    save(repository, "net", STATE, step=1)
    entry = describe_model(repository, "net@1").entry
    with pytest.raises(CorruptDataError, match=r"field 'ops' is .*; expected counts by operator"):
        check_fields({**entry, "ops": {"conv2d": "many"}}, "net@1")
