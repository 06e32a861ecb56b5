"""A resume into a state tree that has more than the version: parameters without a gradient, parts to leave."""

import logging

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import datasvc
from datasvc.errors import ConfigError


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def make():
    net = Net()
    return net, torch.optim.AdamW(net.parameters())


def state_of(net, optimizer, *, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(net, optimizer, options=options)
    return {"model": weights, "optimizer": moments, "step": None}, options


@pytest.fixture
def repository(tmp_path):
    return datasvc.open(str(tmp_path), create=True)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("saved_flat", [False, True])
def test_a_head_that_never_had_a_gradient_can_be_resumed(repository, flat, saved_flat, caplog):
    """PrimeIntellect-ai/prime-rl#2800, InternLM/xtuner#2018, pytorch/pytorch#192202: its state was never made."""
    net, optimizer = make()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = optimizer.state_dict()["state"]
    # What an optimizer saves by itself has no state of the unused head.
    state = {"model": net.state_dict(), "optimizer": {"state": {}, "param_groups": []}, "step": 7}
    names = [name for name, _ in net.named_parameters()]
    for number, moments in saved.items():
        if saved_flat:
            state["optimizer"] |= {f"state.{names[number]}.{key}": value for key, value in moments.items()}
        else:
            state["optimizer"]["state"][names[number]] = moments
    if saved_flat:
        del state["optimizer"]["state"], state["optimizer"]["param_groups"]
        state["optimizer"]["param_groups.used.weight.lr"] = 0.001
    with repository.models.manager("m") as model:
        model.save(state, step=7).result()
        net, optimizer = make()
        into, options = state_of(net, optimizer, flat=flat)
        unused = torch.equal(into["model"]["unused.weight"], state["model"]["unused.weight"])
        with caplog.at_level(logging.WARNING, logger="datasvc"):
            checkpoint = model.restore(into=into)
        restored = checkpoint.state
        set_state_dict(
            net,
            optimizer,
            model_state_dict=restored["model"],
            optim_state_dict=restored["optimizer"],
            options=options,
        )
    assert not unused
    assert restored["step"] == 7
    assert torch.equal(net.unused.weight, state["model"]["unused.weight"])
    assert torch.equal(optimizer.state[net.used.weight]["exp_avg"], saved[0]["exp_avg"])
    assert not optimizer.state[net.unused.weight]["exp_avg"].any()
    assert len(checkpoint.report.kept) == 6
    assert all("unused" in name for name in checkpoint.report.kept)
    assert "state.unused.weight.exp_avg" in caplog.text


def test_a_weight_or_a_whole_optimizer_that_is_missing_is_still_an_error(repository):
    net, optimizer = make()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    full, _ = state_of(net, optimizer, flat=False)
    repository.models.save("weights", {"model": full["model"]}, step=1)
    repository.models.save("part", {**full, "model": {"used.weight": full["model"]["used.weight"]}}, step=1)
    broken = {**full["optimizer"], "state": {**full["optimizer"]["state"], "unused.weight": {"step": torch.ones(())}}}
    repository.models.save("broken", {**full, "optimizer": broken}, step=1)
    net, optimizer = make()  # of which get_state_dict makes the states of all parameters
    full, _ = state_of(net, optimizer, flat=False)
    for name, missing in (("weights", "optimizer.state"), ("part", "model.unused"), ("broken", "exp_avg_sq")):
        before = net.used.weight.clone()
        with pytest.raises(ConfigError, match=rf"(?s)nothing was restored.*{missing}"):
            repository.models.restore(name, into=full)
        assert torch.equal(net.used.weight, before)
    checkpoint = repository.models.restore("part", into=full, strict=False)
    assert {"model.used.bias", "model.unused.weight", "model.unused.bias"} <= set(checkpoint.report.kept)


def test_parts_of_the_state_are_left_as_they_are(repository):
    """A new head keeps its values, and a new optimizer its settings; all else is resumed."""
    saved = {"model": {"body": torch.ones(2), "head": torch.ones(3)}, "optimizer": {"lr": 0.1, "m": torch.ones(2)}}
    repository.models.save("m", saved, step=1)

    def into():
        model = {"body": torch.zeros(2), "head": torch.zeros(4)}
        return {"model": model, "optimizer": {"lr": 0.5, "m": torch.zeros(2)}}

    state = repository.models.restore("m", into=into(), exclude=["model.head", "optimizer"]).state
    assert state["model"]["body"].tolist() == [1, 1]
    assert state["model"]["head"].tolist() == [0] * 4
    assert (state["optimizer"]["lr"], state["optimizer"]["m"].tolist()) == (0.5, [0, 0])
    state = repository.models.restore("m", into=into(), only=["optimizer"]).state
    assert (state["optimizer"]["lr"], state["optimizer"]["m"].tolist()) == (0.1, [1, 1])
    assert state["model"]["body"].tolist() == [0, 0]
    with pytest.raises(ConfigError, match="no tensor matches 'heads'"):
        repository.models.restore("m", into=into(), exclude=["heads"])
    checkpoint = repository.models.restore("m", into=into(), strict=False)
    assert checkpoint.report.kept == ("model.head",)
