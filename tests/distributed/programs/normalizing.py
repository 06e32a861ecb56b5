"""SyncBatchNorm against torch's BatchNorm on the batches of all ranks put together."""

import itertools

import torch
from checking import raises, run_checks
from torch import nn

import datasvc.trainer as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
CHANNELS = 5


def parts(step=0, shape=(4, 4), uneven=True, dtype=torch.float32, empty=None):
    """What each rank has: ranks differ in the number of samples."""
    generator = torch.Generator().manual_seed(step)
    sizes = [0 if rank == empty else 3 + (rank if uneven else 0) for rank in range(SIZE)]
    return [(torch.randn(n, CHANNELS, *shape, generator=generator) * 3 + 100.0).to(dtype) for n in sizes]


def pair(**options):
    torch.manual_seed(1)
    ours, theirs = hvd.SyncBatchNorm(CHANNELS, **options), nn.BatchNorm2d(CHANNELS, **options)
    if options.get("affine", True):
        for parameter in theirs.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def weigh(output, x):
    """A loss with a different slope everywhere."""
    return (output.float() * torch.linspace(0, 1, x.shape[1:].numel()).view(x.shape[1:])).square().sum()


def assert_alike(ours, theirs, inputs, tolerance=2e-4, memory_format=torch.contiguous_format):
    """Two forward passes in flight, then their backward passes."""
    mine, whole, losses = [], [], [[], []]
    for each in inputs:
        x = each[RANK].clone(memory_format=memory_format).requires_grad_()
        everything = torch.cat(each).requires_grad_()
        output, expected = ours(x), theirs(everything)
        assert output.dtype == x.dtype
        if memory_format is torch.channels_last:
            assert output.is_contiguous(memory_format=memory_format)
        start = sum(len(part) for part in each[:RANK])
        torch.testing.assert_close(output, expected[start : start + len(x)], rtol=tolerance, atol=tolerance)
        losses[0].append(weigh(output, x))
        losses[1].append(weigh(expected, everything))
        mine.append((x, start))
        whole.append(everything)
    sum(losses[0]).backward()
    sum(losses[1]).backward()
    for (x, start), everything in zip(mine, whole, strict=True):
        expected = everything.grad[start : start + len(x)]
        torch.testing.assert_close(x.grad, expected, rtol=10 * tolerance, atol=10 * tolerance)
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        total = hvd.allreduce(parameter.grad, op=hvd.Sum)
        torch.testing.assert_close(total, expected.grad, rtol=10 * tolerance, atol=10 * tolerance)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=tolerance, atol=tolerance)


def check_it_equals_batch_norm_on_all_batches():
    for momentum, affine, track in itertools.product((0.1, None), (True, False), (True, False)):
        ours, theirs = pair(momentum=momentum, affine=affine, track_running_stats=track)
        assert_alike(ours, theirs, [parts(0), parts(1)])


def check_other_numbers_of_dimensions():
    for kind, shape in ((nn.BatchNorm1d, ()), (nn.BatchNorm1d, (7,)), (nn.BatchNorm3d, (2, 3, 2))):
        assert_alike(hvd.SyncBatchNorm(CHANNELS), kind(CHANNELS), [parts(shape=shape)])


def check_channels_last_and_other_types():
    assert_alike(*pair(), [parts()], memory_format=torch.channels_last)
    ours, theirs = pair()
    assert_alike(ours.double(), theirs.double(), [parts(dtype=torch.float64)], tolerance=1e-9)
    x = (parts()[RANK] - 100).bfloat16().requires_grad_()
    y = ours.float()(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert ours.weight.grad.dtype == torch.float32


def check_a_rank_without_samples_takes_part():
    assert_alike(*pair(), [parts(empty=0)])


def check_evaluation_communicates_nothing():
    ours, theirs = pair()
    assert_alike(ours, theirs, [parts()])
    if RANK == 0:
        x = torch.randn(2, CHANNELS, 3, 3)
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-4)
    hvd.barrier()


def check_several_in_one_model_are_trained_like_one_process():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(CHANNELS, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 1),
            nn.BatchNorm2d(4),
            nn.Flatten(),
        )

    alone, model = network(), hvd.SyncBatchNorm.convert_sync_batchnorm(network())
    assert [isinstance(module, hvd.SyncBatchNorm) for module in model] == [False, True, False, False, True, False]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        each = [part - 100 for part in parts(step, uneven=False)]
        for net, opt, x in ((model, optimizer, each[RANK]), (alone, plain, torch.cat(each))):
            opt.zero_grad()
            (net(x) - 0.5).pow(3).mean().backward()
            opt.step()
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=1e-4, atol=1e-4)


def check_conversion_keeps_what_there_is():
    plain = nn.BatchNorm1d(3, eps=0.1, momentum=None, affine=False, track_running_stats=True).eval()
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert (converted.eps, converted.momentum, converted.weight, converted.training) == (0.1, None, None, False)
    assert converted.running_mean is plain.running_mean
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(converted) is converted
    affine = nn.BatchNorm1d(3)
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(affine).weight is affine.weight


def check_misuse_is_an_error_on_every_rank():
    with raises(ValueError, "two dimensions"):
        hvd.SyncBatchNorm(3)(torch.ones(3))
    with raises(ValueError, "more than 1 value per channel"):
        hvd.SyncBatchNorm(3)(torch.ones(1 if RANK == 0 else 0, 3))
    hvd.barrier()


def check_a_process_set_has_its_own_batch():
    some = hvd.add_process_set([0, SIZE - 1] if SIZE > 2 else [0])
    each = parts(uneven=False)
    ours = hvd.SyncBatchNorm(CHANNELS, process_set=some)
    together = torch.cat([each[rank] for rank in some.ranks]) if some.included() else each[RANK]
    expected = nn.BatchNorm2d(CHANNELS)(together)
    start = len(each[0]) if some.included() and some.rank() else 0
    torch.testing.assert_close(ours(each[RANK]), expected[start : start + len(each[RANK])], rtol=1e-3, atol=1e-3)
    hvd.remove_process_set(some)


def check_a_joined_rank_does_no_harm():
    ours, theirs = pair()
    if RANK == 0:
        torch.testing.assert_close(ours(parts()[0]), theirs(parts()[0]), rtol=1e-3, atol=1e-3)
    hvd.join()


run_checks(globals())
hvd.shutdown()
