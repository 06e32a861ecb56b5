"""What an averaging optimizer says about the weights after a round, with one rank; rounds of several: `programs/`."""

import pytest
import torch

import datasvc.trainer as hvd
from datasvc.trainer.optim import averaging


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


def test_a_round_that_fails_leaves_all_weights_as_they_were(monkeypatch):
    """The weights of the second type are lost with a rank, when those of the first have arrived."""
    weights = [torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)]
    optimizer = hvd.Averaging(torch.optim.SGD(weights, lr=0.5), "local:1")
    real, sent = averaging.submit_allreduce, []

    def submit(tensors, *more, **options):
        sent.append(tensors)
        if len(sent) == 2:
            raise hvd.HorovodInternalError("a rank was lost")
        tensors[0].fill_(7)
        return real(tensors, *more, **options)

    monkeypatch.setattr(averaging, "submit_allreduce", submit)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()
    assert [weight.tolist() for weight in weights] == [[0.5] * 3] * 2
    assert optimizer.num_steps == 1


def test_after_leases_rounds_end_with_the_steps_of_the_policy_again_also_if_this_rank_made_none():
    optimizer = hvd.Averaging(torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1), "diloco:4")
    optimizer.lease_rounds(is_averaged=False)  # what the rank has learned of a broken round is its own
    assert not optimizer.is_averaged
    optimizer.end_round(weight=1.0, num_steps=4)
    assert optimizer.state_dict()["averaging"]["outer"] is not None
    optimizer.end_leases()
    assert optimizer.is_averaged
    step_to(optimizer, 7)
    assert not optimizer.is_averaged
    step_to(optimizer, 8)
    assert optimizer.is_averaged
