"""Every operation against what torch computes from all ranks' inputs, which each rank can make itself."""

import enum
import itertools
import random

import numpy as np
import torch
from checking import raises, run_checks

import datasvc.trainer as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def input_of(rank, dtype=torch.float32, shape=(3, 5)):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def inputs(dtype=torch.float32, shape=(3, 5)):
    return [input_of(rank, dtype, shape) for rank in range(SIZE)]


class Colour(enum.Enum):
    RED = 1


def check_place():
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (RANK, SIZE, 0, 1)


def check_allreduce_of_every_type():
    for dtype in FLOATS + INTEGERS:
        total = torch.stack(inputs(dtype)).double().sum(0)
        mine = input_of(RANK, dtype)
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), total.to(dtype)), dtype
        assert torch.equal(mine, input_of(RANK, dtype)), "the input changed"
        average = hvd.allreduce(mine)
        assert average.dtype == dtype
        torch.testing.assert_close(average, (total / SIZE).to(dtype))


def check_integers_near_the_limits_of_their_type():
    for dtype in INTEGERS:
        limits, drawn = torch.iinfo(dtype), random.Random(str(dtype))
        columns = [[drawn.randint(limits.min, limits.max) for _ in range(SIZE)] for _ in range(50)]
        columns += [[limit] * SIZE for limit in (limits.min, limits.max)]
        mine = torch.tensor([column[RANK] for column in columns], dtype=dtype)
        expected = [abs(sum(column)) // SIZE * (-1 if sum(column) < 0 else 1) for column in columns]
        assert hvd.allreduce(mine).tolist() == expected, dtype
        rows = hvd.reducescatter(mine, op=hvd.Average).tolist()
        assert [*itertools.chain(*hvd.allgather_object(rows))] == expected, dtype
        small = mine // (2 * SIZE)
        fitting = hvd.allreduce_async(small, op=hvd.Sum)
        refused = [
            hvd.allreduce_async(mine, op=hvd.Sum),
            hvd.reducescatter_async(mine, op=hvd.Sum),
            hvd.grouped_allreduce_async([small, mine], op=hvd.Sum, postscale_factor=3.0),
        ]
        assert hvd.synchronize(fitting).tolist() == [
            sum(number) for number in zip(*hvd.allgather_object(small.tolist()), strict=True)
        ]
        for handle in refused:
            with raises(OverflowError, f"does not fit {str(dtype).removeprefix('torch.')}"):
                hvd.synchronize(handle)


def check_other_reductions():
    stacked = torch.stack(inputs())
    assert torch.equal(hvd.allreduce(input_of(RANK), op=hvd.Min), stacked.amin(0))
    assert torch.equal(hvd.allreduce(input_of(RANK), op=hvd.Max), stacked.amax(0))
    assert torch.equal(hvd.allreduce(input_of(RANK), op=hvd.Product), stacked.prod(0))


def check_negative_integers_are_averaged_toward_zero():
    average = hvd.allreduce(torch.tensor([-1 if RANK else -4]))
    assert average.item() == int((-4 - (SIZE - 1)) / SIZE)


def check_factors_come_before_and_after():
    result = hvd.allreduce(input_of(RANK), op=hvd.Max, prescale_factor=-2.0, postscale_factor=0.5)
    assert torch.equal(result, (torch.stack(inputs()) * -2.0).amax(0) * 0.5)


def check_shapes_and_layouts():
    for shape in ((), (0,), (0, 3), (1,), (2, 1, 3)):
        total = torch.stack(inputs(shape=shape)).sum(0)
        assert torch.equal(hvd.allreduce(input_of(RANK, shape=shape), op=hvd.Sum), total)
    transposed = input_of(RANK).t()
    assert hvd.allreduce_(transposed, op=hvd.Sum) is transposed
    assert torch.equal(transposed, torch.stack(inputs()).sum(0).t())


def check_many_operations_in_a_different_order_on_every_rank():
    names = [f"shuffled.{i}" for i in range(40)]
    random.Random(RANK).shuffle(names)
    handles = {name: hvd.allreduce_async(torch.full((7,), float(name[9:])), name=name) for name in names}
    for name, handle in handles.items():
        assert torch.equal(hvd.synchronize(handle), torch.full((7,), float(name[9:])))
        assert hvd.poll(handle)


def check_groups():
    tensors = [input_of(RANK, shape=(n,)) for n in (1, 0, 5)] + [input_of(RANK, torch.int16)]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    expected = [torch.stack(inputs(shape=(n,))).sum(0) for n in (1, 0, 5)]
    expected.append(torch.stack(inputs(torch.int16)).sum(0).to(torch.int16))
    assert all(map(torch.equal, results, expected))
    in_place = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    assert all(a is b for a, b in zip(in_place, tensors, strict=True))
    assert all(map(torch.equal, tensors, expected))


def check_allgather():
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        assert torch.equal(hvd.allgather(input_of(RANK, dtype)), torch.cat(inputs(dtype)))
    for rows in (lambda rank: rank, lambda rank: 3 * (SIZE - rank), lambda _: 0):
        mine = input_of(RANK, shape=(rows(RANK), 2))
        expected = torch.cat([input_of(rank, shape=(rows(rank), 2)) for rank in range(SIZE)])
        assert torch.equal(hvd.allgather(mine), expected)


def check_broadcast():
    for root in range(SIZE):
        for dtype in (*FLOATS, *INTEGERS, torch.bool):
            mine = input_of(RANK, dtype)
            assert torch.equal(hvd.broadcast(mine, root), input_of(root, dtype))
            assert torch.equal(mine, input_of(RANK, dtype)), "the input changed"
        strided = input_of(RANK).t()
        assert hvd.broadcast_(strided, root) is strided
        assert torch.equal(strided, input_of(root).t())
        assert hvd.broadcast(torch.tensor(RANK), root).item() == root


def check_objects():
    assert hvd.broadcast_object({"rank": RANK}, SIZE - 1) == {"rank": SIZE - 1}
    assert hvd.allgather_object("x" * RANK * 1000) == ["x" * rank * 1000 for rank in range(SIZE)]
    add = hvd.broadcast_object(lambda x: x + 1, 0)
    assert add(1) == 2
    functions = hvd.allgather_object(lambda rank=RANK: rank)
    assert [function() for function in functions] == list(range(SIZE))
    colour = hvd.broadcast_object(Colour.RED, 0)
    assert colour is Colour.RED, "a class of the program has become another one"


def check_gradients():
    x = torch.ones(RANK + 1, 2, requires_grad=True)
    weights = torch.arange(float(sum(range(SIZE + 1)))).unsqueeze(1)
    (hvd.allgather(x) * weights).sum().backward()
    start = sum(range(RANK + 1))
    assert torch.equal(x.grad, weights[start : start + RANK + 1].expand(-1, 2))
    y = torch.ones(3, requires_grad=True)
    (hvd.allreduce(y, op=hvd.Sum, prescale_factor=2.0) * (RANK + 1)).sum().backward()
    assert torch.equal(y.grad, torch.full((3,), 2.0 * sum(range(SIZE + 1))))
    z = torch.ones(3, requires_grad=True)
    (hvd.broadcast(z, 1) * (RANK + 1)).sum().backward()
    assert torch.allclose(z.grad, torch.full((3,), sum(range(SIZE + 1)) / SIZE if RANK == 1 else 0.0))


def check_optimizers_with_other_parameter_groups_are_refused_on_every_rank():
    """facebookresearch/detectron2#898: a restored optimizer has another number of groups."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    adam = torch.optim.Adam(net[1].parameters())
    if RANK == 0:
        adam.add_param_group({"params": net[0].weight})
    with raises(ValueError, "2 parameter groups of 2, 1 parameters; rank 1 has 1 parameter groups of 2 parameters"):
        hvd.broadcast_optimizer_state(adam, 0)


def check_disagreements_fail_on_every_rank_and_the_engine_continues():
    odd = RANK == SIZE - 1
    one_says = f"rank {SIZE - 1}: "
    attempts = [
        (lambda: hvd.allreduce(torch.ones(3 if odd else 2), name="bad"), "shape", one_says + "(3,)"),
        (lambda: hvd.allreduce(torch.ones(2).to(torch.int32 if odd else torch.float32), name="bad"), "int32"),
        (
            lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum if odd else hvd.Max, name="bad"),
            "reduction",
            "Max",
        ),
        (lambda: hvd.allreduce(torch.ones(2), prescale_factor=RANK, name="bad"), "prescale factor"),
        (lambda: hvd.broadcast(torch.ones(2), int(odd), name="bad"), "root rank", one_says + "1"),
        (lambda: hvd.broadcast(torch.ones(3 if odd else 2), 0, name="bad"), "shape"),
        (lambda: hvd.allgather(torch.ones(2, 3 if odd else 2), name="bad"), "shape after"),
        (lambda: hvd.grouped_allreduce([torch.ones(2)] * (1 + odd), name="bad"), "bad"),
    ]
    for attempt, *words in attempts:
        with raises(hvd.HorovodInternalError, *words):
            attempt()
        assert torch.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="bad"), torch.full((2,), float(SIZE)))


def check_a_name_in_flight_is_refused_and_a_barrier_completes_meanwhile():
    if RANK == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="early")
        with raises(ValueError, "still in flight"):
            hvd.allreduce_async(torch.ones(1), name="early")
    hvd.barrier()
    if RANK == 0:
        assert not hvd.poll(handle)
    else:
        handle = hvd.allreduce_async(torch.ones(1), name="early")
    assert hvd.synchronize(handle).item() == 1.0


def check_what_the_engine_cannot_do_is_refused_by_the_call():
    expanded = torch.ones(1).expand(4)
    with raises(ValueError, "an expanded tensor cannot be overwritten"):
        hvd.allreduce_(expanded)
    with raises(ValueError, "an expanded tensor"):
        hvd.broadcast_(expanded, 0)
    with raises(ValueError, "op must be one of"):
        hvd.allreduce(torch.ones(1), op="Sum")
    with torch.inference_mode():
        made = torch.ones(2)
        assert hvd.allreduce(made, op=hvd.Sum).tolist() == [SIZE, SIZE]
        assert hvd.broadcast(made, 0).tolist() == [1.0, 1.0]
        assert hvd.reducescatter(torch.ones(SIZE), op=hvd.Sum).tolist() == [SIZE]
        with raises(ValueError, "inference mode"):
            hvd.allreduce_(made)
    imaginary = torch.complex(torch.ones(1), torch.ones(1)).conj()
    assert hvd.allgather(imaginary).imag.tolist() == [-1.0] * SIZE
    assert hvd.broadcast(imaginary, np.int64(0)).imag.item() == -1.0


def check_booleans():
    ones = hvd.allreduce(torch.tensor([True, RANK == 0, False]), op=hvd.Sum)
    assert ones.view(torch.uint8).tolist() == [1, 1, 0]
    assert hvd.allreduce(torch.tensor([True, RANK == 0]), op=hvd.Min).tolist() == [True, False]


def check_long_messages_and_large_tensors():
    names = [f"{'long' * 30}.{i}" for i in range(100)]
    handles = [hvd.allreduce_async(torch.ones(1), name=name, op=hvd.Sum) for name in names]
    assert all(hvd.synchronize(handle).item() == SIZE for handle in handles)
    large = torch.ones(3_000_000)
    assert torch.equal(hvd.allreduce(large, op=hvd.Sum), large * SIZE)


def check_broadcast_of_a_model_and_its_optimizer():
    torch.manual_seed(RANK)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (RANK + 1), betas=(0.5, 0.9 - RANK / 10))
    if RANK == 1:
        # Only the root has state, as after restoring a checkpoint there.
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    states = hvd.allgather_object((model.state_dict(), optimizer.state_dict()))
    for state in states:
        torch.testing.assert_close(state, states[1], rtol=0, atol=0)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.8)
    assert len(optimizer.state) == len(list(model.parameters()))
    before = next(iter(optimizer.state.values()))["exp_avg"]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert next(iter(optimizer.state.values()))["exp_avg"] is before, "not in place"


def check_parameters_without_names_are_broadcast_in_their_order():
    tensors = [torch.nn.Parameter(torch.full((n,), float(RANK))) for n in (2, 3)]
    hvd.broadcast_parameters(list(tensors), root_rank=1)
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 2, [1.0] * 3]
    hvd.broadcast_parameters(iter([(None, tensors[0]), ("b", tensors[1])]), root_rank=0)


def check_state_that_the_root_lacks_is_dropped():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    if RANK != 0:
        parameter.grad = torch.ones(2)
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.state_dict()["state"] == {}


run_checks(globals())
hvd.shutdown()
