"""Integers that are reduced over ranks, next to a rank that has the same values; real ranks are in operations.py."""

import pytest
import torch

from datasvc.trainer.engine.engine import Engine
from datasvc.trainer.engine.execution.handles import Handle, Submission
from datasvc.trainer.engine.execution.transport import CompletedWork, Transport
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp, Request
from datasvc.trainer.env.environment import EngineSettings


class MirroredTransport(Transport):
    """A rank whose partner submits and sends the same."""

    size = 2

    def exchange(self, data):
        return [data, data]

    def begin_allreduce(self, tensor, op, process_set):  # noqa: ARG002 - the transport's signature
        if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            tensor.mul_(2)
        elif op is ReduceOp.PRODUCT:
            tensor.mul_(tensor.clone())
        return CompletedWork()

    def reducescatter(self, output, inputs, process_set):  # noqa: ARG002
        output.copy_(inputs[0]).mul_(2)


@pytest.fixture
def engine():
    engine = Engine(MirroredTransport(), EngineSettings())
    yield engine
    engine.close()


def submit(engine, *tensors, op=ReduceOp.AVERAGE, kind=CollectiveKind.ALLREDUCE, name="x", **factors):
    tensors = [torch.as_tensor(tensor) for tensor in tensors]
    rows = slice(None) if kind is CollectiveKind.ALLREDUCE else slice(len(tensors[0]) // 2)
    outputs = tuple(torch.zeros_like(tensor[rows]) for tensor in tensors)
    request = Request(
        name=name,
        kind=kind,
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        reduce_op=op,
        is_grouped=len(tensors) > 1,
        **factors,
    )
    handle = Handle(name)
    engine.submit(Submission(request=request, inputs=tuple(tensors), outputs=outputs, result=outputs, handle=handle))
    return handle


def reduce(engine, *tensors, **options):
    return [output.tolist() for output in submit(engine, *tensors, **options).wait()]


LIMITS = [(dtype, torch.iinfo(dtype)) for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)]
KINDS = (CollectiveKind.ALLREDUCE, CollectiveKind.REDUCESCATTER)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "limits"), LIMITS)
def test_the_average_of_equal_integers_is_that_integer(engine, dtype, limits, kind):
    """horovod/horovod#2054, NVIDIA/nccl#422: the sum behind an average leaves the type, and the average is wrong."""
    values = [limits.min, limits.min + 1, limits.max - 1, limits.max, 0, 7, limits.max // 2 + 1, limits.max]
    expected = values if kind is CollectiveKind.ALLREDUCE else values[:4]
    assert reduce(engine, torch.tensor(values, dtype=dtype), kind=kind) == [expected]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "limits"), LIMITS)
def test_a_sum_that_does_not_fit_is_an_error_on_all_ranks_and_the_next_operation_runs(engine, dtype, limits, kind):
    """NVIDIA/nccl#422: the sum of two int8 of 120 and 100 is what is left after the overflow."""
    large = torch.tensor([1, 1, limits.max // 2 + 1, 1], dtype=dtype)
    handle = submit(engine, large, op=ReduceOp.SUM, kind=kind)  # in rows of the other rank
    with pytest.raises(OverflowError, match=f"'x'.*Sum over the ranks does not fit {str(dtype)[6:]}"):
        handle.wait()
    fitting = torch.tensor([limits.max // 2, limits.min // 2, 0, 0], dtype=dtype)
    assert reduce(engine, fitting, op=ReduceOp.SUM)[0][:2] == [limits.max // 2 * 2, limits.min // 2 * 2]


def test_only_the_overflowing_operation_of_several_in_one_buffer_fails(engine):
    """horovod/horovod#3642: int8 sums, in a fusion buffer with others."""
    small, large = torch.tensor([3], dtype=torch.int8), torch.tensor([100], dtype=torch.int8)
    handles = [submit(engine, tensor, op=ReduceOp.SUM, name=str(i)) for i, tensor in enumerate((small, large, small))]
    assert [handles[i].wait()[0].item() for i in (0, 2)] == [6, 6]
    for operation in (handles[1].wait, lambda: reduce(engine, small, large, op=ReduceOp.SUM)):
        with pytest.raises(OverflowError, match="does not fit int8"):
            operation()


@pytest.mark.parametrize(
    ("op", "value", "factors", "expected"),
    [
        (ReduceOp.SUM, 100, {"prescale_factor": 0.5}, 100),
        (ReduceOp.SUM, 3, {"prescale_factor": 0.5}, 2),  # each rank's value is truncated, as in Horovod
        (ReduceOp.AVERAGE, 100, {"prescale_factor": 100.0, "postscale_factor": 0.01}, 100),
        (ReduceOp.AVERAGE, -100, {"postscale_factor": 2.0}, None),
        (ReduceOp.SUM, 100, {"prescale_factor": 1e300, "postscale_factor": 1e300}, None),
        (ReduceOp.MAX, 100, {"prescale_factor": 2.0}, None),
        (ReduceOp.PRODUCT, 11, {}, 121),
        (ReduceOp.PRODUCT, 12, {}, None),
    ],
)
def test_factors_and_products_of_integers_are_computed_before_they_must_fit(engine, op, value, factors, expected):
    """horovod/horovod#1699: values leave their type before they are scaled back."""
    tensor = torch.tensor([value], dtype=torch.int8)
    if expected is None:
        with pytest.raises(OverflowError, match="does not fit int8"):
            reduce(engine, tensor, op=op, **factors)
    else:
        assert reduce(engine, tensor, op=op, **factors) == [[expected]]
