"""The exchange of heads among the ranks that divide them."""

from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.recipes.layouts.tensor import plan_exchange
from tests.examples import examples


@examples(20)
@given(st.integers(1, 9))
def test_each_rank_gets_the_queries_keys_and_values_of_its_heads_in_this_order(size):
    plans = [plan_exchange(rank, size) for rank in range(size)]
    sent = []  # by source: the units for each target, in the order in which they are sent
    for rank, (order, num_sent, _) in enumerate(plans):
        units, start = [3 * rank + number for number in order], 0
        sent.append([])
        for number in num_sent:
            sent[-1].append(units[start : start + number])
            start += number
        assert start == 3
    for rank, (_, _, num_received) in enumerate(plans):
        received = [unit for source in range(size) for unit in sent[source][rank]]
        assert [len(sent[source][rank]) for source in range(size)] == num_received
        assert received == [rank, size + rank, 2 * size + rank]
