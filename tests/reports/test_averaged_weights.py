"""Weights that ranks average every few steps, and gradients that they compress: most with one rank, some with two."""

import sys
import warnings
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch

import datasvc.trainer as hvd
from datasvc.trainer.engine.negotiation.negotiation import Negotiation, Refused
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp, Request
from datasvc.trainer.function import run
from datasvc.trainer.gradients.gradient_bucket import GradientReduction

SYNCS = ("local:2", "easgd:2:0.5", "diloco:2", "diloco:4:fragments=2", "diloco:4:delay=1,codec=int8", "gossip:ring:2")
with_outer_weights = pytest.mark.parametrize("sync", [sync for sync in SYNCS if "o:" in sync or "easgd" in sync])
COMPRESSIONS = {
    "topk": hvd.Compression.topk(0.3),
    "dgc": hvd.Compression.dgc(0.3),
    "powersgd": hvd.Compression.powersgd(start_iteration=0, min_compression_rate=1e-9),
    **{codec: hvd.Compression.quantized(codec) for codec in ("int8", "int4", "onebit", "ternary", "qsgd")},
}


@pytest.fixture
def one_rank():
    hvd.init()
    yield
    hvd.shutdown()


def two_layers():
    torch.manual_seed(0)
    return torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)])


def averaging(parameters, sync, rate=0.1):
    return hvd.Averaging(torch.optim.SGD(parameters, lr=rate, momentum=0.5), sync)


def step(optimizer, gradient=1.0):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, gradient) if parameter.requires_grad else None
    optimizer.step()


@with_outer_weights
@pytest.mark.parametrize("change", ["freeze", "unfreeze", "add"])
@pytest.mark.usefixtures("one_rank")
def test_outer_weights_do_not_move_to_other_parameters(sync, change):
    """pytorch/pytorch#63340, learning-at-home/hivemind#243: a parameter group that is added later is not averaged."""
    first, second = two_layers()
    first.requires_grad_(change != "unfreeze")
    layers = [second] if change == "add" else [first, second]
    optimizer = averaging([weight for layer in layers for weight in layer.parameters()], sync)
    for _ in range(4):
        step(optimizer)
    if change == "add":
        optimizer.add_param_group({"params": list(first.parameters())})
    else:
        first.requires_grad_(change == "unfreeze")
    with pytest.raises(ValueError, match="before the first step, or end a round and wrap the optimizer"):
        step(optimizer)
    with pytest.raises(ValueError, match="before the first step"), optimizer.outer_weights():
        pass
    other = averaging([second.weight], "easgd:2:0.5")
    step(other)
    with pytest.raises(ValueError, match="the state has outer weights of 1 parameters"):
        optimizer.load_state_dict({**optimizer.state_dict(), "averaging": other.state_dict()["averaging"]})


@pytest.mark.usefixtures("one_rank")
def test_weights_are_not_averaged_twice_in_a_step():
    """pytorch/pytorch#74737: each parameter group counted a step, so rounds came too often."""
    first, second = two_layers()
    optimizer = hvd.Averaging(
        torch.optim.SGD([{"params": layer.parameters()} for layer in (first, second)]), "local:4"
    )
    optimizer.step()
    assert optimizer.num_steps == 1
    with pytest.raises(ValueError, match="averages weights already"):
        hvd.Averaging(optimizer, "local:2")


@pytest.mark.usefixtures("one_rank")
def test_the_warm_up_of_a_run_that_continues_is_not_made_again():
    """pytorch/pytorch#74556: the steps were counted from 0 again, so each restart had a warm-up."""
    saved, resumed = (averaging(two_layers().parameters(), "postlocal:5:4") for _ in range(2))
    for _ in range(7):
        step(saved)
    resumed.load_state_dict(saved.state_dict())
    rounds = []
    for _ in range(4):
        step(resumed)
        rounds.append(resumed.is_averaged)
    assert rounds == [False, True, False, False]


@pytest.mark.parametrize(
    "wrap", [hvd.DistributedOptimizer, partial(hvd.Averaging, sync="local:2")], ids=["gradients", "weights"]
)
@pytest.mark.usefixtures("one_rank")
def test_a_schedule_that_is_made_before_the_wrapping_does_not_warn_of_its_order(wrap):
    """horovod/horovod#2632: torch warned that the rate changes before the first step, which was made."""
    plain = torch.optim.SGD(two_layers().parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = wrap(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(("sync", "expected"), [("easgd:1:0.1", 0.1), ("diloco:1", 0.5)])
@pytest.mark.usefixtures("one_rank")
def test_changes_that_16_bits_cannot_hold_add_up(sync, expected):
    """learning-at-home/hivemind#476, TensorAuto/OpenTau#185: state in 16 bits loses what is below its last bit."""
    weight = torch.nn.Parameter(torch.full((4,), 0.75, dtype=torch.bfloat16))
    optimizer = hvd.Averaging(torch.optim.SGD([weight], lr=1.0), sync)
    for _ in range(20):
        step(optimizer, 2.0**-8)
    (outer,) = optimizer.state_dict()["averaging"]["outer"]["weights"]
    assert outer.dtype is torch.float32
    moved = (0.75 - outer) / (20 * 2.0**-8)
    assert (moved > expected).all()


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.usefixtures("one_rank")
def test_a_rank_that_gets_the_state_by_broadcast_is_in_the_same_round(sync):
    """pytorch/pytorch#78988, horovod/horovod#1774: only the rank that loaded a checkpoint had the number of steps."""
    root, other = averaging(two_layers().parameters(), sync), averaging(two_layers().parameters(), sync)
    for _ in range(5):
        step(root)
    other.adopt_shared_memory(root.shared_memory())  # as broadcast_optimizer_state does
    assert other.num_steps == 5
    states = [each.state_dict()["averaging"]["outer"] for each in (root, other)]
    if states[0] is not None:
        torch.testing.assert_close(states[1]["weights"], states[0]["weights"], rtol=0, atol=0)


def test_a_rank_without_data_does_not_add_zeros_to_weights():
    """horovod/horovod#832, pytorch/pytorch#54318: the early rank adds zeros, which halved the averaged weights."""
    negotiation = Negotiation(2)
    mean = Request(name="mean", kind=CollectiveKind.ALLREDUCE, dtypes=("float32",), shapes=((3,),), is_grouped=True)
    mean = replace(mean, reduce_op=ReduceOp.SUM, round="step 4 of local:2")
    (outcome,) = negotiation.advance([(mean,), (Request(name="join", kind=CollectiveKind.JOIN),)])
    assert isinstance(outcome, Refused)
    assert "rank 1 joined, and has no weights to average" in outcome.reason


@pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS)
@pytest.mark.usefixtures("one_rank")
def test_one_gradient_that_overflows_does_not_spoil_all_later_ones(compression):
    """deepspeedai/DeepSpeed#753: after an overflow the residual stayed NaN, and each step halved the loss scale."""
    weight, memory = torch.nn.Parameter(torch.zeros(24, 24)), {}
    bucket = compression.make_bucket("bucket", {0: weight}, GradientReduction(), memory)
    are_finite = []
    for factor in (1.0, float("inf"), float("nan"), 1.0, 1.0):
        bucket.drop()
        weight.grad = torch.arange(576.0).view(24, 24) * factor
        bucket.launch()
        bucket.send_second()
        bucket.collect()
        are_finite.append(bool(weight.grad.isfinite().all()))
    assert are_finite == [True, False, False, True, True]


def disagree_on_two_ranks():
    """Return what each rank was told."""
    hvd.init()
    told = {}
    for name, compression in COMPRESSIONS.items():
        weights = [torch.nn.Parameter(torch.zeros(2, 6)), torch.nn.Parameter(torch.zeros(6, 2))]
        ordered = weights if hvd.rank() else weights[::-1]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ordered, lr=1.0), compression=compression)
        for weight in weights:
            weight.sum().backward()
        told[name] = _error_of(optimizer.step)
    for sync in SYNCS:
        weights = list(two_layers().parameters())
        optimizer = averaging(weights if hvd.rank() else weights[::-1], sync)
        told[sync] = _error_of(lambda optimizer=optimizer: [step(optimizer) for _ in range(4)])
        hvd.barrier()
    for sync in SYNCS[1:5]:
        weights = list(two_layers().parameters())
        weights[2].data += hvd.rank()  # of the last fragment
        optimizer = averaging(weights, sync)
        told[f"{sync} from other weights"] = _error_of(
            lambda optimizer=optimizer: [step(optimizer) for _ in range(4)]
        )
        hvd.barrier()
    without_gradient, *_ = weights = list(two_layers().parameters())
    optimizer = averaging(weights, "local:2")
    for _ in range(2):
        for weight in weights[hvd.rank() :]:  # rank 1 has none for the first
            weight.grad = torch.full_like(weight, 1.0)
        optimizer.step()
    return told, without_gradient.tolist()


def _error_of(action):
    try:
        action()
    except hvd.HorovodInternalError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_ranks_with_other_orders_of_parameters_or_other_first_weights_get_an_error_instead_of_mixed_weights():
    """pytorch/pytorch#74894: which parameters a rank averaged depended on which had gradients there.

    PrimeIntellect-ai/prime-diloco#13: ranks began with other weights, which stayed apart in all rounds.
    """
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        results = run(disagree_on_two_ranks, np=2)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    (told, weight), (told_to_other, same_weight) = results
    assert told == told_to_other
    assert {name for name, error in told.items() if "ranks disagree on the" not in str(error)} == set()
    assert weight == same_weight
