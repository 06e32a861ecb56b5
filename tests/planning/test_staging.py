"""The forecast of staging: small cases by hand, bounds that hold for all, and what nodes lost or added cost."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasvc.cache.sources.origin_source import RequestPool
from datasvc.errors import CacheFullError, ConfigError
from datasvc.node.settings import NodeSettings
from datasvc.node.transfers import fetching, sending, staging_jobs
from datasvc.planning import staging
from datasvc.planning.staging import StagingOptions, parse_nodes, plan_staging
from datasvc.planning.staging_flows import NO_LIMIT, Simulation, StagedObjects, StagingLimits

MB = 1_000_000
PLAIN = StagingOptions(
    size_bytes=100 * MB,
    object_bytes=10 * MB,
    origin_bytes_s=10 * MB,
    node_bytes_s=1000 * MB,
    object_s=0,
    latency_s=0,
    origin_latency_s=0,
)


def simulate(ranked, orders, sizes, *, node=10.0, origin=NO_LIMIT, copies=None, max_connections=256, object_s=0.0):
    """Run a simulation of few nodes and objects, and return it."""
    num_nodes = len(orders)
    objects = StagedObjects(
        np.array(sizes, float),
        np.full(len(sizes), object_s),
        np.array(ranked),
        np.array(orders),
        np.array([0, len(orders[0])]),
        np.full((num_nodes, len(sizes)), -1) if copies is None else np.array(copies),
    )
    limits = StagingLimits(origin, NO_LIMIT, 16, np.full(num_nodes, node), NO_LIMIT, 1, 32, max_connections, 16, 6.0)
    simulation = Simulation(objects, limits, np.ones(num_nodes, bool))
    simulation.run()
    return simulation


def test_one_node_takes_the_time_of_its_bytes_and_the_overhead_of_its_objects():
    assert plan_staging(1, PLAIN).staged_s == pytest.approx(10)
    # One thread, two objects of 10 s and 20 s by the link, and 0.5 s each.
    alone = simulate([[0], [0]], [[0, 1]], [100, 200], object_s=0.5)
    assert alone.done_s.tolist() == pytest.approx([31])
    assert alone.origin_bytes.tolist() == [300]


def test_an_owner_reads_an_object_whole_before_it_sends_it():
    both = simulate([[0, 1]], [[0], [0]], [100])
    assert both.done_s.tolist() == pytest.approx([10, 20])
    assert (both.origin_bytes.tolist(), both.received_bytes.tolist()) == ([100, 0], [0, 100])


def test_two_nodes_exchange_what_they_own_in_both_directions_at_once():
    # Each reads its own object at 10 bytes/s, as its link allows, and then the other one.
    both = simulate([[0, 1], [1, 0]], [[0, 1], [1, 0]], [100, 100])
    assert both.done_s.tolist() == pytest.approx([20, 20])
    assert both.sent_bytes.tolist() == [100, 100]


def test_the_origin_is_shared_by_all_that_read_from_it():
    both = simulate([[0, 1], [1, 0]], [[0, 1], [1, 0]], [100, 100], origin=10)
    assert both.done_s.tolist() == pytest.approx([30, 30])


def test_the_link_of_an_owner_is_shared_by_those_that_receive_and_a_copy_relieves_it():
    ranked, orders = [[0, 1, 2, 3]], [[0]] * 4
    assert simulate(ranked, orders, [100]).done_s.tolist() == pytest.approx([10, 40, 40, 40])
    ranked, orders = [[0, 1, 2, 3], [3, 2, 1, 0]], [[0, 1], [0, 1], [1, 0], [1, 0]]
    only = simulate(ranked, orders, [100, 100])
    relieved = simulate(ranked, orders, [100, 100], copies=[[-1, 2], [-1, 2], [1, -1], [1, -1]])
    assert only.sent_bytes.tolist() == [300, 0, 0, 300]
    # Nodes 1 and 2 have copies when the last nodes come to these objects, but not when the other owners do.
    assert relieved.sent_bytes.tolist() == [200, 100, 100, 200]


def test_more_requests_than_a_node_accepts_go_to_the_next_node_of_the_ranking():
    chain = simulate([[0, 1, 2, 3]], [[0]] * 4, [100], max_connections=1)
    assert chain.done_s.tolist() == pytest.approx([10, 20, 30, 40])
    # Node 3, which the owner refuses, is the next owner itself.
    second = simulate([[0, 3, 2, 1]], [[0]] * 4, [100], max_connections=1)
    assert second.origin_bytes.tolist() == [100, 0, 0, 100]


@given(
    st.integers(1, 20),
    st.integers(1, 40),
    st.floats(0.02, 50),
    st.booleans(),
    st.sampled_from([1.0, 0.3]),
    st.integers(1, 2),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_no_forecast_is_faster_than_its_bounds_and_each_byte_is_read_once(
    nodes, objects, origin, one_owner, share, data_sets, slow
):
    found = plan_staging(
        nodes,
        replace(
            PLAIN,
            size_bytes=objects * 10 * MB,
            origin_bytes_s=origin * 100 * MB,
            node_bytes_s=100 * MB,
            disk_bytes_s=80 * MB,
            one_owner=one_owner,
            share=share,
            data_sets=min(data_sets, objects),
            slow=(min(slow, nodes), 3),
        ),
    )
    assert found.ratio > 0.999
    assert found.origin_reads == pytest.approx(1)
    assert found.first_node_s <= found.staged_s == pytest.approx(max(found.data_set_s))
    if share == 1:
        assert found.origin_bytes + found.peer_bytes == pytest.approx(nodes * objects * 10 * MB)


def test_many_equal_nodes_come_near_the_bound_of_their_links():
    # 2,000 objects of 8 nodes; the origin is no bound.
    found = plan_staging(8, replace(PLAIN, size_bytes=20_000 * MB, origin_bytes_s=1e12))
    assert found.network_s == found.bound_s == pytest.approx(20)
    assert 1 < found.ratio < 1.2


def test_orders_and_copies_relieve_owners_where_nodes_are_many():
    options = replace(PLAIN, size_bytes=1000 * MB, origin_bytes_s=1e12)
    now, before = plan_staging(32, options), plan_staging(32, replace(options, one_owner=True))
    assert now.staged_s < 0.7 * before.staged_s
    assert now.busiest < before.busiest


def test_objects_of_a_lost_node_are_read_again_where_no_copy_is_left():
    options = replace(PLAIN, size_bytes=400 * MB, origin_bytes_s=40 * MB)
    intact, early = plan_staging(4, options), plan_staging(4, replace(options, lose=(2, 0.1)))
    assert intact.origin_reads == pytest.approx(1)
    assert 1.02 < early.origin_reads < 1.5
    assert early.staged_s > intact.staged_s
    assert early.ratio >= 1


def test_an_added_node_stages_all_and_reads_what_it_owns_from_the_origin():
    options = replace(PLAIN, size_bytes=400 * MB, origin_bytes_s=1000 * MB)
    found = plan_staging(4, replace(options, add=(1, 0.5)))
    assert found.origin_bytes + found.peer_bytes == pytest.approx(5 * 400 * MB)
    assert 1 < found.origin_reads < 1.3
    assert found.staged_s > plan_staging(4, options).staged_s
    late = plan_staging(4, replace(options, origin_bytes_s=10 * MB, add=(1, 0.99), data_sets=2))
    assert late.staged_s == max(late.data_set_s)


def test_a_node_is_added_also_if_too_many_are_lost_for_its_share_to_arrive():
    alone = plan_staging(3, replace(PLAIN, lose=(2, 0.01), hot=True))
    assert 0 < alone.hot_s < alone.staged_s
    found = plan_staging(3, replace(PLAIN, lose=(2, 0.01), hot=True, add=(1, 0.9)))
    assert found.first_node_s == alone.staged_s < found.staged_s
    # Of data that only the lost nodes stage, nothing is a bound of the others.
    few = plan_staging(10, replace(PLAIN, size_bytes=1000 * MB, share=0.05, lose=(8, 0.1)))
    assert few.origin_s <= 10


def test_each_node_stages_its_share_of_each_data_set():
    # With 200 nodes, one of them draws few objects of a data set, if it draws from all data sets together.
    found = plan_staging(200, replace(PLAIN, size_bytes=1000 * MB, share=0.1, data_sets=2))
    assert found.origin_bytes + found.peer_bytes > 200 * 0.1 * 1000 * MB
    assert plan_staging(8, replace(PLAIN, share=0.01, data_sets=2)).origin_bytes >= 20 * MB


def test_the_order_of_a_node_is_that_of_the_nodes_when_it_begins():
    objects = staging._make_objects(15, 16, PLAIN)
    assert (objects.orders[:15] == np.arange(10)).all()
    assert sorted(objects.orders[15]) == list(range(10)) != objects.orders[15].tolist()


def test_a_hot_object_is_on_all_nodes_before_the_rest():
    found = plan_staging(8, replace(PLAIN, size_bytes=800 * MB, origin_bytes_s=1e12, hot=True))
    assert found.hot_s < 0.5 * found.staged_s


def test_many_objects_are_simulated_as_fewer_larger_ones():
    found = plan_staging(2, replace(PLAIN, size_bytes=90_000 * MB, origin_bytes_s=1e12))
    assert (found.num_objects, found.num_simulated) == (9000, 3000)
    assert found.origin_bytes + found.peer_bytes == pytest.approx(2 * 90_000 * MB)


def test_data_beyond_the_budget_and_wrong_values_are_refused():
    with pytest.raises(CacheFullError, match=r"staging needs .* bytes on each node, and 99000000 are available"):
        plan_staging(2, replace(PLAIN, budget_bytes=99 * MB))
    plan_staging(2, replace(PLAIN, budget_bytes=101 * MB))
    plan_staging(2, replace(PLAIN, budget_bytes=101 * MB, object_bytes=1000 * MB))
    for wrong in (
        *({"share": 0}, {"share": 2}, {"slow": (1, 0.5)}, {"data_sets": 11}, {"size_bytes": 0}, {"disk_bytes_s": 0}),
        *({"object_s": math.nan}, {"latency_s": -1}, {"lose": (-1, 0.5)}, {"add": (1, 1.0)}, {"slow": (-1, 2)}),
    ):
        with pytest.raises(ConfigError):
            replace(PLAIN, **wrong)
    with pytest.raises(ConfigError, match="expected at most 2000"):  # there are 2,001 simulated objects
        replace(PLAIN, size_bytes=40_010 * MB, data_sets=3000)
    with pytest.raises(ConfigError, match="more than are lost"):
        plan_staging(2, replace(PLAIN, lose=(2, 0.5)))
    assert parse_nodes("3@12.5%", "@", "%") == (3, 0.125)
    with pytest.raises(ConfigError, match="write it as 1:50"):
        parse_nodes("2x", ":")


def test_the_limits_of_a_simulated_node_are_those_of_a_node():
    assert staging.THREADS == staging_jobs._NUM_SHARD_THREADS
    assert sending.plan_streams(None).num_streams == staging.MAX_STREAMS
    assert NodeSettings.max_connections == staging.MAX_CONNECTIONS
    assert fetching.Fetches.__init__.__kwdefaults__["num_threads"] == staging.MAX_FETCHES
    assert RequestPool.__init__.__defaults__ == (staging.MAX_REQUESTS,)
