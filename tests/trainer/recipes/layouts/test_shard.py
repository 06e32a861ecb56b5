"""The recomputation of activations."""

import pytest
import torch
from torch import nn

import datasvc.trainer as hvd
from datasvc.trainer.recipes.layouts.shard import recompute_activations


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
