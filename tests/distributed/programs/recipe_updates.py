"""Steps of the training program with `--op adasum` and with compressions, against what the formulas say."""

import copy

import torch
from checking import run_checks
from torch import nn
from torch.nn import functional as F

import datasvc.trainer as hvd
from datasvc.planning.layout import Layout
from datasvc.trainer.engine.execution.reductions import combine
from datasvc.trainer.recipes.build import build_distributed_optimizer, build_optimizer
from datasvc.trainer.recipes.optimizers.precision import make_loss_scale
from datasvc.trainer.recipes.settings.config import BatchPlan, TrainConfig
from datasvc.trainer.recipes.tasks.task import Examples
from datasvc.trainer.recipes.update import Learner, update

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
SIZES = [8, 6]  # samples of each rank: a mean over all would differ from a mean of means
MICRO_BATCH = 5


class Task:
    """Cross entropy of examples that are batches already, of which ranks may have different numbers."""

    targets_vary = True

    def unpack(self, batch, _device):
        return batch

    def count_targets(self, examples):
        return len(examples.targets)

    def sum_loss(self, model, examples):
        return F.cross_entropy(model(examples.inputs).float(), examples.targets, reduction="sum")


def make_examples(rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs, targets = torch.randn(SIZES[rank], 12, generator=generator), torch.arange(SIZES[rank]) % 4
    return Examples(inputs, targets, torch.ones(SIZES[rank], dtype=torch.bool))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


def make_config(**settings):
    return TrainConfig(data="d", repo="r", name="m", **{"learning_rate": 0.5, "weight_decay": 0.01, **settings})


def make_learner(config):
    model, device = make_model(), torch.device("cpu")
    batches = BatchPlan(sum(SIZES), SIZES[RANK], 2, MICRO_BATCH)
    return Learner(
        config=config,
        task=Task(),
        batches=batches,
        layout=Layout(data=hvd.size()),
        model=model,
        optimizer=build_distributed_optimizer(config, model, num_passes=batches.num_passes),
        loss_scale=make_loss_scale(config.precision, device),
        average=None,
        device=device,
    )


def step_alone(config, rank):
    """The changes of the weights that a rank makes alone."""
    model = make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer, examples = build_optimizer(config, model), make_examples(rank)
    F.cross_entropy(model(examples.inputs), examples.targets).backward()
    if config.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    optimizer.step()
    return [after.detach() - old for after, old in zip(model.parameters(), before, strict=True)]


def assert_made_the_combined_step(config):
    learner = make_learner(config)
    update(learner, make_examples(RANK))
    changes = zip(*(step_alone(config, rank) for rank in range(SIZE)), strict=True)
    for parameter, start, (first, second) in zip(
        learner.model.parameters(), make_model().parameters(), changes, strict=True
    ):
        combined = combine(first.flatten(), second.flatten()).view(first.shape)
        torch.testing.assert_close(parameter.detach(), start.detach() + combined)


def check_adasum_combines_the_steps_that_ranks_make_with_the_means_of_their_own_samples():
    assert_made_the_combined_step(make_config(op="adasum"))
    assert_made_the_combined_step(make_config(op="adasum", optimizer="adamw", learning_rate=0.01))


def check_with_adasum_each_rank_clips_its_own_gradient():
    config = make_config(op="adasum", clip_norm=0.1)
    assert_made_the_combined_step(config)
    free = step_alone(make_config(op="adasum"), RANK)
    assert any(not torch.equal(*pair) for pair in zip(free, step_alone(config, RANK), strict=True))


def check_with_adasum_all_ranks_skip_the_step_in_which_one_overflows():
    learner = make_learner(make_config(op="adasum", precision="fp16", learning_rate=0.1))
    scale = learner.loss_scale.get_scale()
    examples = make_examples(RANK)
    if RANK == 1:
        examples.inputs[0, 0] = 1e30  # infinite in 16 bits
    update(learner, examples)
    assert learner.loss_scale.get_scale() == scale / 2
    for parameter, start in zip(learner.model.parameters(), make_model().parameters(), strict=True):
        assert torch.equal(parameter, start)
    update(learner, make_examples(RANK, step=1))
    assert learner.loss_scale.get_scale() == scale / 2
    weights = torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()])
    assert weights.isfinite().all()
    assert not torch.equal(weights, torch.cat([start.detach().flatten() for start in make_model().parameters()]))
    assert torch.equal(*hvd.allgather(weights[None]))


def check_what_is_not_sent_at_once_is_sent_later():
    """Over steps at one point of the weights, the sums of the applied gradients approach those of the true ones."""
    exact = make_learner(make_config())
    update(exact, make_examples(RANK))
    for text in ("topk:0.2", "powersgd:2", "powersgd:2:3"):
        learner = make_learner(make_config(compression=text, learning_rate=0.0, momentum=0.0))
        sums = [torch.zeros_like(parameter) for parameter in learner.model.parameters()]
        for _ in range(40):
            update(learner, make_examples(RANK))
            for total, parameter in zip(sums, learner.model.parameters(), strict=True):
                total.add_(parameter.grad, alpha=1 / 40)
        for total, parameter in zip(sums, exact.model.parameters(), strict=True):
            torch.testing.assert_close(total, parameter.grad, atol=0.05 * parameter.grad.abs().max().item(), rtol=0.2)


def check_a_restored_memory_makes_the_same_step():
    config = make_config(compression="topk:0.1")
    learner = make_learner(config)
    update(learner, make_examples(RANK))
    resumed = make_learner(config)
    resumed.model.load_state_dict(learner.model.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(learner.optimizer.state_dict()))
    for run in (learner, resumed):
        update(run, make_examples(RANK, step=1))
    for parameter, other in zip(learner.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(parameter, other)


run_checks(globals())
hvd.shutdown()
