"""What is different in the steps of a divided model."""

import pytest
import torch
from torch import nn

import datasvc.trainer as hvd
from datasvc.planning.layout import Layout, plan_layout
from datasvc.trainer.recipes.layouts import divided_model
from datasvc.trainer.recipes.layouts.divided_model import DividedModel, LayoutOptions, apply_layout


@pytest.fixture
def world_of_one():
    hvd.init()
    yield
    hvd.shutdown()


def make_divided():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 1))
    model[2].requires_grad_(False)
    model(torch.randn(5, 4)).square().sum().backward()
    return DividedModel(Layout(), plan_layout(Layout()).ranks[0], model, [model])


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_gradients_are_clipped_as_torch_clips_those_of_a_whole_model(max_norm):
    divided, whole = make_divided(), make_divided().model
    norm = divided.clip_gradients(max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), max_norm))
    for ours, theirs in zip(divided.model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.usefixtures("world_of_one")
def test_clipping_copies_to_the_host_once(monkeypatch):
    copied, copy = [], torch.Tensor.cpu

    def count(tensor):
        copied.append(tensor)
        return copy(tensor)

    divided = make_divided()
    monkeypatch.setattr(torch.Tensor, "cpu", count)
    divided.clip_gradients(1.0)
    assert len(copied) == 1


@pytest.mark.usefixtures("world_of_one")
def test_without_gradients_the_norm_is_0():
    divided = make_divided()
    divided.model.zero_grad()
    assert divided.clip_gradients(1.0) == 0


@pytest.mark.parametrize(("zero", "reshards"), [(2, False), (3, True)])
@pytest.mark.parametrize("offload", [False, True])
def test_the_stage_of_zero_and_offload_reach_the_engine(monkeypatch, zero, reshards, offload):
    calls = []
    mesh = {"shard": "the ranks of shard"}
    monkeypatch.setattr(divided_model, "init_device_mesh", lambda *_, **__: mesh)
    monkeypatch.setattr(
        divided_model, "shard_parameters", lambda *arguments, **options: calls.append((*arguments, options))
    )
    options = LayoutOptions(zero=zero, offload=offload)
    model = nn.Linear(2, 2)
    apply_layout(model, Layout(shard=2), options, rank=0, device=torch.device("cpu"))
    assert calls == [(model, mesh["shard"], {"reshard_after_forward": reshards, "offload": offload})]


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputation_reaches_the_engine(monkeypatch, recompute):
    calls = []
    monkeypatch.setattr(divided_model, "init_device_mesh", lambda *_, **__: {"shard": "the ranks of shard"})
    monkeypatch.setattr(divided_model, "shard_parameters", lambda *_, **__: None)
    monkeypatch.setattr(divided_model, "recompute_activations", calls.append)
    model = nn.Linear(2, 2)
    options = LayoutOptions(recompute=recompute)
    apply_layout(model, Layout(shard=2), options, rank=0, device=torch.device("cpu"))
    assert calls == ([model] if recompute else [])


def test_gradients_are_summed_over_data_in_messages_of_one_dtype(monkeypatch):
    monkeypatch.setattr(divided_model, "BUCKET_BYTES", 64)
    sent = []

    def double(total, *, group):
        assert group == "the ranks of data"
        sent.append((total.dtype, total.numel()))
        total.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", double)
    divided = make_divided()
    divided.model[1].bfloat16()
    for weight in divided.model[1].parameters():
        weight.grad = torch.ones_like(weight)
    divided.model[0].weight.grad = divided.model[0].weight.grad.t().contiguous().t()
    expected = [None if each.grad is None else 2 * each.grad for each in divided.model.parameters()]
    divided.sum_gradients()
    assert sent == []
    divided.groups = {"data": "the ranks of data"}
    divided.sum_gradients()
    assert sent == [(torch.float32, 32), (torch.float32, 8), (torch.bfloat16, 18)]
    for weight, gradient in zip(divided.model.parameters(), expected, strict=True):
        assert (weight.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=0)
