"""The time of an all-reduce over all ranks of a cluster, by hand and by a simulated ring."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.recipes.profiling.predict.cluster import Cluster, Link, parse_bandwidth, parse_duration
from datasvc.trainer.recipes.profiling.predict.collectives import all_ranks, all_reduce_s


def ring_s(size_bytes, num_ranks, link):
    return reduce_s(size_bytes, Cluster(1, link, num_ranks))


def reduce_s(size_bytes, cluster):
    return all_reduce_s(size_bytes, all_ranks(cluster), cluster)


def play_ring(chunk_sizes, ranks, link):
    """Pass chunks around: in each step every rank sends one to its right and waits for the one from its left."""
    free_s = [0.0] * ranks
    for step in range(2 * (ranks - 1)):
        sent = [
            free_s[rank] + link.latency_s + chunk_sizes[(rank - step) % ranks] / link.bytes_per_s
            for rank in range(ranks)
        ]
        free_s = [max(sent[rank], sent[rank - 1]) for rank in range(ranks)]
    return max(free_s)


@given(st.integers(1, 12), st.integers(0, 10**6), st.floats(0, 1), st.floats(1e3, 1e9))
def test_the_formula_is_what_a_ring_of_equal_chunks_takes(ranks, chunk_bytes, latency_s, bytes_per_s):
    link = Link(bytes_per_s, latency_s)
    played = play_ring([chunk_bytes] * ranks, ranks, link)
    assert ring_s(chunk_bytes * ranks, ranks, link) == pytest.approx(played, rel=1e-9, abs=1e-12)


def test_a_ring_of_eight_over_ten_gigabit():
    link = Link(parse_bandwidth("10GbE"), parse_duration("50us"))
    assert ring_s(100_000_000, 8, link) == pytest.approx(2 * 7 / 8 * 0.08 + 14 * 50e-6)


def test_one_rank_sends_nothing_and_pays_for_no_message():
    assert reduce_s(10**9, Cluster(1, Link(1.0), message_s=5.0)) == 0.0


def test_nodes_of_several_ranks_reduce_inside_first():
    network, inside = Link(1e9, 1e-4), Link(1e11, 1e-6)
    flat = reduce_s(10**8, Cluster(16, network, 8, message_s=1e-3))
    nested = reduce_s(10**8, Cluster(16, network, 8, inside, message_s=1e-3))
    assert flat == pytest.approx(1e-3 + ring_s(10**8, 128, network))
    assert nested == pytest.approx(1e-3 + ring_s(10**8, 8, inside) + ring_s(10**8, 16, network))
    assert nested < flat
    assert reduce_s(10**8, Cluster(1, network, 8, inside)) == pytest.approx(ring_s(10**8, 8, inside))
