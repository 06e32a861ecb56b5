"""What a plan says before a run, against what is known to be true of such runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.catalogue.next_use import plan_uses
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.prefetch.window_budget import choose_ahead_bytes, window_bytes
from datasvc.errors import CacheFullError, ConfigError
from datasvc.order import OrderConfig
from datasvc.planning.cache import Rates, Workload, forecast
from datasvc.planning.replay import replay
from tests.drawing.hostile import parsed, text_of
from tests.examples import examples

COUNTS = np.full(240, 100)
SIZES = np.full(240, 25 << 12)  # whole blocks of a disk
DATA = int(SIZES.sum())


def run_shape(lanes=1, *, sticky=False, **options):
    order = OrderConfig(seed=3, shuffle="windowed", lanes=lanes, block=100, sticky=sticky)
    return Workload(order, **{"batch_size": 8, **options})


def forecast_of(share, shape, rates=None):
    return forecast(COUNTS, SIZES, int(DATA * share), shape, rates or Rates())


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_one_node_gets_the_share_that_fits_from_its_cache(share):
    found = forecast_of(share, run_shape())
    assert found.first_epoch.origin_bytes == DATA
    assert found.later_epochs.hit_bytes == pytest.approx(share * DATA, abs=0.01 * DATA)
    assert found.later_epochs.hit_bytes + found.later_epochs.origin_bytes == found.later_epochs.used_bytes
    assert found.resident_bytes == pytest.approx(share * DATA, abs=0.01 * DATA)


def test_data_that_fits_is_read_once():
    found = forecast_of(1.0, Workload(OrderConfig(), batch_size=8))
    assert found.first_epoch.origin_bytes == found.window_bytes == DATA
    assert (found.later_epochs.hit_bytes, found.later_epochs.origin_bytes) == (DATA, 0)


@pytest.mark.parametrize("lanes", [1, 4])
def test_nodes_with_peers_read_the_origin_once_and_then_what_all_their_caches_lack(lanes):
    found = forecast_of(0.15, run_shape(lanes, nodes=4))
    assert found.first_epoch.origin_bytes == DATA
    alone = forecast_of(0.15, run_shape(lanes, nodes=4, has_peers=False))
    assert alone.first_epoch.peer_bytes == alone.later_epochs.peer_bytes == 0
    assert alone.first_epoch.origin_bytes == alone.first_epoch.used_bytes - alone.first_epoch.hit_bytes
    assert alone.first_epoch.used_bytes >= (4 if lanes == 1 else 1) * DATA
    assert found.later_epochs.origin_bytes < 0.6 * DATA < alone.later_epochs.origin_bytes


def test_nodes_whose_caches_hold_the_data_together_leave_the_origin_alone():
    found = forecast_of(0.4, run_shape(nodes=4))
    assert found.later_epochs.origin_bytes == 0
    assert found.later_epochs.peer_bytes == found.later_epochs.used_bytes - found.later_epochs.hit_bytes > 0


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_one_node_that_stands_for_all_moves_what_all_of_them_do(share):
    shape = run_shape(nodes=4)
    found = forecast_of(share, shape)
    uses = plan_uses(COUNTS, SIZES, shape.order, range(6))
    budget = int(DATA * share)
    ahead = choose_ahead_bytes(SIZES, budget)
    owners = np.random.default_rng(0).permutation(240) % 4
    epochs = replay([uses] * 4, SIZES, budget, owners=owners, ahead_bytes=ahead).epochs
    for one, whole in ((found.first_epoch, epochs[0]), (found.later_epochs, epochs[-1])):
        assert one.used_bytes == whole.used_bytes
        assert one.origin_bytes == pytest.approx(whole.origin_bytes, abs=0.03 * DATA)
        assert one.peer_bytes == pytest.approx(whole.peer_bytes, abs=0.03 * 4 * DATA)


def test_many_nodes_may_share_few_shards():
    few = slice(0, 3)
    found = forecast(COUNTS[few], SIZES[few], DATA, run_shape(nodes=50), Rates())
    assert found.first_epoch.origin_bytes == 3 * SIZES[0]
    assert found.first_epoch.peer_bytes == 49 * 3 * SIZES[0]
    assert forecast(COUNTS[:1], SIZES[:1], DATA, run_shape(nodes=4), Rates()).first_epoch.peer_bytes == 3 * SIZES[0]


def test_sticky_lanes_make_later_epochs_local():
    found = forecast_of(0.4, run_shape(4, sticky=True, nodes=4))
    assert found.first_epoch.origin_bytes == DATA
    assert found.later_epochs.hit_bytes == found.later_epochs.used_bytes
    assert found.later_epochs.peer_bytes == 0


def test_nodes_read_lanes_of_their_own_only_where_the_sizes_divide():
    split = forecast_of(0.5, run_shape(8, nodes=4))
    assert split.first_epoch.used_bytes < 1.2 * DATA
    for shape in (
        run_shape(8, nodes=3),
        run_shape(8, nodes=4, ranks_per_node=3),
        run_shape(8, nodes=4, batch_size=7),
    ):
        assert not shape.splits_lanes
        assert forecast_of(0.5, shape).first_epoch.used_bytes >= shape.nodes * DATA


def test_a_window_that_does_not_fit_is_refused_with_the_number():
    with pytest.raises(
        CacheFullError, match=f"this order needs {DATA} bytes of the cache at once, and 100 are available"
    ):
        forecast(COUNTS, SIZES, 100, Workload(OrderConfig(), batch_size=8), Rates())


def test_it_needs_the_window_of_what_is_under_way_on_all_ranks():
    shape = run_shape(nodes=2, ranks_per_node=3, prefetch=4)
    run = 8 * 2 * 3 * (4 + 2)  # one batch in use, four prefetched, and one for a rank that is a step ahead
    window = window_bytes(COUNTS, SIZES, shape.order, run, skipped=8 * 2 * 3 - 1)
    assert forecast_of(0.5, shape).window_bytes == window < DATA


def test_small_shards_take_whole_blocks_of_the_disk():
    shape = Workload(OrderConfig(), batch_size=8)
    assert forecast(COUNTS, COUNTS, 240 * 4096, shape, Rates()).later_epochs.hit_bytes == COUNTS.sum()
    with pytest.raises(CacheFullError, match=f"needs {240 * 4096} bytes"):
        forecast(COUNTS, COUNTS, 240 * 4096 - 1, shape, Rates())
    half = forecast(COUNTS, COUNTS, 120 * 4096, run_shape(), Rates())
    assert half.later_epochs.hit_bytes == pytest.approx(0.5 * COUNTS.sum(), rel=0.1)


def test_bandwidth_follows_from_the_images_that_a_node_trains():
    # 24,000 samples at 4 x 1,000 a second: an epoch of 6 s.
    found = forecast_of(0.4, run_shape(nodes=4), Rates(samples_per_second=1000))
    assert found.first_epoch.origin_rate == pytest.approx(DATA / 6)
    assert found.first_epoch.peer_rate == pytest.approx(found.first_epoch.peer_bytes / 6 / 4)
    assert found.first_epoch.starves is None
    assert found.first_epoch.fed_samples_per_second is None


def test_a_run_starves_where_origin_or_peers_give_less_than_it_needs():
    shape = run_shape(nodes=4)
    enough = Rates(1000, origin=DATA / 5.9, peers=1e12)
    assert forecast_of(0.4, shape, enough).first_epoch.starves is False
    slow = forecast_of(0.4, shape, Rates(1000, origin=DATA / 12))
    assert slow.first_epoch.starves
    assert slow.first_epoch.fed_samples_per_second == pytest.approx(500)
    assert (slow.later_epochs.starves, slow.later_epochs.fed_samples_per_second) == (False, None)
    assert forecast_of(0.4, shape, Rates(1000, peers=1000)).later_epochs.starves


def test_without_a_rate_of_images_it_says_what_the_bandwidth_feeds():
    found = forecast_of(0.5, run_shape(), Rates(origin=DATA / 24))
    assert found.first_epoch.fed_samples_per_second == pytest.approx(1000)
    assert found.first_epoch.starves is None


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("nodes", [1, 4])
def test_a_sample_of_the_shards_tells_what_all_of_them_do(share, nodes):
    generator = np.random.default_rng(0)
    counts = generator.integers(20, 181, 3000)
    sizes = counts * 1000
    budget = int(sizes.sum() * share)
    shape = run_shape(2, nodes=nodes)
    whole = forecast(counts, sizes, budget, shape, Rates())
    sampled = forecast(counts, sizes, budget, shape, Rates(), max_shards=500)
    assert sampled != whole
    assert sampled.resident_bytes == pytest.approx(whole.resident_bytes, rel=0.02)
    for one, other in ((whole.first_epoch, sampled.first_epoch), (whole.later_epochs, sampled.later_epochs)):
        for name in ("used_bytes", "hit_bytes", "origin_bytes", "peer_bytes"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=0.02 * nodes * sizes.sum())


def test_a_window_of_few_shards_among_many_can_be_planned():
    shape = run_shape()
    needed = forecast_of(1.0, shape).window_bytes
    found = forecast(COUNTS, SIZES, needed, shape, Rates(), max_shards=20)
    assert found.later_epochs.hit_bytes < 0.3 * DATA


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 1000)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 40),
    st.booleans(),
    st.integers(1, 5),
    st.integers(0, 100),
)
@examples(50)
def test_any_order_whose_window_fits_can_be_planned(shards, lanes, block, sticky, nodes, extra):
    counts, sizes = (np.array(column) for column in zip(*shards, strict=True))
    order = OrderConfig(shuffle="windowed", lanes=lanes, block=block, sticky=sticky)
    shape = Workload(order, batch_size=4, nodes=nodes, has_peers=nodes > 1)
    if not counts.any():
        with pytest.raises(ConfigError, match="no samples"):
            forecast(counts, sizes, 1, shape, Rates())
        return
    needed = forecast(counts, sizes, int(footprint(sizes).sum()), shape, Rates()).window_bytes
    found = forecast(counts, sizes, needed + extra, shape, Rates())
    assert found.resident_bytes <= needed + extra
    for epoch in (found.first_epoch, found.later_epochs):
        assert 0 <= epoch.hit_bytes <= epoch.used_bytes
        assert epoch.used_bytes - epoch.hit_bytes <= epoch.origin_bytes + epoch.peer_bytes + 2


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 0}, {"nodes": 0}, {"ranks_per_node": 0}, {"prefetch": -1}],
    ids=str,
)
def test_a_shape_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}; expected"):
        Workload(OrderConfig(), **{"batch_size": 1, **wrong})


@pytest.mark.parametrize("wrong", [{"samples_per_second": 0}, {"origin": -1}, {"peers": float("nan")}], ids=str)
def test_a_rate_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match="expected more than 0"):
        Rates(**wrong)


def test_a_forecast_is_shown_in_a_notebook_and_plotted():
    pytest.importorskip("matplotlib").use("Agg")
    found = forecast_of(0.25, run_shape(nodes=4))
    assert "each later one" in text_of(parsed(found._repr_html_()))
    widths = [bar.get_width() for bar in found.plot().patches]  # of own caches, peers and origin, twice each
    later = found.later_epochs
    expected = [later.hit_bytes, later.peer_bytes, later.origin_bytes]
    assert widths[1::2] == pytest.approx([each / 1e9 for each in expected])
