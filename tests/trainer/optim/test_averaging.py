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
