import pytest
import torch
from torch import nn

from trainer.recipes.profiling.clocks import HostClock
from trainer.recipes.profiling.layer_times import BETWEEN, LOSS, LayerTimer, gradient_bytes


class CountingClock(HostClock):
    """Every stamp is a second after the one before."""

    def __init__(self):
        self.now = 0

    def stamp(self):
        self.now += 1
        return self.now


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.body(x) + x)


def run(model, inputs, clock=None):
    with LayerTimer(model, clock or HostClock()) as timer:
        timer.begin_forward()
        loss = model(inputs).sum()
        timer.begin_backward()
        loss.backward()
        return timer.end()


def test_layers_are_seen_in_the_order_in_which_they_run_both_ways():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 36, 2))
    times = run(model, torch.randn(2, 3, 8, 8))
    forward = [span.name for span in times.spans if not span.is_backward]
    backward = list(dict.fromkeys(span.name for span in times.spans if span.is_backward))
    assert forward == [BETWEEN, "0", BETWEEN, "1", BETWEEN, "2", BETWEEN, "3", BETWEEN]
    assert backward == [LOSS, "3", "2", "1", "0"]


def test_the_layers_add_up_to_the_two_passes():
    times = run(Residual(), torch.randn(2, 3, 8, 8))
    forward_s, backward_s = map(sum, zip(*times.sums().values(), strict=True))
    assert forward_s == pytest.approx(times.forward_s)
    assert backward_s == pytest.approx(times.backward_s)


def test_activations_changed_in_place_are_no_obstacle_and_gradients_stay_the_same():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Residual(), Residual()), torch.randn(2, 3, 8, 8)
    model(inputs).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    run(model, inputs)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))


def test_a_gradient_is_ready_within_its_layer_and_later_layers_first():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    times = run(model, torch.randn(2, 4), CountingClock())
    ready = {name: times.ready_s[parameter] for name, parameter in model.named_parameters()}
    assert max(ready["2.weight"], ready["2.bias"]) < min(ready["0.weight"], ready["0.bias"])
    assert max(ready.values()) <= times.backward_s


def test_hooks_are_gone_afterwards():
    model, clock = Residual(), CountingClock()
    run(model, torch.randn(2, 3, 8, 8), clock)
    before = clock.now
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert clock.now == before


def test_gradients_weigh_what_their_parameters_do_where_they_are_trained():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    model[2].weight.requires_grad_(False)
    assert gradient_bytes(model) == {"0": 4 * (15 + 5), "1": 0, "2": 4 * 2}
