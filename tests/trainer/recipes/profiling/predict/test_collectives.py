"""Costs of collectives, by hand and by laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.cluster import Cluster, Link
from datasvc.trainer.recipes.profiling.predict.collectives import (
    LinkedRanks,
    all_gather_s,
    all_ranks,
    all_reduce_s,
    all_to_all_s,
    place_group,
    reduce_scatter_s,
    send_s,
)
from tests.trainer.recipes.planning.examples import clusters

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
