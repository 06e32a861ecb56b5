"""An optimizer step of several backward passes: what is saved, and when."""

import logging
from importlib.util import find_spec

import pytest
import torch

import datasvc
import datasvc.trainer as hvd
from datasvc.trainer.optim import optimizer as distributed_optimizer

needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")


@pytest.fixture
def repo(tmp_path):
    return datasvc.open(str(tmp_path / "repo"), create=True)


def accelerated_run(repo, name, *, stop, every=3, passes=2, is_last=False):
    """Train on micro-batches up to `stop`, from the newest version; return the weights and the saved steps."""
    import accelerate

    from datasvc.integrations.accelerate import AcceleratorVersions

    torch.manual_seed(0)
    batches = [torch.randn(4, 3) for _ in range(12)]
    torch.manual_seed(1)
    net = torch.nn.Linear(3, 1)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=passes)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with AcceleratorVersions(accelerator, repo, name, {"net": net, "sgd": optimizer}, every=every) as versions:
        step = versions.restore()
        for batch in batches[step:stop]:
            with accelerator.accumulate(net):
                accelerator.backward(net(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            versions.step(step, is_last=is_last and step == stop)
    saved = [repo.models.restore(str(version)).entry["step"] for version in repo.models.versions(name)]
    return torch.cat([p.detach().view(-1).clone() for p in net.parameters()]), saved


@pytest.mark.slow
@needs_accelerate
@pytest.mark.parametrize(("passes", "every", "stop", "saved"), [(2, 3, 4, [4]), (3, 2, 7, [6]), (4, 1, 7, [4])])
def test_a_save_due_within_an_accumulation_waits_for_the_step_so_that_the_resumed_run_ends_with_equal_weights(
    repo, passes, every, stop, saved
):
    """huggingface/accelerate#1847: a state saved between micro-batches lacks their gradients and their count."""
    whole, _ = accelerated_run(repo, "whole", stop=12, every=100, passes=passes)
    _, steps = accelerated_run(repo, "killed", stop=stop, every=every, passes=passes)
    assert steps == saved
    again, _ = accelerated_run(repo, "killed", stop=12, every=every, passes=passes)
    assert torch.equal(again, whole)


@pytest.mark.slow
@needs_accelerate
def test_a_last_save_within_an_accumulation_says_that_gradients_are_lost(repo, caplog):
    """Nerogar/OneTrainer#1465: the end of a loop that is no multiple of the accumulation."""
    with caplog.at_level(logging.WARNING):
        _, steps = accelerated_run(repo, "net", stop=5, every=100, is_last=True)
    assert steps == [5]
    assert "in the middle of an accumulation of 2 micro-batches" in caplog.text


def test_a_state_taken_between_backward_and_step_of_a_distributed_optimizer_warns(monkeypatch):
    """huggingface/transformers#22143: what was accumulated before a save is lost, and the count begins again."""
    monkeypatch.setattr(distributed_optimizer, "_takes_part", lambda *_: True)
    hvd.init()
    try:
        net = torch.nn.Linear(2, 1)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        made = hvd.DistributedOptimizer(sgd, net.named_parameters(), backward_passes_per_step=2)
        for _ in range(2):
            made.state_dict()  # no warning: pytest makes an error of it
            net(torch.ones(1, 2)).sum().backward()
            with pytest.warns(UserWarning, match="does not have the gradients of the open step"):
                made.state_dict()
            net(torch.ones(1, 2)).sum().backward()
            made.step()
            made.zero_grad()
    finally:
        hvd.shutdown()
