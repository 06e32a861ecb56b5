"""What an averaging optimizer says about the weights after a round, with one rank; rounds of several: `programs/`."""

import pytest
import torch

import datasvc.trainer as hvd


@pytest.fixture(autouse=True)
def one_rank():
    hvd.init()
    yield
    hvd.shutdown()


def make_optimizer():
    return hvd.Averaging(torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1), "diloco:8:delay=3")


def step_to(optimizer, step):
    while optimizer.num_steps < step:
        (weight,) = optimizer.param_groups[0]["params"]
        weight.grad = torch.ones(3)
        optimizer.step()


def test_a_round_whose_changes_were_lost_does_not_make_the_weights_equal():
    saving, resumed, again = make_optimizer(), make_optimizer(), make_optimizer()
    step_to(saving, 6)  # the round that ends after step 8 has started
    state = saving.state_dict()
    step_to(saving, 8)
    assert saving.is_averaged
    # As a run resumes at another number of ranks.
    outer = {**state["averaging"]["outer"], "changes": {}}
    resumed.load_state_dict({**state, "averaging": {**state["averaging"], "outer": outer}})
    step_to(resumed, 8)
    assert not resumed.is_averaged
    again.load_state_dict(resumed.state_dict())
    assert not again.is_averaged
    step_to(again, 16)
    assert again.is_averaged


@pytest.mark.parametrize("sync", ["local:7", "diloco:7"])
def test_weights_that_were_saved_after_a_round_of_leases_are_equal_whatever_the_number_of_its_steps(sync):
    saving, resumed = (
        hvd.Averaging(torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1), sync) for _ in range(2)
    )
    saving.lease_rounds()
    for weight in saving.param_groups[0]["params"]:
        weight.grad = torch.ones(3)
    saving.step()
    assert not saving.is_averaged
    saving.end_round(weight=1.0, num_steps=2)  # the last round of an epoch
    assert saving.is_averaged
    resumed.load_state_dict(saving.state_dict())
    resumed.lease_rounds(is_averaged=True)
    assert resumed.is_averaged
