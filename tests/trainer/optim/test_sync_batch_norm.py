"""SyncBatchNorm in a world of one, where it is torch's BatchNorm. Among ranks: see the distributed programs."""

import copy

import pytest
import torch
from torch import nn

import datasvc.trainer as hvd


def test_alone_it_is_batch_norm_and_evaluation_needs_no_job():
    ours, theirs = hvd.SyncBatchNorm(3, momentum=None), nn.BatchNorm2d(3, momentum=None)
    hvd.init()
    for seed in range(3):
        x = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(ours(x), theirs(x))
    hvd.shutdown()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_without_running_statistics_evaluation_takes_the_batch_s():
    x = torch.randn(4, 3)
    ours, theirs = (kind(3, track_running_stats=False).eval() for kind in (hvd.SyncBatchNorm, nn.BatchNorm1d))
    torch.testing.assert_close(ours(x), theirs(x))


def test_training_needs_a_job():
    with pytest.raises(ValueError, match="not initialized"):
        hvd.SyncBatchNorm(3)(torch.randn(4, 3))


def test_a_copy_and_a_state_dict_are_like_any_module_s():
    module = hvd.SyncBatchNorm(3)
    module.running_mean += 1
    clone = copy.deepcopy(module)
    fresh = nn.BatchNorm1d(3)
    fresh.load_state_dict(clone.state_dict())
    assert fresh.running_mean.tolist() == [1.0, 1.0, 1.0]
