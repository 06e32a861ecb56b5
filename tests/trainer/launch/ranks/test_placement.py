"""Which rank runs where."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.env.environment import read_placement
from datasvc.trainer.launch.ranks.job import Host
from datasvc.trainer.launch.ranks.placement import place_ranks, plan_environment


@st.composite
def jobs(draw):
    slots = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    hosts = [Host(f"h{index}", count) for index, count in enumerate(slots)]
    return draw(st.integers(1, sum(slots))), hosts


@given(jobs())
def test_hosts_are_filled_in_order_and_never_beyond_their_slots(job):
    num_ranks, hosts = job
    slots = [host.name for host in hosts for _ in range(host.num_slots)]
    places = place_ranks(num_ranks, hosts)
    assert [place.host for place in places] == slots[:num_ranks]
    assert [place.placement.rank for place in places] == list(range(num_ranks))
    assert {place.placement.size for place in places} == {num_ranks}


@given(jobs())
def test_local_and_cross_places_number_the_ranks_of_a_host_and_the_hosts_of_a_local_rank(job):
    places = place_ranks(*job)
    by_host, by_local_rank = collections.defaultdict(list), collections.defaultdict(list)
    for place in places:
        by_host[place.host].append(place.placement)
        by_local_rank[place.placement.local_rank].append(place.placement)
    for group in by_host.values():
        assert [(p.local_rank, p.local_size) for p in group] == [(i, len(group)) for i in range(len(group))]
    for group in by_local_rank.values():
        assert [(p.cross_rank, p.cross_size) for p in group] == [(i, len(group)) for i in range(len(group))]


@given(jobs())
def test_ranks_read_the_place_that_they_are_given(job):
    for place in place_ranks(*job):
        assert read_placement(plan_environment(place.placement, place.host, 1)) == place.placement


def test_too_few_slots_are_counted_in_the_error():
    with pytest.raises(ValueError, match="4 ranks need as many slots, but a:1, b:2 have 3"):
        place_ranks(4, [Host("a", 1), Host("b", 2)])
