"""Operations that deal rows to ranks, and Adasum, against what torch computes from all ranks' inputs."""

import torch
from checking import raises, run_checks

import datasvc.trainer as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
DTYPES = (torch.float16, torch.float32, torch.float64, torch.uint8, torch.int16, torch.int64)


def rows_of(rank, num_rows, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 9, (num_rows, 3), generator=generator).to(dtype)


def share_of(rank, num_rows):
    share, rest = divmod(num_rows, SIZE)
    start = rank * share + min(rank, rest)
    return slice(start, start + share + (rank < rest))


def check_reducescatter_of_every_type_and_any_number_of_rows():
    for dtype in DTYPES:
        for num_rows in (0, 1, SIZE, 2 * SIZE + 1):
            total = torch.stack([rows_of(rank, num_rows, dtype) for rank in range(SIZE)]).double().sum(0)
            mine = rows_of(RANK, num_rows, dtype)
            part = hvd.reducescatter(mine, op=hvd.Sum)
            assert part.dtype == dtype
            assert torch.equal(part, total[share_of(RANK, num_rows)].to(dtype)), (dtype, num_rows)
            assert torch.equal(mine, rows_of(RANK, num_rows, dtype)), "the input changed"
            average = hvd.synchronize(hvd.reducescatter_async(mine))
            torch.testing.assert_close(average, (total / SIZE)[share_of(RANK, num_rows)].to(dtype))


def check_groups_are_scattered_and_gathered_as_one():
    tensors = [rows_of(RANK, n) for n in (SIZE, 5)] + [rows_of(RANK, 4, torch.int16)]
    for part, n, dtype in zip(
        hvd.grouped_reducescatter(tensors, op=hvd.Sum, prescale_factor=2.0),
        (SIZE, 5, 4),
        (torch.float32, torch.float32, torch.int16),
        strict=True,
    ):
        total = 2 * torch.stack([rows_of(rank, n, dtype) for rank in range(SIZE)]).sum(0)
        assert torch.equal(part, total[share_of(RANK, n)].to(dtype))
    uneven = [rows_of(RANK, RANK), rows_of(RANK, 2, torch.int64)]
    gathered = hvd.synchronize(hvd.grouped_allgather_async(uneven))
    assert torch.equal(gathered[0], torch.cat([rows_of(rank, rank) for rank in range(SIZE)]))
    assert torch.equal(gathered[1], torch.cat([rows_of(rank, 2, torch.int64) for rank in range(SIZE)]))


def check_alltoall_in_equal_parts():
    for dtype in (*DTYPES, torch.bool, torch.complex64):
        received = hvd.alltoall(rows_of(RANK, 2 * SIZE, dtype))
        expected = [rows_of(rank, 2 * SIZE, dtype)[2 * RANK : 2 * RANK + 2] for rank in range(SIZE)]
        assert torch.equal(received, torch.cat(expected)), dtype


def splits_of(rank):
    """Uneven, one of them nothing, and one row that goes nowhere."""
    return torch.tensor([(rank + other) % 3 for other in range(SIZE)], dtype=torch.int32)


def sent(sender, receiver):
    splits = splits_of(sender).tolist()
    start = sum(splits[:receiver])
    return rows_of(sender, sum(splits) + 1)[start : start + splits[receiver]]


def check_alltoall_with_splits_returns_the_received_numbers_of_rows():
    mine, splits = rows_of(RANK, int(splits_of(RANK).sum()) + 1), splits_of(RANK)
    for received, counts in (
        hvd.alltoall(mine, splits),
        hvd.synchronize(hvd.alltoall_async(mine, splits, name="splits")),
    ):
        assert torch.equal(received, torch.cat([sent(rank, RANK) for rank in range(SIZE)]))
        assert counts.dtype == torch.int32
        assert counts.tolist() == [int(splits_of(rank)[RANK]) for rank in range(SIZE)]
    nothing, counts = hvd.alltoall(torch.zeros(0, 2), torch.zeros(SIZE, dtype=torch.int32))
    assert (nothing.shape, counts.tolist()) == ((0, 2), [0] * SIZE)


def check_what_one_rank_alone_can_see_is_a_value_error_there():
    for splits, words in (
        (torch.zeros(SIZE, dtype=torch.int64), "int32"),
        (torch.zeros(SIZE + 1, dtype=torch.int32), f"each of {SIZE} ranks"),
        (torch.full((SIZE,), 9, dtype=torch.int32), "cannot be taken from 2 rows"),
    ):
        with raises(ValueError, words):
            hvd.alltoall(torch.ones(2, 1), splits)
    with raises(ValueError, "give splits"):
        hvd.alltoall(torch.ones(SIZE + 1))
    with raises(ValueError, "at least one dimension"):
        hvd.reducescatter(torch.tensor(1.0))
    with raises(RuntimeError, "Sum and Average"):
        hvd.reducescatter(torch.ones(SIZE), op=hvd.Max)
    with raises(ValueError, "not both"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    hvd.barrier()


def check_disagreements_about_rows():
    odd = RANK == SIZE - 1
    for attempt, words in (
        (lambda: hvd.alltoall(torch.ones(SIZE, 2 + odd), name="bad"), "shape after the first dimension"),
        (lambda: hvd.reducescatter(torch.ones(SIZE + odd), name="bad"), "shape"),
        (lambda: hvd.reducescatter(torch.ones(SIZE), op=hvd.Sum if odd else hvd.Average, name="bad"), "reduction"),
        (lambda: hvd.grouped_allgather([torch.ones(1)] * (1 + odd), name="bad"), "bad"),
    ):
        with raises(hvd.HorovodInternalError, words):
            attempt()


def check_gradients_go_back_the_way_the_values_came():
    x = rows_of(RANK, int(splits_of(RANK).sum()) + 1).requires_grad_()
    received, _ = hvd.alltoall(x, splits_of(RANK))
    (received * (RANK + 1)).sum().backward()
    factors = [float(other + 1) for other, rows in enumerate(splits_of(RANK).tolist()) for _ in range(rows)] + [0.0]
    assert torch.equal(x.grad, torch.tensor(factors).unsqueeze(1).expand(-1, 3))
    y = torch.ones(2 * SIZE + 1, requires_grad=True)
    part = hvd.reducescatter(y, op=hvd.Sum, prescale_factor=0.5)
    (part * (RANK + 1)).sum().backward()
    weights = [float(rank + 1) for rank in range(SIZE) for _ in range(len(y[share_of(rank, len(y))]))]
    assert torch.equal(y.grad, torch.tensor(weights) * 0.5 * SIZE)
    z = [torch.ones(RANK + 1, requires_grad=True), torch.ones(1, requires_grad=True)]
    sum((each * (RANK + 1)).sum() for each in hvd.grouped_allgather(z)).backward()
    assert all(torch.equal(each.grad, torch.full_like(each, (SIZE + 1) / 2)) for each in z)


def adasum(vectors):
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            a * (1 - (a @ b) / (2 * (a @ a)) if a.any() else 1) + b * (1 - (a @ b) / (2 * (b @ b)) if b.any() else 1)
            for a, b in pairs
        ]
    return vectors[0]


def check_adasum_is_the_tree_of_the_paper_for_each_tensor():
    if SIZE & (SIZE - 1):
        with raises(ValueError, "power of two"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        return
    vectors = [
        [torch.randn(n, generator=torch.Generator().manual_seed(31 * rank + n)) for n in (5, 40)]
        for rank in range(SIZE)
    ]
    expected = [adasum([each[k].double() for each in vectors]).float() for k in range(2)]
    reduced = hvd.grouped_allreduce(vectors[RANK], op=hvd.Adasum)
    torch.testing.assert_close(reduced, expected)
    assert all(each.tolist() == hvd.broadcast(each, 0).tolist() for each in reduced), "not the same on all ranks"
    orthogonal = torch.eye(SIZE)[RANK] * (RANK + 1)
    torch.testing.assert_close(hvd.allreduce(orthogonal, op=hvd.Adasum), torch.arange(1.0, SIZE + 1))
    torch.testing.assert_close(hvd.allreduce(torch.ones(4), op=hvd.Adasum), torch.ones(4))
    assert not hvd.allreduce(torch.zeros(3), op=hvd.Adasum).any()
    with raises(ValueError, "floating-point"):
        hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum)


def check_compressed_values_come_back_as_they_were_sent():
    values = torch.arange(8.0) * (RANK + 1)
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        total = hvd.allreduce(values, op=hvd.Sum, compression=compression)
        assert total.dtype == torch.float32
        assert torch.equal(total, torch.arange(8.0) * sum(range(SIZE + 1)))
        (group,) = hvd.grouped_allreduce([values], op=hvd.Sum, compression=compression)
        assert torch.equal(group, total)
        assert torch.equal(hvd.reducescatter(values, op=hvd.Sum, compression=compression), total[share_of(RANK, 8)])
    integers = torch.tensor([2**20 + RANK])
    assert hvd.allreduce(integers, op=hvd.Max, compression=hvd.Compression.fp16).item() == 2**20 + SIZE - 1


run_checks(globals())
hvd.shutdown()
