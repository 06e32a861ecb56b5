"""Gradients in a world of one, with buckets as among many: an elastic job hooks its parameters there too."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import datasvc.trainer as hvd
from datasvc.trainer.gradients.compression import Compressor, take_largest
from datasvc.trainer.gradients.compression_with_memory import RESIDUAL, VELOCITY
from datasvc.trainer.gradients.gradient_bucket import DenseBucket, GradientReduction, view_like
from datasvc.trainer.gradients.gradient_reducer import Exchange, GradientReducer
from tests.examples import examples


@pytest.fixture(autouse=True)
def world():
    hvd.init()
    yield
    hvd.shutdown()


def reducer_of(model, passes_per_step=1, **options):
    parameters = dict(enumerate(model.parameters()))
    options.setdefault("reduction", GradientReduction())
    exchange = Exchange(**options)
    names = {i: f"p{i}" for i in parameters}
    return GradientReducer(
        parameters, names, exchange=exchange, passes_per_step=passes_per_step, name="test"
    ), exchange


def gradients_of(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def backward(model, x=None):
    model(torch.ones(2, 3) if x is None else x).square().sum().backward()


@pytest.mark.parametrize(
    "compression", [hvd.Compression.none, hvd.Compression.bf16, hvd.Compression.fp16, Compressor]
)
def test_alone_the_combined_gradient_is_the_gradient(compression):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    backward(model)
    expected = gradients_of(model)
    model.zero_grad()
    reducer, _ = reducer_of(model, compression=compression)
    backward(model)
    reducer.finish()
    tolerance = {} if compression in (hvd.Compression.none, Compressor) else {"rtol": 0.01, "atol": 0.01}
    torch.testing.assert_close(gradients_of(model), expected, **tolerance)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_compressor_of_the_user_s_is_asked_for_each_gradient():
    shapes = []

    class Noted(Compressor):
        @staticmethod
        def compress(tensor):
            shapes.append(tuple(tensor.shape))
            return -tensor, "negative"

        @staticmethod
        def decompress(tensor, context):
            assert context == "negative"
            return -tensor

    model = nn.Linear(3, 2)
    backward(model)
    expected = gradients_of(model)
    model.zero_grad()
    reducer, _ = reducer_of(model, compression=Noted)
    backward(model)
    reducer.finish()
    torch.testing.assert_close(gradients_of(model), expected)
    assert sorted(shapes) == [(2,), (2, 3)]


def test_gradients_live_in_the_bucket_and_accumulate_there_without_being_scaled_twice():
    model = nn.Linear(3, 2)
    reducer, _ = reducer_of(model, passes_per_step=2)
    backward(model)
    once = gradients_of(model)
    backward(model)
    reducer.finish()
    torch.testing.assert_close(gradients_of(model), [2 * gradient for gradient in once])
    places = [parameter.grad.data_ptr() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad.zero_()
    backward(model)
    reducer.finish()
    torch.testing.assert_close(gradients_of(model), once)
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == places


def test_a_view_has_the_parameter_s_order_in_memory_if_that_has_no_gaps():
    parameter = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    view = view_like(parameter, torch.arange(48.0))
    assert view.stride() == parameter.stride()
    assert sorted(view.flatten().tolist()) == list(range(48))
    assert view_like(torch.empty(4, 6)[:, ::2], torch.empty(12)).is_contiguous()
    assert view_like(torch.empty(0, 6), torch.empty(0)).shape == (0, 6)
    assert view_like(torch.empty(()), torch.ones(1)).shape == ()


def test_a_sparse_gradient_leaves_its_bucket_and_the_rest_stays():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    backward(model, torch.tensor([1, 1, 4]))
    expected = gradients_of(model)
    model.zero_grad()
    reducer, exchange = reducer_of(model)
    for _ in range(2):
        model.zero_grad()
        backward(model, torch.tensor([1, 1, 4]))
        reducer.finish()
        combined = gradients_of(model)
        assert combined[0].is_sparse
        torch.testing.assert_close([g.to_dense() for g in combined], [g.to_dense() for g in expected])
    assert exchange.sparse == {0}
    model.zero_grad()
    reducer.finish()
    assert model[0].weight.grad._nnz() == 0


def test_a_sparse_gradient_can_travel_as_a_dense_one_and_is_sparse_again_afterwards():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    reducer, exchange = reducer_of(model, sparse_as_dense=True)
    for words, touched in ((torch.tensor([1, 4, 4]), [[1, 4]]), (torch.tensor([2]), [[2]]), (None, [[]])):
        model.zero_grad()
        if words is not None:
            backward(model, words)
        expected = gradients_of(model)[0].to_dense() if words is not None else torch.zeros(5, 3)
        reducer.finish()
        combined = model[0].weight.grad
        assert combined.is_sparse
        assert combined.coalesce().indices().tolist() == touched
        torch.testing.assert_close(combined.to_dense(), expected)
        assert not model[1].weight.grad.is_sparse
    assert exchange.sparse == {0}


def test_a_bucket_without_one_of_its_parameters_keeps_what_it_has_taken():
    parameters = {i: nn.Parameter(torch.zeros(2)) for i in range(3)}
    bucket = DenseBucket("b", parameters, GradientReduction())
    for i, parameter in parameters.items():
        parameter.grad = torch.full((2,), float(i))
    bucket.add(0)
    bucket.exclude(1)
    bucket.add(2)
    bucket.collect()
    assert [parameter.grad.tolist() for parameter in parameters.values()] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


def test_an_average_multiplies_before_unless_it_is_told_to_split():
    assert GradientReduction().factors() == (1.0, 1.0)
    assert GradientReduction(predivide_factor=4.0).factors() == (0.25, 4.0)
    assert GradientReduction(op=hvd.Sum).factors() == (1.0, 1.0)


shapes = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


class Parameters(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.tensors = nn.ParameterList([torch.zeros(shape) for shape in shapes])


@examples(30, deadline=None)
@given(
    shapes,
    st.integers(0, 2**31),
    st.sampled_from(
        [
            hvd.Compression.topk(0.2, warmup_steps=3),
            hvd.Compression.powersgd(1, start_iteration=2),
            *map(hvd.Compression.quantized, ("int8", "int4", "onebit")),
        ]
    ),
    st.sampled_from([GradientReduction(op=hvd.Sum), GradientReduction(), GradientReduction(predivide_factor=4.0)]),
)
def test_what_was_sent_is_all_gradients_but_for_the_residual(shapes, seed, compression, reduction):
    torch.manual_seed(seed)
    model = Parameters(shapes)
    reducer, exchange = reducer_of(model, compression=compression, reduction=reduction)
    parameters = list(model.parameters())
    gradients, sent = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
    for step in range(6):
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape) if (step + i) % 4 else None
            if parameter.grad is not None:
                gradients[i] += parameter.grad
        reducer.finish()
        for i, parameter in enumerate(parameters):
            sent[i] += parameter.grad
    for i, (total, gradient) in enumerate(zip(sent, gradients, strict=True)):
        residual = exchange.memory.get(i, {}).get(RESIDUAL, 0.0)
        torch.testing.assert_close(total, gradient - residual, rtol=1e-4, atol=1e-4)


@given(st.lists(st.floats(-9, 9, width=32), max_size=40), st.floats(0.01, 1.0))
def test_the_largest_are_taken_and_the_rest_stays(values, ratio):
    tensor = torch.tensor(values)
    before = tensor.clone()
    taken, indices = take_largest(tensor, ratio)
    assert len(taken) == (min(len(values), max(1, -int(-ratio * len(values) // 1))) if values else 0)
    rebuilt = tensor.clone()
    rebuilt[indices] += taken
    assert torch.equal(rebuilt, before)
    if len(taken):
        assert taken.abs().min() >= tensor.abs().max()


def test_power_sgd_finds_a_gradient_of_its_rank_and_recovers_from_zeros():
    model = Parameters([(30, 20)])
    reducer, exchange = reducer_of(model, compression=hvd.Compression.powersgd(2, start_iteration=0))
    weight = model.tensors[0]
    for _ in range(2):
        weight.grad = torch.zeros(30, 20)
        reducer.finish()
        assert torch.equal(weight.grad, torch.zeros(30, 20))
    gradient = torch.randn(30, 2) @ torch.randn(2, 20)
    for _ in range(2):
        weight.grad = gradient.clone()
        reducer.finish()
    torch.testing.assert_close(weight.grad, gradient, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(exchange.memory[0][RESIDUAL], torch.zeros(30, 20), rtol=0, atol=1e-3)


def test_compressions_with_memory_are_checked_and_are_not_for_single_operations():
    with pytest.raises(ValueError, match="above 0"):
        hvd.Compression.topk(0.0)
    with pytest.raises(ValueError, match="rank of 1"):
        hvd.Compression.powersgd(0)
    with pytest.raises(ValueError, match="warmup_steps must be at least 0"):
        hvd.Compression.topk(warmup_steps=-1)
    with pytest.raises(ValueError, match="momentum must be at least 0 and below 1"):
        hvd.Compression.dgc(momentum=1.0)
    with pytest.raises(ValueError, match="clip_norm must be above 0"):
        hvd.Compression.dgc(clip_norm=0.0)
    with pytest.raises(ValueError, match=r"int8, int4, .* and qsgd, not 'int9'"):
        hvd.Compression.quantized("int9")
    with pytest.raises(ValueError, match="1 to 127 levels, not 128"):
        hvd.Compression.quantized("qsgd", 128)
    with pytest.raises(ValueError, match=r"1 to 127 levels, not 2\.5"):
        hvd.Compression.quantized("qsgd", 2.5)
    with pytest.raises(ValueError, match="give it the momentum, and the optimizer momentum=0"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9), compression=hvd.Compression.dgc()
        )
    with pytest.raises(ValueError, match="real gradients only"):
        reducer_of(nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), compression=hvd.Compression.quantized())
    with pytest.raises(ValueError, match="only DistributedOptimizer"):
        hvd.allreduce(torch.ones(3), compression=hvd.Compression.topk())
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Average and Sum"):
        hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.topk(), op=hvd.Adasum)


def test_what_was_not_sent_follows_the_process_and_the_rank_but_nobody_else(monkeypatch):
    def new_optimizer():
        return hvd.DistributedOptimizer(
            torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), compression=hvd.Compression.topk()
        )

    saved = new_optimizer().state_dict()
    saved["compression"]["memory"] = {0: {RESIDUAL: torch.ones(2, 2)}}

    def brings_residual(rank, **changes):
        monkeypatch.setattr("datasvc.trainer.job.runtime.rank", lambda: rank)
        optimizer = new_optimizer()
        optimizer.load_state_dict({**saved, "compression": {**saved["compression"], **changes}})
        return RESIDUAL in optimizer.state_dict()["compression"]["memory"].get(0, {})

    assert brings_residual(0)
    assert brings_residual(3)
    assert brings_residual(0, process="of an earlier job")
    assert not brings_residual(3, process="of an earlier job")


def test_adasum_is_adasum_on_the_one_rank_of_a_job_that_may_grow(monkeypatch):
    monkeypatch.setattr("datasvc.trainer.job.runtime.is_elastic", lambda: True)
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        pass
    before = model.bias.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.bias, before - 0.1)


def test_a_warm_up_sends_ever_smaller_shares_down_to_the_ratio():
    compression = hvd.Compression.topk(0.001, warmup_steps=10)
    shares = [compression.ratio_at(step) for step in range(12)]
    assert shares == pytest.approx([0.001 ** (stage / 5) for stage in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5)])


def test_momentum_of_a_rank_is_that_of_sgd_until_values_are_left_out_and_sent_values_lose_theirs():
    def weights_after(optimizer, weight):
        for step in range(5):
            weight.grad = None
            (weight * torch.arange(1.0, 9.0).roll(step)).sum().backward()
            optimizer.step()
        return weight.detach()

    def trained(**settings):
        weight = nn.Parameter(torch.zeros(8))
        reducer, exchange = reducer_of(nn.ParameterList([weight]), compression=hvd.Compression.dgc(**settings))
        sgd = torch.optim.SGD([weight], lr=0.1)
        sgd.register_step_pre_hook(lambda *_: reducer.finish())
        return weights_after(sgd, weight), exchange.memory[0]

    # All values are sent, so no momentum is left over: plain SGD.
    plain = nn.Parameter(torch.zeros(8))
    expected = weights_after(torch.optim.SGD([plain], lr=0.1), plain)
    sent, memory = trained(ratio=1.0)
    torch.testing.assert_close(sent, expected)
    assert not memory[VELOCITY].any()
    half, memory = trained(ratio=0.5)
    velocity, unsent, weight = torch.zeros(3, 8)
    for step in range(5):
        velocity = 0.9 * velocity + torch.arange(1.0, 9.0).roll(step)
        unsent = unsent + velocity
        chosen = unsent.topk(4).indices
        weight[chosen] -= 0.1 * unsent[chosen]
        velocity[chosen], unsent[chosen] = 0, 0
    torch.testing.assert_close(half, weight)
    torch.testing.assert_close((memory[VELOCITY], memory[RESIDUAL]), (velocity, unsent))
    clipped, _ = trained(ratio=1.0, clip_norm=0.5)
    torch.testing.assert_close(clipped, expected * 0.5 / torch.arange(1.0, 9.0).norm())


@pytest.mark.parametrize("sign", [1, -1])
def test_one_bit_of_a_few_numbers_of_one_sign_is_their_mean(sign):
    weight = nn.Parameter(torch.zeros(10))
    reducer, exchange = reducer_of(nn.ParameterList([weight]), compression=hvd.Compression.quantized("onebit"))
    weight.grad = sign * torch.ones(10)
    reducer.finish()
    torch.testing.assert_close(weight.grad, sign * torch.ones(10))
    assert exchange.memory[0][RESIDUAL].abs().max() < 1e-6


def test_the_gradient_of_half_precision_is_clipped_and_not_lost():
    weight = nn.Parameter(torch.zeros(4096, dtype=torch.float16))
    clipping = hvd.Compression.dgc(ratio=1.0, clip_norm=0.5)
    reducer, _ = reducer_of(nn.ParameterList([weight]), compression=clipping)
    weight.grad = torch.full((4096,), 2000.0, dtype=torch.float16)
    reducer.finish()
    assert weight.grad.float().norm() == pytest.approx(0.5, rel=0.01)


def test_the_momentum_of_dgc_is_applied_to_a_single_rank_too():
    weight = nn.Parameter(torch.zeros(8))
    dgc = hvd.Compression.dgc(ratio=0.5)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=dgc)
    for _ in range(2):
        optimizer.zero_grad()
        (weight * torch.arange(1.0, 9.0)).sum().backward()
        optimizer.step()
    # The momentum of the third and the fourth is 1.9 times their gradient in the second step, their sum 2.9 times.
    torch.testing.assert_close(weight.detach(), -torch.tensor([0, 0, 8.7, 11.6, 5, 6, 14, 16]))
