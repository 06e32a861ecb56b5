"""The plan by which ranks exchange their requests, and how long they wait for each other."""

import datetime as dt
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from datasvc.trainer.engine.execution import transport
from datasvc.trainer.engine.execution.transport import GroupTransport, plan_exchange


@pytest.mark.parametrize("size", range(1, 18))
def test_every_rank_gets_the_part_of_each_in_the_order_of_ranks_in_few_rounds(size):
    held = [[rank] for rank in range(size)]
    plans = [plan_exchange(rank, size) for rank in range(size)]
    for number in range((size - 1).bit_length()):
        before = [list(parts) for parts in held]
        for rank, plan in enumerate(plans):
            step = plan[number]
            sent = plans[step.source][number]
            assert (sent.target, sent.num_parts, step.held) == (rank, step.num_parts, len(held[rank]))
            held[rank] += before[step.source][: step.num_parts]
    assert held == [[(rank + behind) % size for behind in range(size)] for rank in range(size)]
    assert {len(plan) for plan in plans} == {(size - 1).bit_length()}


def test_ranks_wait_for_requests_up_to_the_limit_set_after_they_had_connected():
    """Two ranks in threads: the second is later than the limit with which the groups were made."""
    store, connect_s = dist.HashStore(), 0.2

    def exchange(rank):
        ranks = GroupTransport.__new__(GroupTransport)
        ranks.rank, ranks.size, ranks._steps = rank, 2, plan_exchange(rank, 2)
        ranks._slots = bytearray(2 * transport._SLOT_BYTES)
        ranks._slot_tensor = torch.frombuffer(ranks._slots, dtype=torch.uint8)
        ranks._control = dist.ProcessGroupGloo(store, rank, 2, dt.timedelta(seconds=connect_s))
        ranks._timeout = dt.timedelta(seconds=60)
        if rank == 1:
            threading.Event().wait(5 * connect_s)
        return ranks.exchange(b"request of %d" % rank)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, range(2))) == [[b"request of 0", b"request of 1"]] * 2
