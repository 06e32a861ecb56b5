"""DistributedOptimizer against one process that trains on the whole batch. Writes what it trained to argv[1].

With ``again`` as argv[2] it only trains, to be compared with another run bit by bit.
"""

import pickle
import sys
import warnings
from pathlib import Path

import torch
from checking import raises, run_checks
from torch import nn

import datasvc.trainer as hvd
from datasvc.trainer.gradients.bucket_choice import plan_buckets

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LOCAL_BATCH = 4
STEPS = 4


class Network(nn.Module):
    """Large enough for several buckets; two branches whose order in the graph, and use, may differ."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.left = nn.Linear(8 * 16, 600)
        self.right = nn.Linear(8 * 16, 600)
        self.head = nn.Linear(600, 600)
        self.out = nn.Linear(600, 3)

    def forward(self, x, *, swapped=False, uses_left=True):
        x = self.stem(x).relu().flatten(1)
        branches = [self.left, self.right] if uses_left else [self.right]
        if swapped:
            branches.reverse()
        return self.out(self.head(sum(branch(x) for branch in branches)).relu())


def new_model(seed=0):
    torch.manual_seed(seed)
    return Network()


def batch(step, rank=None):
    """The rank's part of a step's batch, or all of it."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SIZE * LOCAL_BATCH, 3, 4, 4, generator=generator)
    return x if rank is None else x[rank * LOCAL_BATCH : (rank + 1) * LOCAL_BATCH]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def loss_of(model, x, **options):
    return model(x, **options).square().mean()


def train_alone(make_optimizer=sgd, **options):
    model = new_model()
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step), **options).backward()
        optimizer.step()
    return model


def assert_equal(model, expected, tolerance=1e-5):
    assert_equal_on_all_ranks(model)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=tolerance, atol=tolerance)


def assert_equal_on_all_ranks(model):
    states = hvd.allgather_object(model.state_dict())
    for state in states:
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)


def train(make_optimizer=sgd, set_to_none=True, options=None, memory_format=torch.contiguous_format, **settings):
    model = new_model().to(memory_format=memory_format)
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters(), **settings)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, batch(step, RANK), **(options or {})).backward()
        optimizer.step()
    return model


def check_that_there_are_several_buckets():
    sizes = [p.numel() * 4 for p in new_model().parameters()]
    assert len(plan_buckets(sizes, [0] * len(sizes))) > 1


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def check_training_equals_one_process_with_the_whole_batch():
    expected = train_alone()
    assert_equal(trained["sgd"], expected)
    assert_equal(train(set_to_none=False), expected)
    assert_equal(train(gradient_predivide_factor=2.0), expected)
    assert_equal(train(memory_format=torch.channels_last), expected)


def check_adam():
    # Adam divides by the gradient's size, so rounding shows where gradients are almost zero.
    assert_equal(trained["adam"], train_alone(adam), tolerance=1e-3)


def check_gradients_may_come_in_a_different_order_on_every_rank():
    assert_equal(trained["swapped"], train_alone())


def check_a_parameter_without_gradient_on_one_rank_counts_as_zero():
    model, unhooked = train(), new_model()
    unhooked.load_state_dict(model.state_dict())
    loss_of(unhooked, batch(0, RANK), uses_left=RANK != 0).backward()
    local = torch.zeros_like(unhooked.left.weight) if RANK == 0 else unhooked.left.weight.grad
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    # Buckets are reused, so they hold the gradients of this step when the next one leaves them out.
    loss_of(model, batch(0, RANK)).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    loss_of(model, batch(0, RANK), uses_left=RANK != 0).backward()
    optimizer.synchronize()
    expected = torch.stack(hvd.allgather_object(local)).mean(0)
    torch.testing.assert_close(model.left.weight.grad, expected)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_equal_on_all_ranks(model)


def check_accumulation_over_two_backward_passes():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), backward_passes_per_step=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for half in batch(step, RANK).chunk(2):
            (loss_of(model, half) / 2).backward()
        optimizer.step()
    assert_equal(model, train_alone())


def check_fewer_passes_than_announced_are_reduced_at_the_step():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), backward_passes_per_step=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step, RANK)).backward()
        optimizer.step()
    assert_equal(model, train_alone())


def check_more_passes_than_announced_are_refused():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    loss_of(model, batch(0, RANK)).backward()
    with raises(AssertionError, "more than backward_passes_per_step"):
        loss_of(model, batch(0, RANK)).backward()
    optimizer.step()
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        loss_of(model, batch(0, RANK)).backward()
    optimizer.step()


def check_gradients_can_be_clipped_between_synchronize_and_step():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    loss_of(model, batch(0, RANK)).backward()
    with raises(AssertionError, "optimizer.zero_grad() was called after"):
        optimizer.zero_grad()
    optimizer.synchronize()
    alone = new_model()
    loss_of(alone, batch(0)).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, alone)]
    torch.testing.assert_close(*norms)
    with optimizer.skip_synchronize(), warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    loss_of(model, batch(0, RANK)).backward()


def check_synchronize_before_a_plain_step_warns_once():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    loss_of(model, batch(0, RANK)).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert ["without optimizer.skip_synchronize()" in str(w.message) for w in caught] == [True]


def check_a_scheduler_made_before_the_wrapping_does_not_bypass_it():
    def scheduled(model):
        optimizer = sgd(model)
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        return optimizer

    assert_equal(train(scheduled), train_alone())


def check_a_parameter_can_be_unfrozen_and_frozen_later():
    model, alone = new_model(), new_model()
    for network in (model, alone):
        network.left.requires_grad_(False)
    optimizers = [hvd.DistributedOptimizer(sgd(model)), sgd(alone)]
    for step in range(STEPS):
        for network in (model, alone):
            network.left.requires_grad_(step >= 2)
            network.right.requires_grad_(step < 3)
        for network, optimizer, x in zip((model, alone), optimizers, (batch(step, RANK), batch(step)), strict=True):
            optimizer.zero_grad()
            loss_of(network, x).backward()
            optimizer.step()
    assert_equal(model, alone)


def check_a_closure_sees_combined_gradients():
    model, alone = new_model(), new_model()
    for network, x, wrap in (
        (model, batch(0, RANK), hvd.DistributedOptimizer),
        (alone, batch(0), lambda o: o),
    ):
        optimizer = wrap(sgd(network))

        def closure(network=network, x=x, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(network, x)
            loss.backward()
            return loss

        for _ in range(2):
            assert optimizer.step(closure).item() > 0
    assert_equal(model, alone)


def check_sparse_adam_gets_sparse_gradients_however_they_travel():
    words = torch.tensor([[1, 2], [6, 2]])
    trained = {}
    for sparse_as_dense in (True, False, None):
        torch.manual_seed(0)
        embedding = nn.Embedding(8, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
        if sparse_as_dense is not None:
            optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=sparse_as_dense)
        for step in range(3):
            optimizer.zero_grad()
            if sparse_as_dense is None:
                (embedding(words[: 1 + (step > 0)] + step % 2).square().sum() / SIZE).backward()
            # In the first step only rank 0 has a gradient.
            elif RANK == 0 or (step > 0 and RANK == 1):
                embedding(words[RANK] + step % 2).square().sum().backward()
            optimizer.step()
        trained[sparse_as_dense] = embedding
        assert_equal_on_all_ranks(embedding)
    for sparse_as_dense in (True, False):
        assert_equal(trained[sparse_as_dense], trained[None])


def check_the_state_fits_a_plain_optimizer():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    loss_of(model, batch(0, RANK)).backward()
    optimizer.step()
    plain = sgd(model)
    plain.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(plain.state_dict(), optimizer.state_dict())
    optimizer.load_state_dict(plain.state_dict())


def check_models_that_differ_between_ranks_are_an_error_on_every_rank():
    model = nn.Linear(2 + RANK, 1)
    optimizer = hvd.DistributedOptimizer(sgd(model))
    model(torch.ones(1, 2 + RANK)).sum().backward()
    with raises(hvd.HorovodInternalError, "shape"):
        optimizer.step()
    hvd.barrier()


trained = {"sgd": train(), "adam": train(adam), "swapped": train(options={"swapped": RANK == 0})}
if sys.argv[2:] != ["again"]:
    run_checks(globals())
if RANK == 0:
    Path(sys.argv[1]).write_bytes(pickle.dumps({name: model.state_dict() for name, model in trained.items()}))
hvd.shutdown()
