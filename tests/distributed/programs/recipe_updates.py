"""Steps of the training program with `--op adasum` and with compressions, against what the formulas say."""

import copy

import torch
from checking import run_checks
from torch import nn
from torch.nn import functional as F

import datasvc.trainer as hvd
from datasvc.planning.layout import Layout
from datasvc.trainer.engine.execution.reductions import combine
from datasvc.trainer.engine.negotiation.requests import CollectiveKind
from datasvc.trainer.job import runtime
from datasvc.trainer.recipes.build import build_combining_optimizer, build_optimizer
from datasvc.trainer.recipes.mean_weights import compute_mean_weights, own_weights, using_mean_weights
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
    masks_samples = False

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
        optimizer=build_combining_optimizer(config, model, num_passes=batches.num_passes),
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
    for text in ("topk:0.2", "powersgd:2", "powersgd:2:3", "dgc:0.2", "quantized:int4"):
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


def equal_examples(rank, step):
    """As many samples on each rank, so that the mean of the ranks' means is the mean of all samples."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs, targets = torch.randn(8, 12, generator=generator), torch.arange(8) % 4
    return Examples(inputs, targets, torch.ones(8, dtype=torch.bool))


def check_rounds_of_one_step_have_the_weights_of_data_parallel_training():
    for settings in ({"learning_rate": 0.1}, {"learning_rate": 0.1, "weight_decay": 0.01, "nesterov": True}):
        learners = [make_learner(make_config(sync=sync, **settings)) for sync in ("bsp", "local:1")]
        for step in range(50):
            for learner in learners:
                update(learner, equal_examples(RANK, step))
        for parameter, other in zip(*(learner.model.parameters() for learner in learners), strict=True):
            torch.testing.assert_close(parameter, other, rtol=0, atol=1e-6)


def check_each_rank_clips_its_own_gradient_and_follows_its_own_samples_between_rounds():
    config = make_config(sync="local:2", clip_norm=0.1)
    learner = make_learner(config)
    update(learner, make_examples(RANK))
    changes = step_alone(config, RANK)
    for parameter, start, change in zip(learner.model.parameters(), make_model().parameters(), changes, strict=True):
        torch.testing.assert_close(parameter.detach(), start.detach() + change)


def check_a_rank_without_targets_keeps_its_weights_and_takes_part_in_the_round():
    for optimizer in ("sgd", "adamw", "lamb"):
        learner = make_learner(make_config(sync="local:2", optimizer=optimizer, learning_rate=0.01))
        learner.task.masks_samples = True
        update(learner, make_examples(RANK))
        examples = make_examples(RANK, step=1)
        learner.shares_loss = True
        if RANK == 1:
            learner.task.count_targets = lambda _examples: 0
            learner.task.sum_loss = lambda model, examples: 0 * model(examples.inputs).sum()
        loss = update(learner, examples)
        assert loss == hvd.allgather(loss[None])[0] > 0
        after = own_weights(learner)
        assert learner.optimizer.is_averaged
        # Rank 1 has made one step, rank 0 two.
        model = make_model()
        alone = build_optimizer(learner.config, model)
        for step in range(2 - RANK):
            alone.zero_grad()
            examples = make_examples(RANK, step)
            F.cross_entropy(model(examples.inputs), examples.targets).backward()
            alone.step()
        models = hvd.allgather_object({name: weight.detach() for name, weight in model.named_parameters()})
        for name, weight in after.items():
            torch.testing.assert_close(weight, (models[0][name] + models[1][name]) / 2, rtol=0, atol=1e-5)


def check_the_mean_of_the_weights_is_evaluated_and_training_goes_on_with_its_own():
    learner = make_learner(make_config(sync="diloco:4"))
    learner.model[2].register_parameter("tied", learner.model[0].weight)
    update(learner, make_examples(RANK))
    own = own_weights(learner)
    everyone = hvd.allgather_object(own)
    assert not torch.equal(everyone[0]["0.weight"], everyone[1]["0.weight"])
    means = compute_mean_weights(learner)
    assert {"0.weight", "2.tied"} <= means.keys()
    with using_mean_weights(learner):
        for name, weight in own_weights(learner).items():
            assert torch.equal(weight, means[name])
            torch.testing.assert_close(weight, (everyone[0][name] + everyone[1][name]) / 2)
    for name, weight in own_weights(learner).items():
        assert torch.equal(weight, own[name])


def count_reduced_bytes(learner, steps):
    """The bytes of gradients and weights that the engine is given to reduce in steps of a learner."""
    learner.task.targets_vary = False  # else data-parallel steps also sum the numbers of targets
    engine, sizes = runtime.current_job().engine, []
    submit = engine.submit

    def count(submission):
        if submission.request.kind is CollectiveKind.ALLREDUCE:
            sizes.extend(tensor.nbytes for tensor in submission.inputs)
        submit(submission)

    engine.submit = count
    try:
        for step in range(steps):
            update(learner, equal_examples(RANK, step))
    finally:
        engine.submit = submit
    return sum(sizes)


def check_the_ranks_send_one_hth_of_the_bytes():
    every_step = count_reduced_bytes(make_learner(make_config()), 32)
    assert every_step == 32 * 4 * sum(weight.numel() for weight in make_model().parameters())
    for steps in (2, 8):
        for kind in ("local", "diloco"):
            sent = count_reduced_bytes(make_learner(make_config(sync=f"{kind}:{steps}")), 32)
            assert abs(sent * steps / every_step - 1) < 0.02, (kind, steps, sent, every_step)


run_checks(globals())
hvd.shutdown()
