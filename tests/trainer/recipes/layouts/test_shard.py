"""What sharding and the recomputation of activations keep, in one process."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import datasvc.trainer as hvd
from datasvc.trainer.recipes.layouts import shard
from datasvc.trainer.recipes.layouts.shard import offload_activations, recompute_activations, shard_parameters


@pytest.fixture(autouse=True)
def initialised():
    hvd.init()
    yield
    hvd.shutdown()


def train(*, recompute, momentum=0.1, synchronised=False, compiled=False):
    """Return the state and the gradients of two units with batch normalisation after two steps."""
    torch.manual_seed(0)
    units = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, momentum=momentum), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(*(nn.ModuleDict({"layers": unit}) for unit in units))
    for unit, layers in zip(model, units, strict=True):
        unit.forward = layers.forward
    if synchronised:
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    if recompute:
        recompute_activations(model)
    if compiled:
        model.compile(backend="aot_eager")
    for _ in range(2):
        model(torch.randn(8, 5)).square().sum().backward()
    return model.state_dict() | {f"{name}.grad": each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"synchronised": True}, {"compiled": True}])
def test_recomputation_tracks_batch_statistics_once(options):
    expected, found = train(recompute=False, **options), train(recompute=True, **options)
    assert int(found["0.layers.1.num_batches_tracked"]) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_unit_is_recomputed_by_each_backward_pass():
    """The schedule zbv runs two: one for the gradients of inputs, one for those of weights."""
    unit = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    model = nn.Sequential(unit)
    recompute_activations(model)
    loss = model(torch.randn(8, 5, requires_grad=True)).square().sum()
    loss.backward(retain_graph=True)
    first = unit[0].weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(unit[0].weight.grad, 2 * first)
    assert int(unit[1].num_batches_tracked) == 1


@pytest.mark.parametrize(("recompute", "num_calls"), [(False, 1), (True, 2)])
def test_a_unit_is_computed_twice_in_a_step_only_with_recomputation(recompute, num_calls):
    calls = []
    # The layer inside, because the unit's own method is replaced.
    layers = [nn.Linear(5, 5) for _ in range(2)]
    for layer in layers:
        layer.register_forward_hook(lambda module, *_: calls.append(module))
    model = nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers))
    if recompute:
        recompute_activations(model)
    model(torch.randn(8, 5)).square().sum().backward()
    assert [calls.count(layer) for layer in layers] == [num_calls] * 2
    assert calls[:2] == layers


@pytest.mark.parametrize("synchronised", [False, True])
def test_activations_in_host_memory_change_no_bit(monkeypatch, synchronised):
    expected = train(recompute=False, synchronised=synchronised)
    monkeypatch.setattr(shard, "_recompute", lambda unit, forward, *args: shard._offload(unit, forward, False, *args))
    found = train(recompute=True, synchronised=synchronised)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_the_activations_of_each_unit_are_copied_and_its_weights_are_not(monkeypatch):
    copied = []
    copy = torch.autograd.graph.save_on_cpu

    def record(*, pin_memory):
        hooks = copy(pin_memory=pin_memory)
        pack = hooks.pack_hook
        hooks.pack_hook = lambda tensor: copied.append(tuple(tensor.shape)) or pack(tensor)
        return hooks

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", record)
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), nn.Linear(3, 2))
    offload_activations(model, pin_memory=False)
    model(torch.randn(8, 5)).sum().backward()
    assert copied == [(8, 5), (8, 7)]
    with torch.no_grad():
        model(torch.randn(8, 5))
    assert len(copied) == 2


class CastCounter(TorchDispatchMode):
    """Counts the copies to bfloat16."""

    number = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        options = options or {}
        self.number += operation is torch.ops.aten._to_copy.default and options.get("dtype") == torch.bfloat16
        return operation(*arguments, **options)


@pytest.mark.parametrize(("zero", "casts_again"), [(2, False), (3, True)])
def test_autocast_keeps_no_copies_of_freed_parameters(zero, casts_again):
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5)) for _ in range(2)))
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        shard_parameters(model, mesh, reshard_after_forward=zero == 3, offload=False)
        x = torch.randn(2, 5, dtype=torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16), CastCounter() as counter:
            model(x)
            first = counter.number
            model(x)
        assert first > 0
        assert (counter.number == 2 * first) == casts_again
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("offload", "policy"), [(False, OffloadPolicy), (True, CPUOffloadPolicy)])
@pytest.mark.parametrize("reshard", [False, True])
def test_every_unit_and_the_model_are_sharded_with_the_given_options(monkeypatch, reshard, offload, policy):
    calls = []
    monkeypatch.setattr(shard, "fully_shard", lambda module, **options: calls.append((module, options)))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5)) for _ in range(2)))
    mesh = SimpleNamespace(device_type="cpu")
    shard_parameters(model, mesh, reshard_after_forward=reshard, offload=offload)
    assert [module for module, _ in calls] == [*model, model]
    for _, options in calls:
        assert options["mesh"] is mesh
        assert options["reshard_after_forward"] == reshard
        assert type(options["offload_policy"]) is policy
