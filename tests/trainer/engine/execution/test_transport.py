"""The plan by which ranks exchange what they say, without a network."""

import pytest

from datasvc.trainer.engine.execution.transport import plan_exchange


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


@pytest.mark.parametrize("size", range(1, 18))
def test_every_rank_gets_the_and_of_all_though_the_last_step_repeats_some(size):
    values = [~(1 << rank) for rank in range(size)]  # one bit is unset by each
    plans = [plan_exchange(rank, size) for rank in range(size)]
    for number in range((size - 1).bit_length()):
        before = list(values)
        values = [before[rank] & before[plan[number].source] for rank, plan in enumerate(plans)]
    assert values == [~((1 << size) - 1)] * size
