import pytest
import torch
from torch import nn

from datasvc.trainer.recipes.profiling.measure.layer_times import BETWEEN, LOSS, HostClock, LayerTimer, gradient_bytes


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


class Shortcut(nn.Module):
    """A residual block whose shortcut is an identity."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.shortcut = nn.Identity()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.body(x) + self.shortcut(x)


@pytest.mark.parametrize("idle", [nn.Identity(), nn.Dropout(0.0), nn.Flatten()])
def test_what_returns_its_input_takes_no_backward_pass_from_the_layer_before(idle):
    sums = run(nn.Sequential(nn.Linear(4, 4), idle), torch.randn(2, 4), CountingClock()).sums()
    plain = run(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), CountingClock()).sums()
    assert sums["1"][1] == 0
    assert sums["0"][1] == plain["0"][1] > 0


def test_a_shortcut_takes_no_backward_pass_either():
    sums = run(Shortcut(), torch.randn(2, 4), CountingClock()).sums()
    assert sums["shortcut"][1] == 0
    assert min(sums["first"][1], sums["body"][1]) > 0


def test_what_works_in_place_has_a_backward_pass_of_its_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    assert run(model, torch.randn(2, 4), CountingClock()).sums()["1"][1] > 0


def test_layers_that_return_several_tensors_are_seen_backwards():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory = nn.LSTM(4, 4)

        def forward(self, x):
            return self.memory(x)[0]

    assert run(Last(), torch.randn(3, 2, 4), CountingClock()).sums()["memory"][1] > 0


def test_without_layers_there_are_the_two_passes_and_the_gradients():
    model, clock = Shortcut(), CountingClock()
    with LayerTimer(model, clock, sees_layers=False) as timer:
        timer.begin_forward()
        loss = model(torch.randn(2, 4)).sum()
        timer.begin_backward()
        loss.backward()
        times = timer.end()
    assert set(times.sums()) == {BETWEEN, LOSS}
    assert times.ready_s.keys() == set(model.parameters())


class Tied(nn.Module):
    """Parameters of a module with children, of attention, and shared by two."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(7, 4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.read, self.say = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.say.weight = self.read.weight


def test_each_parameter_is_counted_once_wherever_it_lives():
    model = Tied()
    sizes_bytes = gradient_bytes(model)
    assert sum(sizes_bytes.values()) == sum(4 * parameter.numel() for parameter in model.parameters())
    assert (sizes_bytes["Tied"], sizes_bytes["attention"]) == (4 * 28, 4 * (48 + 12))
    assert (sizes_bytes["read"], sizes_bytes["say"]) == (4 * 16, 0)


def test_gradients_weigh_what_their_parameters_do_where_they_are_trained():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    model[2].weight.requires_grad_(False)
    assert gradient_bytes(model) == {"0": 4 * (15 + 5), "1": 0, "2": 4 * 2}
