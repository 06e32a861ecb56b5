"""LARS, LAMB and RMSprop-SGD against the formulas of their papers, in float64 and element by element; wrapping."""

import copy
import math

import pytest
import torch

import datasvc.trainer as hvd
from datasvc.planning.layout import Layout
from datasvc.trainer.recipes import build
from datasvc.trainer.recipes.optimizers.foreach_optimizer import LAMB, LARS, RMSpropSGD, trust_ratios
from datasvc.trainer.recipes.settings.config import TrainConfig

SHAPES = [(4, 3, 3, 3), (10, 6), (7,)]
RATES = [0.1, 0.2, 0.4, 0.4, 0.05]


def make_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients_of(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def run(optimizer, weights, rates=RATES, first=0):
    for step, rate in enumerate(rates, first):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for weight, gradient in zip(weights, gradients_of(step), strict=True):
            weight.grad = gradient.clone()
        optimizer.step()


def norm(values):
    return math.sqrt(sum(value * value for value in values))


def reference(rule, rates=RATES):
    """Run a rule `(state, w, g, rate, step) -> w` on lists of float64."""
    results = []
    for number, weight in enumerate(make_weights()):
        values, state = weight.detach().double().flatten().tolist(), {}
        for step, rate in enumerate(rates):
            gradient = gradients_of(step)[number].double().flatten().tolist()
            values = rule(state, values, gradient, rate, step)
        results.append(torch.tensor(values, dtype=torch.float64).reshape(weight.shape))
    return results


def assert_equal(weights, wanted, atol=1e-5):
    for weight, values in zip(weights, wanted, strict=True):
        torch.testing.assert_close(weight.detach().double(), values, rtol=1e-5, atol=atol)


def lars_by_the_paper(*, is_corrected, momentum=0.9, decay=1e-2, eta=0.02):
    """Algorithm 1, whose momentum holds `rate * direction`; with remark 2 of Goyal et al. or without."""

    def rule(state, w, g, rate, step):
        local = eta * norm(w) / (norm(g) + decay * norm(w))
        factor = rate / state.get("rate", rate) if is_corrected else 1.0
        before = state.get("v", [0.0] * len(w))
        v = [
            momentum * factor * old + rate * local * (each + decay * value)
            for old, each, value in zip(before, g, w, strict=True)
        ]
        state.update(v=v, rate=rate)
        return [value - each for value, each in zip(w, v, strict=True)]

    return rule


def test_lars_steps_by_the_paper_s_formula_with_momentum_correction():
    weights = make_weights()
    run(LARS(weights, 0.1, momentum=0.9, weight_decay=1e-2, trust_coefficient=0.02), weights)
    assert_equal(weights, reference(lars_by_the_paper(is_corrected=True)))
    with pytest.raises(AssertionError):
        assert_equal(weights, reference(lars_by_the_paper(is_corrected=False)))


def test_while_the_rate_stays_lars_is_the_paper_s_without_correction_too():
    weights = make_weights()
    run(LARS(weights, 0.1, weight_decay=1e-2, trust_coefficient=0.02), weights, [0.2] * 5)
    assert_equal(weights, reference(lars_by_the_paper(is_corrected=False), [0.2] * 5))


def test_trust_ratios_of_lars_are_the_paper_s_to_a_millionth():
    weights, gradients = [weight.detach() for weight in make_weights()], gradients_of(0)
    found = trust_ratios(weights, gradients, coefficient=0.001, weight_decay=5e-4)
    for ratio, weight, gradient in zip(found, weights, gradients, strict=True):
        of_weight = norm(weight.double().flatten().tolist())
        wanted = 0.001 * of_weight / (norm(gradient.double().flatten().tolist()) + 5e-4 * of_weight)
        assert ratio.item() == pytest.approx(wanted, rel=1e-6)


def test_trust_ratios_of_lamb_are_the_paper_s_to_a_millionth():
    weights, steps = [weight.detach() for weight in make_weights()], gradients_of(0)
    for ratio, weight, step in zip(trust_ratios(weights, steps), weights, steps, strict=True):
        wanted = norm(weight.double().flatten().tolist()) / norm(step.double().flatten().tolist())
        assert ratio.item() == pytest.approx(wanted, rel=1e-6)


def test_where_a_formula_says_nothing_the_trust_ratio_is_one():
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert [ratio.item() for ratio in trust_ratios([zeros, ones], [ones, zeros])] == [1, 1]
    found = trust_ratios([zeros, ones, zeros], [ones, zeros, zeros], coefficient=0.001, weight_decay=0.0)
    assert [ratio.item() for ratio in found] == [1, 1, 1]


def test_lamb_steps_by_the_paper_s_algorithm():
    first, second, eps, decay = 0.9, 0.99, 1e-6, 1e-2

    def rule(state, w, g, rate, step):
        m = [first * old + (1 - first) * each for old, each in zip(state.get("m", [0.0] * len(w)), g, strict=True)]
        v = [second * o + (1 - second) * each**2 for o, each in zip(state.get("v", [0.0] * len(w)), g, strict=True)]
        state.update(m=m, v=v)
        adam = [
            (a / (1 - first ** (step + 1))) / (math.sqrt(b / (1 - second ** (step + 1))) + eps)
            for a, b in zip(m, v, strict=True)
        ]
        r = [each + decay * value for each, value in zip(adam, w, strict=True)]
        return [value - rate * norm(w) / norm(r) * each for value, each in zip(w, r, strict=True)]

    weights = make_weights()
    run(LAMB(weights, 0.1, betas=(first, second), eps=eps, weight_decay=decay), weights)
    assert_equal(weights, reference(rule))


def test_rmsprop_sgd_steps_by_the_paper_s_formula():
    momentum, kept, eps, rmsprop_rate, decay = 0.9, 0.99, 1e-8, 3e-3, 1e-2

    def rule(state, w, g, rate, step):
        g = [each + decay * value for each, value in zip(g, w, strict=True)]
        v = [kept * old + (1 - kept) * each**2 for old, each in zip(state.get("v", [0.0] * len(w)), g, strict=True)]
        a = (1 - 0.3) * rmsprop_rate / rate
        u = [
            momentum * old + (0.3 + a / (math.sqrt(b) + eps)) * each
            for old, b, each in zip(state.get("u", [0.0] * len(w)), v, g, strict=True)
        ]
        state.update(v=v, u=u)
        return [value - rate * each for value, each in zip(w, u, strict=True)]

    weights = make_weights()
    optimizer = RMSpropSGD(weights, 0.1, rmsprop_rate=rmsprop_rate, weight_decay=decay)
    optimizer.param_groups[0]["sgd_share"] = 0.3
    run(optimizer, weights)
    assert_equal(weights, reference(rule))


def test_once_it_is_sgd_rmsprop_sgd_steps_as_torch_s():
    ours, theirs = make_weights(), make_weights()
    run(RMSpropSGD(ours, 0.1, momentum=0.9, weight_decay=1e-2), ours)
    run(torch.optim.SGD(theirs, 0.1, momentum=0.9, weight_decay=1e-2), theirs)
    assert_equal(ours, [weight.detach().double() for weight in theirs], atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_group_that_does_not_adapt_is_plain_momentum_sgd(nesterov):
    ours, theirs = make_weights(), make_weights()
    run(LARS([{"params": ours, "adapt": False}], 0.1, weight_decay=1e-2, nesterov=nesterov), ours)
    run(torch.optim.SGD(theirs, 0.1, momentum=0.9, weight_decay=1e-2, nesterov=nesterov), theirs)
    assert_equal(ours, [weight.detach().double() for weight in theirs], atol=1e-6)


def test_a_lamb_group_that_does_not_adapt_is_adamw():
    ours, theirs = make_weights(), make_weights()
    run(LAMB([{"params": ours, "adapt": False}], 0.1, eps=1e-6, weight_decay=1e-2), ours)
    run(torch.optim.AdamW(theirs, 0.1, eps=1e-6, weight_decay=1e-2), theirs)
    assert_equal(ours, [weight.detach().double() for weight in theirs])


MAKERS = {
    "lars": lambda weights: LARS(weights, 0.1, weight_decay=1e-2),
    "lamb": lambda weights: LAMB(weights, 0.1, weight_decay=1e-2),
    "rmsprop-sgd": lambda weights: RMSpropSGD(weights, 0.1, weight_decay=1e-2),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_restored_optimizer_goes_on_with_the_same_bits(name):
    whole = make_weights()
    run(MAKERS[name](whole), whole)
    weights = make_weights()
    optimizer = MAKERS[name](weights)
    run(optimizer, weights, RATES[:2])
    state = copy.deepcopy(optimizer.state_dict())
    restored = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizer = MAKERS[name](restored)
    optimizer.load_state_dict(state)
    run(optimizer, restored, RATES[2:], first=2)
    assert all(torch.equal(a, b) for a, b in zip(restored, whole, strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_parameters_without_a_gradient_and_gradients_themselves_are_left_alone(name):
    weights = make_weights()
    before = [weight.detach().clone() for weight in weights]
    optimizer = MAKERS[name](weights)
    weights[0].grad = gradients_of(0)[0]
    held = weights[0].grad.clone()
    optimizer.step()
    assert torch.equal(weights[0].grad, held)
    assert not torch.equal(weights[0], before[0])
    assert all(torch.equal(a, b) for a, b in zip(weights[1:], before[1:], strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: LARS(weights, -0.1),
        lambda weights: LARS(weights, 0.1, momentum=0.0, nesterov=True),
        lambda weights: LAMB(weights, 0.1, betas=(0.9, 1.0)),
        lambda weights: LAMB(weights, 0.1, weight_decay=float("nan")),
        lambda weights: RMSpropSGD(weights, 0.1, rmsprop_rate=-1.0),
    ],
)
def test_factors_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match=r"expected|needs"):
        make(make_weights())


def test_with_zero_1_gradients_are_sent_as_the_settings_say(monkeypatch):
    monkeypatch.setattr(hvd, "rank", lambda: 0)
    monkeypatch.setattr(build, "new_group", lambda peers, rank: None)
    monkeypatch.setattr(build, "ZeroOptimizer", lambda *_, wrap, **_options: wrap(None))
    monkeypatch.setattr(hvd, "DistributedOptimizer", lambda _optimizer, **options: options)
    settings = {"layout": "shard=2", "zero": 1, "compression": "bf16", "bucket": "1MiB"}
    config = TrainConfig(data="a@1", repo="r", name="n", **settings)
    options = build.build_zero_optimizer(config, torch.nn.Linear(2, 2), Layout(shard=2), num_passes=3)
    assert (options["compression"], options["bucket_bytes"]) == (hvd.Compression.bf16, 2**20)
    assert (options["op"], options["backward_passes_per_step"]) == (hvd.Sum, 3)
