"""How DistributedOptimizer combines gradients: groups, process sets, sparse, compressed, Adasum, joined ranks."""

import contextlib
import copy
import io
import random
import warnings
from unittest import mock

import torch
from checking import counting, raises, run_checks
from torch import nn

import datasvc.trainer as hvd
from datasvc.trainer.gradients import quantized
from datasvc.trainer.gradients.compression_with_memory import RESIDUAL, VELOCITY

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
STEPS = 6


def new_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))


def batch(step, rank=None):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SIZE * 4, 6, generator=generator)
    return x if rank is None else x[rank * 4 : (rank + 1) * 4]


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model, x):
    return (model(x) - x[:, :2].cumsum(1)).square().mean()


def run(model, optimizer, steps=STEPS, rank=RANK, batches=batch):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batches(step, rank)).backward()
        optimizer.step()
    return model


def train(make=sgd, steps=STEPS, **options):
    model = new_model()
    return run(model, hvd.DistributedOptimizer(make(model), model.named_parameters(), **options), steps)


def train_alone(make=sgd):
    model = new_model()
    return run(model, make(model), rank=None)


def assert_equal_on_all_ranks(model):
    for state in hvd.allgather_object(model.state_dict()):
        torch.testing.assert_close(state, model.state_dict(), rtol=0, atol=0)


def assert_trained_like(model, expected, tolerance=1e-5):
    assert_equal_on_all_ranks(model)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=tolerance, atol=tolerance)


EXPECTED = train_alone()


def check_groups_by_number_and_by_lists():
    assert_trained_like(train(groups=3), EXPECTED)
    assert_trained_like(train(groups=100), EXPECTED)
    model = new_model()
    groups = [[model[0].weight, model[4].bias], [model[2].weight]]
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), groups=groups)
    assert_trained_like(run(model, optimizer), EXPECTED)


def check_the_old_name_of_groups_is_deprecated():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_trained_like(train(num_groups=2), EXPECTED)
    assert [warning.category for warning in caught] == [DeprecationWarning]


def check_groups_that_are_none_are_refused():
    model = new_model()
    for groups, words in ((-1, "number of at least 0"), ([["x"]], "lists of tensors")):
        with raises(ValueError, words):
            hvd.DistributedOptimizer(sgd(model), groups=groups)
    with raises(ValueError, "groups contain a parameter twice"):
        hvd.DistributedOptimizer(sgd(model), groups=[[model[0].weight], [model[0].weight]])


def check_predivided_averages_and_a_smaller_rate_with_sums():
    assert_trained_like(train(gradient_predivide_factor=float(SIZE)), EXPECTED)
    assert_trained_like(train(gradient_predivide_factor=1.7), EXPECTED)
    assert_trained_like(train(lambda model: sgd(model, 0.05 / SIZE), op=hvd.Sum), EXPECTED)


def check_arguments_may_be_positional_in_horovod_s_order():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), hvd.Compression.none, 1, hvd.Average, 2.0
    )
    assert_trained_like(run(model, optimizer), EXPECTED)


def check_half_precision_on_the_wire_is_close():
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        model = train(compression=compression)
        assert_trained_like(model, EXPECTED, tolerance=0.02)
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def check_equal_numbers_of_elements_in_other_shapes_are_an_error_on_every_rank():
    model = nn.Linear(6, 2, bias=False) if RANK == 0 else nn.Linear(3, 4, bias=False)
    optimizer = hvd.DistributedOptimizer(sgd(model))
    model(torch.ones(1, 6 if RANK == 0 else 3)).sum().backward()
    with raises(hvd.HorovodInternalError, "layout"):
        optimizer.step()
    hvd.barrier()


def check_another_op_on_one_rank_is_an_error_on_every_rank():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), op=hvd.Sum if RANK == 0 else hvd.Average)
    loss_of(model, batch(0, RANK)).backward()
    with raises(hvd.HorovodInternalError, "prescale factor"):
        optimizer.step()
    hvd.barrier()


def check_a_process_set_trains_alone_and_the_others_are_as_they_were():
    some = hvd.add_process_set([0, SIZE - 1] if SIZE > 2 else [0])
    for compression in (hvd.Compression.quantized("int8"), hvd.Compression.none):
        model = new_model()
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), process_set=some, groups=2, compression=compression
        )
        run(model, optimizer)
    loss_of(model, batch(9, RANK)).backward()
    optimizer.synchronize()
    if some.included():
        states = hvd.allgather_object(model.state_dict(), process_set=some)
        assert len(states) == some.size()
        torch.testing.assert_close(states[0], states[-1], rtol=0, atol=0)
        assert hvd.broadcast_object(RANK, some.ranks[-1], process_set=some) == some.ranks[-1]
    else:
        alone = new_model()
        run(alone, sgd(alone))
        torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=0, atol=0)
        with raises(ValueError, "is not in"):
            hvd.broadcast_object(0, process_set=some)
    hvd.remove_process_set(some)


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4, sparse=sparse)
        self.head = nn.Linear(4, 1)

    def forward(self, words):
        return self.head(self.embedding(words).mean(1)).square().mean()


def train_words(sparse, wrap, rank=RANK, **options):
    model = Words(sparse)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options) if wrap else plain
    for step in range(3):
        words = torch.randint(0, 10, (SIZE * 2, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(words if rank is None else words[2 * rank : 2 * rank + 2]).backward()
        optimizer.step()
    return model


def check_sparse_gradients_are_gathered_or_made_dense():
    expected = train_words(sparse=False, wrap=False, rank=None)
    gathered = train_words(sparse=True, wrap=True)
    assert gathered.embedding.weight.grad.is_sparse
    assert_trained_like(gathered, expected)
    dense = train_words(sparse=True, wrap=True, sparse_as_dense=True)
    assert dense.embedding.weight.grad.is_sparse
    assert_trained_like(dense, expected)


def check_a_rank_without_a_sparse_gradient_adds_nothing_to_it():
    model = Words(sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        if step == 0 or RANK == 0:
            model(torch.tensor([[1, 2]])).backward()
        optimizer.step()
    assert model.embedding.weight.grad.coalesce().indices().tolist() == [[1, 2]]
    assert_equal_on_all_ranks(model)


def check_sparse_tensors_are_summed_or_averaged():
    indices = torch.tensor([[RANK, RANK + 1, RANK]])
    mine = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (SIZE + 1,))
    total = sum(
        torch.sparse_coo_tensor([[r, r + 1, r]], [1.0, 2.0, 3.0], (SIZE + 1,)).to_dense() for r in range(SIZE)
    )
    waits = [hvd.sparse_allreduce_async(mine, name=f"s.{op.value}", op=op) for op in (hvd.Sum, hvd.Average)]
    torch.testing.assert_close(waits[0]().to_dense(), total)
    torch.testing.assert_close(waits[1]().to_dense(), total / SIZE)
    with raises(ValueError, "sparse COO"):
        hvd.sparse_allreduce_async(torch.ones(1), name="dense", op=hvd.Sum)
    with raises(ValueError, "Average and Sum"):
        hvd.sparse_allreduce_async(mine, name="max", op=hvd.Max)


def check_adasum_combines_what_the_steps_changed():
    if SIZE & (SIZE - 1):
        with raises(ValueError, "power of two"):
            hvd.DistributedOptimizer(sgd(new_model()), op=hvd.Adasum)
        return
    model, alone = new_model(), new_model()
    before = [parameter.detach().clone() for parameter in alone.parameters()]
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=hvd.Adasum)
    assert isinstance(optimizer, torch.optim.SGD)
    run(model, optimizer, steps=1)
    run(alone, sgd(alone), steps=1)
    changes = [parameter.detach() - old for parameter, old in zip(alone.parameters(), before, strict=True)]
    combined = hvd.grouped_allreduce(changes, op=hvd.Adasum)
    expected = [old + change for old, change in zip(before, combined, strict=True)]
    torch.testing.assert_close([parameter.detach() for parameter in model.parameters()], expected)
    optimizer.synchronize()
    with raises(AssertionError, "not supported"), optimizer.skip_synchronize():
        pass
    assert_equal_on_all_ranks(run(model, optimizer))


WITH_RESIDUALS = (
    hvd.Compression.topk(0.1, 4),
    hvd.Compression.powersgd(2, start_iteration=1),
    *map(hvd.Compression.quantized, ("int8", "int4", "onebit")),
)
UNBIASED = ("ternary", "qsgd")


def check_compressions_with_memory_converge_and_lose_nothing():
    target = loss_of(EXPECTED, batch(0)).item()
    all_of_them = (*WITH_RESIDUALS, hvd.Compression.dgc(0.1, 0), *map(hvd.Compression.quantized, UNBIASED))
    for compression in all_of_them if SIZE == 2 else WITH_RESIDUALS[:3]:
        model = new_model()
        optimizer = hvd.DistributedOptimizer(plain_sgd(model), model.named_parameters(), compression=compression)
        start = loss_of(model, batch(0)).item()
        run(model, optimizer, steps=40, batches=lambda _, rank: batch(0, rank))
        assert_equal_on_all_ranks(model)
        assert loss_of(model, batch(0)).item() < min(target, start / 2)


def check_what_ranks_applied_and_what_they_keep_is_the_average_of_their_gradients():
    for compression in WITH_RESIDUALS:
        weight = nn.Parameter(torch.zeros(48, 60))  # more than a block for each rank
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=compression)
        total = torch.zeros(48, 60)
        for step in range(STEPS):
            gradients = torch.randn(SIZE, 48, 60, generator=torch.Generator().manual_seed(step))
            total += gradients.mean(0)
            optimizer.zero_grad()
            (weight * gradients[RANK]).sum().backward()
            optimizer.step()
        residual = optimizer.state_dict()["compression"]["memory"][0][RESIDUAL]
        torch.testing.assert_close(-weight.detach(), total - hvd.allreduce(residual), rtol=1e-4, atol=1e-4)


def check_a_majority_of_signs_is_the_gradient_for_sums_and_averages():
    votes = [[1.0, -2.0, 0.0, 3.0], [-9.0, -9.0, 0.0, 0.0], [2.0, 9.0, 0.0, -1.0], [2.0, -1.0, 0.0, 1.0]]
    gradients = torch.tensor(votes[:SIZE])  # the first column is a tie of two ranks
    for op in (hvd.Sum, hvd.Average):
        weight = nn.Parameter(torch.zeros(4))
        signs = hvd.Compression.quantized("signsgd")
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=signs, op=op)
        (weight * gradients[RANK]).sum().backward()
        optimizer.step()
        assert torch.equal(-weight.detach(), torch.sign(torch.sign(gradients).sum(0)))


def check_the_bytes_of_quantised_gradients_do_not_grow_with_the_ranks():
    sent = []
    weight = nn.Parameter(torch.zeros(100_000))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), compression=hvd.Compression.quantized("int4")
    )
    with (
        mock.patch.object(quantized, "submit_alltoall", counting(quantized.submit_alltoall, sent)),
        mock.patch.object(quantized, "submit_allgather", counting(quantized.submit_allgather, sent)),
    ):
        weight.sum().backward()
        optimizer.synchronize()
    parts, sums = sent
    computed = 100_000 * (4 + 32 / 512) / 8  # 4 bits, and 32 bits for 512 numbers
    assert computed <= parts == sums * SIZE < computed * 1.02


def check_a_checkpoint_of_each_rank_continues_as_if_there_had_been_no_stop():
    for compression in (
        hvd.Compression.powersgd(1, start_iteration=1),
        hvd.Compression.dgc(0.1, 9),
        hvd.Compression.quantized("int4"),
        hvd.Compression.quantized("ternary"),
    ):
        continue_as_if_there_had_been_no_stop(compression)


def continue_as_if_there_had_been_no_stop(compression):
    model = new_model()
    optimizer = hvd.DistributedOptimizer(plain_sgd(model), compression=compression)
    run(model, optimizer)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    run(model, optimizer)
    again = new_model(seed=1)
    resumed = hvd.DistributedOptimizer(plain_sgd(again), compression=compression)
    file.seek(0)
    states = torch.load(file)
    again.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    run(again, resumed)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    plain_sgd(again).load_state_dict(states[1])


def check_another_rank_s_checkpoint_brings_no_residual_but_the_rest():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), compression=hvd.Compression.powersgd(1, start_iteration=1))
    run(model, optimizer)
    optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), 0))
    memory = optimizer.state_dict()["compression"]["memory"]
    assert (RESIDUAL in memory[0]) == (RANK == 0)
    assert memory[0]["num_steps"] == STEPS
    run(model, optimizer)
    assert_equal_on_all_ranks(model)
    optimizer = hvd.DistributedOptimizer(plain_sgd(model), compression=hvd.Compression.dgc(0.1))
    run(model, optimizer)
    optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), 0))
    assert (VELOCITY in optimizer.state_dict()["compression"]["memory"].get(0, {})) == (RANK == 0)


def check_a_rank_that_joins_later_gets_the_state_of_compression_by_a_broadcast():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), compression=hvd.Compression.powersgd(1, start_iteration=2))
    run(model, optimizer)
    if RANK == SIZE - 1:
        optimizer.load_state_dict(sgd(model).state_dict())
    before = optimizer.state_dict()["compression"]["memory"]
    hvd.broadcast_optimizer_state(optimizer, 0, model=model)
    after = optimizer.state_dict()["compression"]["memory"]
    assert after[0]["num_steps"] == STEPS
    if RANK != SIZE - 1:
        assert torch.equal(before[0][RESIDUAL], after[0][RESIDUAL])
    run(model, optimizer)
    assert_equal_on_all_ranks(model)


def check_uneven_epochs_end_with_join_and_the_average_is_over_all_ranks():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    for step in range(2 + RANK):
        alone = new_model()
        alone.load_state_dict(model.state_dict())
        loss_of(alone, batch(step, RANK)).backward()
        optimizer.zero_grad()
        loss_of(model, batch(step, RANK)).backward()
        optimizer.synchronize()
        if step == SIZE:
            # Only the last rank is still there; the others add zeros, and count.
            torch.testing.assert_close(model[0].bias.grad, alone[0].bias.grad / SIZE)
        with optimizer.skip_synchronize():
            optimizer.step()
    last = hvd.join()
    assert last == hvd.broadcast_object(last, 0)
    # The last rank has made more steps than the others.
    hvd.broadcast_parameters(model.state_dict(), SIZE - 1)
    hvd.broadcast_optimizer_state(optimizer, SIZE - 1)
    run(model, optimizer)
    assert_equal_on_all_ranks(model)


def check_parameters_and_passes_in_any_order_and_number():
    generator = random.Random(3)
    model, alone = new_model(), new_model()
    optimizers = [hvd.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(alone)]
    layers = [0, 2, 4]
    for step in range(8):
        frozen = generator.sample(layers, generator.randrange(3))
        for network in (model, alone):
            for layer in layers:
                network[layer].requires_grad_(layer not in frozen)
        for network, optimizer, x in zip((model, alone), optimizers, (batch(step, RANK), batch(step)), strict=True):
            optimizer.zero_grad()
            loss_of(network, x).backward()
            optimizer.step()
    assert_trained_like(model, alone)


def check_sparse_embeddings_get_no_dense_zero_gradient():
    model = Words(sparse=True)
    optimizer = torch.optim.SparseAdam([model.embedding.weight])
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    assert model.embedding.weight.grad is None
    with contextlib.suppress(StopIteration):
        next(iter(optimizer.state))
        raise AssertionError("a fresh optimizer did not stay fresh")


def check_the_size_of_buckets_is_chosen_alike_on_all_ranks_and_again_after_a_join():
    # Ranks that pause at other gradients measure other times.
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(200, 200), nn.Tanh())), nn.Linear(200, 2))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    copied = copy.deepcopy(model)
    for compression in (hvd.Compression.none, hvd.Compression.bf16):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.01), compression=compression, bucket_bytes="auto"
        )
        assert optimizer.is_choosing_buckets
        assert optimizer.bucket_bytes == 25 << 20
        train_wide(model, optimizer, steps=12)
        assert not optimizer.is_choosing_buckets
        sizes = hvd.allgather_object(optimizer.bucket_bytes)
        assert len(set(sizes)) == 1
        assert 0 < sizes[0] <= sum(parameter.numel() * 4 for parameter in model.parameters())
        if compression is hvd.Compression.none:
            plain = hvd.DistributedOptimizer(torch.optim.SGD(copied.parameters(), 0.01), bucket_bytes=0)
            train_wide(copied, plain, steps=12)
            torch.testing.assert_close(model.state_dict(), copied.state_dict(), rtol=1e-5, atol=1e-6)
            del plain
        assert_equal_on_all_ranks(model)
        # The ranks have data for different numbers of steps; they count together again afterwards.
        train_wide(model, optimizer, steps=RANK)
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train_wide(model, optimizer, steps=1)
        assert optimizer.is_choosing_buckets
        train_wide(model, optimizer, steps=8)
        assert len(set(hvd.allgather_object(optimizer.bucket_bytes))) == 1
        del optimizer


def train_wide(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 200, generator=torch.Generator().manual_seed(step * SIZE + RANK))
        model(x).square().mean().backward()
        optimizer.step()


def check_a_size_of_buckets_that_means_nothing_is_refused():
    def wrap(**options):
        model = new_model()
        return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)

    with raises(ValueError, "at least 0, not -1"):
        wrap(bucket_bytes=-1)
    with raises(ValueError, "Adasum"):
        wrap(bucket_bytes="auto", op=hvd.Adasum)
    with raises(ValueError, "groups"):
        wrap(bucket_bytes="auto", groups=2)
    with raises(ValueError, "compressions none, fp16 and bf16"):
        wrap(bucket_bytes="auto", compression=hvd.Compression.topk(0.1))


run_checks(globals())
hvd.shutdown()
