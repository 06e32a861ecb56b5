"""One rank over torch.distributed: its tensors go through gloo, and through NCCL where they lie on a GPU."""

import datetime as dt

import pytest
import torch
import torch.distributed as dist
from torch import nn

import datasvc.trainer as hvd
from datasvc.trainer.engine.execution.transport import GroupTransport, HierarchicalWork, NodeGroups
from datasvc.trainer.gradients.bucket_tuner import BucketTuner
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import global_process_set
from datasvc.trainer.optim.sync_batch_norm import _Normalize
from tests.support.devices import CUDA, DEVICES

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """The device of a job of one rank that sends its tensors all the same."""
    backend = "cpu:gloo,cuda:nccl" if request.param == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=dt.timedelta(seconds=60))

    def connect(place, settings):
        gpu = "the only one" if request.param == "cuda" else ""
        return GroupTransport(settings, gpu=gpu, local_size=1), False

    monkeypatch.setattr(runtime, "_connect", connect)
    hvd.init()
    yield request.param
    hvd.shutdown()
    dist.destroy_process_group()


def busy(device):
    """Keep the current stream of a device at work for some tenths of a second."""
    if device == "cuda":
        torch.cuda._sleep(300_000_000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operation_gives_back_what_a_single_rank_gave(device, dtype):
    rows = torch.arange(12).reshape(4, 3).to(dtype).to(device)
    turned = rows.t()  # not contiguous
    for tensor in (rows, turned, rows[:0]):
        for found in (
            hvd.allreduce(tensor, op=hvd.Sum),
            hvd.broadcast(tensor, 0),
            hvd.allgather(tensor),
            hvd.alltoall(tensor),
            hvd.reducescatter(tensor, op=hvd.Sum),
            hvd.grouped_allreduce([tensor, tensor], op=hvd.Max)[1],
        ):
            assert found.device == tensor.device
            torch.testing.assert_close(found, tensor, rtol=0, atol=0)
            assert not found.numel() or found.data_ptr() != tensor.data_ptr()


def test_an_operation_waits_for_what_its_input_still_waits_for_and_its_user_for_it(device):
    numbers = torch.zeros(1 << 16, device=device)
    for step in range(1, 4):
        busy(device)
        numbers += 1  # queued, not done
        handle = hvd.allreduce_async(numbers, op=hvd.Sum)
        total = hvd.synchronize(handle) * 2
        assert total.unique().tolist() == [2 * step]


def test_gradients_flow_through_operations(device):
    x = torch.ones(2, 2, device=device, requires_grad=True)
    (hvd.allreduce(x, prescale_factor=3.0) + hvd.allgather(x) + hvd.broadcast(x, 0)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 5.0, device=device))


@pytest.mark.parametrize(("compression", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_what_travels_as_16_bits_comes_back_as_it_was_on_its_device(device, compression, dtype):
    numbers = torch.linspace(-3, 3, 1001, device=device)
    found = hvd.allreduce(numbers, compression=getattr(hvd.Compression, compression))
    assert (found.dtype, found.device) == (numbers.dtype, numbers.device)
    assert torch.equal(found, numbers.to(dtype).float())


def test_parameters_and_states_of_an_optimizer_are_broadcast_where_they_lie(device):
    model = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.5, 0.75))
    model(torch.ones(1, 3, device=device)).sum().backward()
    optimizer.step()
    before = [value.clone() for value in (*model.state_dict().values(), *moments(optimizer))]
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    after = [*model.state_dict().values(), *moments(optimizer)]
    assert all(torch.equal(a, b) and a.device.type == device for a, b in zip(before, after, strict=True))
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)


def moments(optimizer):
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def test_objects_with_tensors_of_a_device_are_broadcast(device):
    found = hvd.broadcast_object({"weights": torch.arange(3, device=device), "step": 7})
    assert (found["weights"].tolist(), found["step"]) == ([0, 1, 2], 7)


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_a_wrapped_optimizer_with_a_loss_scale_steps_like_the_plain_one(device, compression):
    models = [nn.Linear(4, 2).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, wrapped = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models)
    wrapped = hvd.DistributedOptimizer(
        wrapped, models[1].named_parameters(), compression=getattr(hvd.Compression, compression)
    )
    scales = [torch.amp.GradScaler(device, init_scale=8.0) for _ in range(2)]
    for _ in range(3):
        for model, optimizer, scale in zip(models, (plain, wrapped), scales, strict=True):
            optimizer.zero_grad()
            scale.scale(model(torch.ones(2, 4, device=device)).square().mean()).backward()
            if optimizer is wrapped:
                optimizer.synchronize()
                scale.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scale.step(optimizer)
            else:
                scale.step(optimizer)
            scale.update()
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_statistics_that_are_summed_over_ranks_normalise_as_batch_norm_does(device, dtype, memory_format):
    """A single rank would take torch's own way; this is that of several."""
    theirs = nn.BatchNorm2d(5).to(device)
    nn.init.uniform_(theirs.weight, 0.5, 1.5)
    weight, bias = (each.detach().clone().requires_grad_() for each in (theirs.weight, theirs.bias))
    start = (torch.randn(6, 5, 4, 4) * 3 + 10).to(device, dtype).to(memory_format=memory_format)
    mine, others = start.clone().requires_grad_(), start.float().requires_grad_()
    output, mean, variance, count = _Normalize.apply(mine, weight, bias, theirs.eps, "normalise", global_process_set)
    expected = theirs(others)
    assert (output.dtype, output.device, output.is_contiguous(memory_format=memory_format)) == (
        dtype,
        mine.device,
        True,
    )
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(output.float(), expected, rtol=tolerance, atol=tolerance)
    slope = torch.linspace(0, 1, output.numel(), device=device).view(output.shape)
    (output.float() * slope).sum().backward()
    (expected * slope).sum().backward()
    for ours, wanted in ((mine, others), (weight, theirs.weight), (bias, theirs.bias)):
        torch.testing.assert_close(ours.grad.float(), wanted.grad, rtol=10 * tolerance, atol=10 * tolerance)
    torch.testing.assert_close(mean.float(), others.detach().mean((0, 2, 3)), rtol=1e-3, atol=1e-3)
    assert (count.item(), variance.shape) == (96.0, (5,))


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_tensors_of_the_processor_and_of_the_gpu_travel_side_by_side(device):
    handles = [
        hvd.allreduce_async(torch.full((8,), float(number), device=("cpu", device)[number % 2]), op=hvd.Sum)
        for number in range(6)
    ]
    found = [hvd.synchronize(handle) for handle in handles]
    assert [each[0].item() for each in found] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [each.device.type for each in found] == ["cpu", "cuda"] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_hierarchical_sum_over_one_rank_is_its_tensor(device, dtype):
    tensor = torch.arange(6).to(dtype).to(device)
    groups = NodeGroups(dist.group.WORLD, dist.group.WORLD, dist.group.WORLD)
    HierarchicalWork(groups, tensor, torch.empty_like(tensor)).wait()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_gradients_and_all_reduces_are_timed_where_the_parameters_lie(device):
    tuner = BucketTuner(global_process_set, torch.bfloat16)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).to(device)
    parameters = dict(enumerate(model.parameters()))
    # A world of one chooses nothing, but measures as among many.
    for position in reversed(parameters):
        tuner.record(position, parameters[position])
    tuner._choose(parameters, 1 << 30)
    assert 0 < tuner.bucket_bytes <= sum(parameter.numel() * 4 for parameter in parameters.values())
    assert tuner.cost.seconds(1 << 20) > 0
