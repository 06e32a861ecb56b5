"""Costs of collectives, by hand and by laws."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.planning.cluster import (
    Cluster,
    Link,
    LinkedRanks,
    add_cluster_options,
    all_gather_s,
    all_ranks,
    all_reduce_s,
    all_to_all_s,
    parse_bandwidth,
    parse_clusters,
    parse_duration,
    place_group,
    reduce_scatter_s,
    send_s,
)
from tests.planning.examples import clusters

COLLECTIVES = [all_gather_s, reduce_scatter_s, all_reduce_s, all_to_all_s, send_s]
# 100 bytes/s and half a second per message.
LINK = Link(100.0, 0.5)
FOUR = LinkedRanks(1, 4)
groups = st.builds(
    LinkedRanks, num_nodes=st.integers(1, 8), ranks_per_node=st.integers(1, 8), groups_per_node=st.integers(1, 4)
)


@pytest.mark.parametrize("collective", COLLECTIVES)
@given(clusters, st.floats(0, 1e12))
def test_one_rank_does_not_communicate(collective, cluster, size_bytes):
    assert collective(size_bytes, LinkedRanks(), cluster) == 0


def test_rings_of_four_ranks_take_what_is_computed_by_hand():
    cluster = Cluster(1, LINK, 4)
    # Three messages of 100 bytes each: 3 * (0.5 + 1).
    assert all_gather_s(400, FOUR, cluster) == pytest.approx(4.5)
    assert reduce_scatter_s(400, FOUR, cluster) == pytest.approx(4.5)
    # 2 (N - 1) / N * bytes / bandwidth + 2 (N - 1) * latency (Patarasuk and Yuan 2009).
    assert all_reduce_s(400, FOUR, cluster) == pytest.approx(2 * 3 / 4 * 4.0 + 2 * 3 * 0.5)
    assert all_to_all_s(400, FOUR, cluster) == pytest.approx(4.5)
    assert send_s(400, FOUR, cluster) == pytest.approx(0.5 + 4)


def test_the_fixed_cost_of_a_collective_occurs_once():
    cluster = Cluster(1, LINK, 4, message_s=10.0)
    assert all_gather_s(400, FOUR, cluster) == pytest.approx(14.5)
    assert all_reduce_s(400, FOUR, cluster) == pytest.approx(19.0)
    assert all_to_all_s(400, FOUR, cluster) == pytest.approx(14.5)
    assert send_s(400, FOUR, cluster) == pytest.approx(14.5)


def test_a_group_on_two_nodes_has_a_ring_in_each_node_and_one_between_them():
    cluster = Cluster(2, LINK, 4, inside=Link(1000.0, 0.0))
    # Inside 3/4 of 400 bytes at 1000 bytes/s; between the nodes one message of half of the bytes.
    assert all_gather_s(400, LinkedRanks(2, 4), cluster) == pytest.approx(0.3 + 0.5 + 2.0)


def test_groups_that_share_the_link_of_a_node_share_its_bandwidth():
    cluster = Cluster(2, LINK, 4, inside=Link(1000.0, 0.0))
    alone, shared = LinkedRanks(2, 1), LinkedRanks(2, 1, groups_per_node=4)
    assert all_gather_s(400, alone, cluster) == pytest.approx(0.5 + 2.0)
    assert all_gather_s(400, shared, cluster) == pytest.approx(0.5 + 8.0)
    assert send_s(400, shared, cluster) == pytest.approx(0.5 + 16.0)
    assert all_to_all_s(400, shared, cluster) == pytest.approx(0.5 + 8.0)


@given(clusters)
def test_all_ranks_of_a_cluster_are_placed_as_its_nodes_have_them(cluster):
    assert all_ranks(cluster) == place_group(range(cluster.world_size), cluster.ranks_per_node)


@pytest.mark.parametrize("collective", COLLECTIVES)
@given(clusters, groups, st.floats(0, 1e12), st.floats(0, 1e12))
def test_more_bytes_take_longer(collective, cluster, group, size_bytes, more_bytes):
    assert collective(size_bytes, group, cluster) <= collective(size_bytes + more_bytes, group, cluster)


@given(clusters, groups, st.floats(0, 1e12))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(cluster, group, size_bytes):
    both_s = reduce_scatter_s(size_bytes, group, cluster) + all_gather_s(size_bytes, group, cluster)
    fixed_s = cluster.message_s if group.size > 1 else 0.0
    assert all_reduce_s(size_bytes, group, cluster) == pytest.approx(both_s - fixed_s)


@pytest.mark.parametrize(
    ("ranks", "group"),
    [
        ([0], LinkedRanks(1, 1)),
        ([0, 1, 2, 3], LinkedRanks(1, 4)),
        (range(16), LinkedRanks(2, 8)),
        ([0, 8], LinkedRanks(2, 1, groups_per_node=8)),
        ([0, 4, 8, 12], LinkedRanks(2, 2, groups_per_node=4)),
        (range(12), LinkedRanks(2, 8)),  # uneven: as if both nodes had 8
    ],
)
def test_ranks_are_placed_on_nodes_of_eight(ranks, group):
    assert place_group(ranks, 8) == group


def test_a_group_of_no_ranks_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        LinkedRanks(0, 1)


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
    with pytest.raises(ConfigError, match=r"bandwidth of a link is 0\.0"):
        Link(0.0)
    with pytest.raises(ConfigError, match="at least 1"):
        Cluster(0, Link(1.0))


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_cluster_options(parser, num_nodes=[1, 2], default_help="1 2")
    return parse_clusters(parser.parse_args(words))


def test_each_number_of_nodes_is_a_cluster_of_the_same_links():
    network = Link(1.25e9, parse_duration("50us"))
    assert parsed() == [Cluster(1, network), Cluster(2, network)]
    inside = Link(2e11, parse_duration("5us"))
    assert parsed("--nodes", "8", "--ranks-per-node", "4", "--inside-bandwidth", "200GB/s") == [
        Cluster(8, network, 4, inside)
    ]


def test_a_cluster_says_what_it_is():
    (cluster,) = parsed("--nodes", "8", "--ranks-per-node", "4", "--inside-bandwidth", "200GB/s")
    assert cluster.describe() == "nodes of 4 ranks, 1.25 GB/s and 50 us between them, 200 GB/s and 5 us inside"


def test_a_latency_inside_without_links_inside_is_refused():
    with pytest.raises(ConfigError, match="without --inside-bandwidth"):
        parsed("--inside-latency", "1us")
