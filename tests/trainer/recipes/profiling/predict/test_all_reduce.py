import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.all_reduce import Cluster, all_reduce_s, ring_s
from datasvc.trainer.recipes.profiling.predict.links import Link, parse_bandwidth, parse_duration


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
    assert all_reduce_s(10**9, Cluster(1, Link(1.0), message_s=5.0)) == 0.0


def test_nodes_of_several_ranks_reduce_inside_first():
    network, inside = Link(1e9, 1e-4), Link(1e11, 1e-6)
    flat = all_reduce_s(10**8, Cluster(16, network, 8, message_s=1e-3))
    nested = all_reduce_s(10**8, Cluster(16, network, 8, inside, message_s=1e-3))
    assert flat == pytest.approx(1e-3 + ring_s(10**8, 128, network))
    assert nested == pytest.approx(1e-3 + ring_s(10**8, 8, inside) + ring_s(10**8, 16, network))
    assert nested < flat
    assert all_reduce_s(10**8, Cluster(1, network, 8, inside)) == pytest.approx(ring_s(10**8, 8, inside))


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("10GbE", 1.25e9), ("100Gbit/s", 12.5e9), ("200 Gb/s", 25e9), ("25GB/s", 25e9), ("100Mbps", 12.5e6)],
)
def test_bandwidths_are_read_in_bits_or_bytes_as_written(text, bytes_per_s):
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize(("text", "duration_s"), [("50us", 50e-6), ("1.5 ms", 1.5e-3), ("0s", 0.0), ("3ns", 3e-9)])
def test_durations_are_read_with_their_unit(text, duration_s):
    assert parse_duration(text) == pytest.approx(duration_s)


@pytest.mark.parametrize("text", ["10", "fast", "10GbX", "-1GB/s", "0Gbit/s"])
def test_what_is_no_bandwidth_is_refused(text):
    with pytest.raises(ConfigError, match="10GbE"):
        parse_bandwidth(text)


def test_what_is_no_duration_link_or_cluster_is_refused():
    with pytest.raises(ConfigError, match="50us"):
        parse_duration("50")
    with pytest.raises(ConfigError, match="carries nothing"):
        Link(0.0)
    with pytest.raises(ConfigError, match="at least 1"):
        Cluster(0, Link(1.0))
