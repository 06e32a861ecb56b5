"""The four remarks of Goyal et al. 2017, section 3, on what goes wrong in distributed SGD, one test each."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import datasvc.trainer as hvd
from datasvc.planning.layout import Layout
from datasvc.trainer.recipes.build import build_optimizer, set_rate
from datasvc.trainer.recipes.optimizers.precision import make_loss_scale
from datasvc.trainer.recipes.settings.config import BatchPlan, TrainConfig
from datasvc.trainer.recipes.start import build_schedule
from datasvc.trainer.recipes.tasks.classification import Classification
from datasvc.trainer.recipes.tasks.task import DataPlacement, Examples
from datasvc.trainer.recipes.update import Learner, update

CONFIG = TrainConfig(data="d", repo="r", name="m", size=32, scale=(0.8, 1.0), flip=0.0)


@pytest.fixture
def world_of_one():
    hvd.init()
    yield
    hvd.shutdown()


def test_remark_1_it_is_the_rate_that_scales_and_not_the_loss():
    """With weight decay `w - k * rate * (g + decay * w)` is not `w - rate * (k * g + decay * w)`."""
    config = dataclasses.replace(
        CONFIG, rate_scaling="linear", reference_batch=32, schedule="constant", warmup_epochs=0, weight_decay=0.5
    )
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    inputs, targets = torch.randn(8, 3), torch.randint(2, (8,))
    F.cross_entropy(model(inputs), targets).backward()  # the mean over the batch, however many ranks there are
    gradient = model.weight.grad.clone()
    rate = build_schedule(config, global_batch=4 * 32).rate_at(0.5)
    optimizer = build_optimizer(config, model)
    set_rate(optimizer, rate, 0.5)
    optimizer.step()
    k = 4
    torch.testing.assert_close(model.weight, before - k * 0.1 * (gradient + 0.5 * before))
    assert not torch.allclose(model.weight, before - 0.1 * (k * gradient + 0.5 * before), atol=1e-3)


def test_remark_2_a_rate_that_changes_leaves_the_momentum_as_it_should_be():
    """`v = m v + rate * g` must scale v by new rate / old rate; torch's `u = m u + g`, `w - rate * u`, need not."""
    rates = [0.1, 0.2, 0.4, 0.04]  # a warm-up, then a step
    config = dataclasses.replace(CONFIG, weight_decay=0.0)
    model = nn.Linear(3, 2, bias=False)
    corrected = uncorrected = model.weight.detach().double().clone()
    optimizer = build_optimizer(config, model)
    v = u = torch.zeros_like(corrected)
    for step, rate in enumerate(rates):
        gradient = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
        model.weight.grad = gradient.clone()
        set_rate(optimizer, rate, 0.0)
        optimizer.step()
        v = 0.9 * v * (rate / rates[max(step - 1, 0)]) + rate * gradient
        u = 0.9 * u + rate * gradient
        corrected, uncorrected = corrected - v, uncorrected - u
    torch.testing.assert_close(model.weight.detach().double(), corrected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model.weight.detach().double(), uncorrected, atol=1e-2)


def test_remark_3_losses_are_divided_by_the_whole_batch_also_where_parts_differ_in_size(digits, world_of_one):
    """A mean of means weighs samples of small parts more; each part's sum over the whole batch's size does not."""
    task = Classification(CONFIG, digits["train"])
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    examples = Examples(torch.randn(7, 3, 2, 2), torch.randint(10, (7,)), torch.ones(7, dtype=torch.bool))

    def gradient_of(*losses):
        model.zero_grad()
        for loss in losses:
            loss.backward()
        return model[1].weight.grad.clone()

    whole = gradient_of(F.cross_entropy(model(examples.inputs), examples.targets))
    parts = list(examples.split(3))
    assert [len(part.inputs) for part in parts] == [3, 3, 1]
    ours = gradient_of(*(task.sum_loss(model, part) / task.count_targets(examples) for part in parts))
    torch.testing.assert_close(ours, whole)
    means = gradient_of(*(task.sum_loss(model, part) / len(part.inputs) / len(parts) for part in parts))
    assert not torch.allclose(means, whole, atol=1e-3)
    model.zero_grad()
    update(make_run(task, model), examples)
    torch.testing.assert_close(model[1].weight.grad, whole)


def make_run(task, model):
    """Return a run of one rank whose task takes examples for its batches, three to a pass, and whose rate is 0."""
    task.unpack = lambda batch, device: batch
    batches = BatchPlan(global_batch=7, batch_size=7, num_passes=3, micro_batch=3)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=batches.num_passes,
        op=hvd.Sum,
    )
    device = torch.device("cpu")
    return Learner(
        config=task._config,
        task=task,
        batches=batches,
        layout=Layout(),
        model=model,
        optimizer=optimizer,
        loss_scale=make_loss_scale("fp32", device),
        average=None,
        device=device,
    )


def test_remark_4_one_shuffle_of_all_the_data_is_dealt_over_the_ranks_each_epoch(digits):
    split = digits["train"]
    task = Classification(CONFIG, split)

    def batches(rank, world_size, batch_size):
        place = DataPlacement(rank, world_size, torch.device("cpu"), num_threads=1)
        loader = task.open_loader(split, training=True, batch_size=batch_size, cache=None, place=place)
        with loader:
            return [[(batch.positions, batch.labels.numpy()) for batch in loader] for _ in range(2)]

    alone, ranks = batches(0, 1, 160), [batches(rank, 2, 80) for rank in range(2)]
    for epoch in range(2):
        steps = list(zip(alone[epoch], ranks[0][epoch], ranks[1][epoch], strict=True))
        for (positions, labels), *parts in steps:
            order = np.argsort(positions)
            dealt = np.concatenate([part[0] for part in parts])
            assert np.array_equal(np.sort(dealt), positions[order])
            assert np.array_equal(np.concatenate([part[1] for part in parts])[np.argsort(dealt)], labels[order])
        served = np.concatenate([positions for positions, _ in alone[epoch]])
        assert len(np.unique(served)) == len(served) == 8 * 160
    assert any(not np.array_equal(a[1], b[1]) for a, b in zip(alone[0], alone[1], strict=True)), "epochs differ"
