"""What goes first: the leftovers of dead jobs, then what is needed furthest ahead, and no more than needed."""

import random

from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.catalogue.eviction import UNKNOWN, EvictionCandidate, by_distance, choose_victims, distance_bytes
from datasvc.cache.catalogue.quotas import Account, Quota
from datasvc.order import NEVER
from datasvc.repository.objects.objects import digest_of

digests = st.integers(0, 10**9).map(lambda number: digest_of(b"%d" % number))
candidates = st.lists(
    st.builds(EvictionCandidate, digests, st.integers(1, 100), st.sampled_from("ab"), st.integers(-100, 10_000)),
    unique_by=lambda each: each.digest,
    max_size=20,
).map(lambda found: sorted(found, key=lambda each: -each.distance_bytes))


def account_of(found, *, budget, quotas=None):
    used = {}
    for each in found:
        used[each.tenant] = used.get(each.tenant, 0) + each.freed_bytes
    return Account(budget, quotas or {}, used)


@given(candidates, st.integers(1, 2500), st.integers(0, 2000))
def test_victims_free_enough_and_none_goes_in_vain(found, budget, size):
    account = account_of(found, budget=budget)
    victims = choose_victims(found, account, "a", size)
    freed = sum(each.freed_bytes for each in victims)
    needed = sum(each.freed_bytes for each in found) + size - budget
    assert account.total_bytes == sum(each.freed_bytes for each in found) - freed
    if account.missing("a", size) <= 0:
        assert freed >= needed
        assert not victims or freed - victims[-1].freed_bytes < needed
    else:
        assert victims == found  # all that there is was not enough


@given(candidates, st.integers(1, 2500), st.integers(0, 2000))
def test_what_is_needed_furthest_ahead_goes_first(found, budget, size):
    victims = choose_victims(found, account_of(found, budget=budget), "a", size)
    assert victims == found[: len(victims)]


@given(candidates, st.integers(1, 500), st.integers(-100, 10_000))
def test_a_prefetch_spares_what_is_needed_as_soon_or_sooner(found, size, nearest):
    account = account_of(found, budget=1)
    victims = choose_victims(found, account, "a", size, min_distance_bytes=nearest)
    assert all(each.distance_bytes > nearest for each in victims)


@given(candidates, st.integers(1, 500), st.integers(0, 300), st.integers(0, 300))
def test_other_tenants_are_not_evicted_below_their_guarantees(found, size, of_a, of_b):
    quotas = {"a": Quota(of_a), "b": Quota(of_b)}
    account = account_of(found, budget=600, quotas=quotas)
    before = dict(account.used_bytes)
    victims = choose_victims(found, account, "a", size)
    if any(each.tenant == "b" for each in victims):
        assert account.used("b") >= of_b
    assert all(account.used(name) <= before[name] for name in before)


@given(st.lists(st.lists(st.integers(0, 1000), max_size=10), max_size=5))
def test_the_queues_of_jobs_merge_into_one_order(distances):
    queues = [
        iter(
            [EvictionCandidate(digest_of(b"%d" % job), 1, "a", distance) for distance in sorted(queue, reverse=True)]
        )
        for job, queue in enumerate(distances)
    ]
    merged = [each.distance_bytes for each in by_distance(queues)]
    assert merged == sorted((distance for queue in distances for distance in queue), reverse=True)


@given(st.integers(0, UNKNOWN - 1), st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.integers(0, 1 << 40))
def test_known_uses_are_nearer_than_unknown_ones_and_these_than_never_and_all_than_what_the_dead_left(
    next_use, clock, other_clock, sequence
):
    known, unknown = distance_bytes(next_use, clock), distance_bytes(UNKNOWN + sequence, other_clock)
    assert known < unknown < distance_bytes(NEVER, clock) <= distance_bytes(0, None)


def test_of_unknown_uses_of_two_jobs_what_was_released_last_goes_first_whatever_their_clocks_say():
    assert distance_bytes(UNKNOWN + 7, 10**15) > distance_bytes(UNKNOWN + 6, 0)


def test_shuffled_epochs_hit_with_the_share_of_the_data_that_fits():
    """Ten epochs, 100 shards, space for 50, nobody knows the next use: no policy beats a half, LRU gets some 15 %."""
    names, resident, clock, hits = [digest_of(b"%d" % number) for number in range(100)], {}, 0, 0
    generator = random.Random(1)
    for epoch in range(10):
        for digest in generator.sample(names, 100):
            clock += 1
            if digest in resident:
                hits += epoch > 0
            elif len(resident) == 50:
                waiting = [EvictionCandidate(each, 1, "a", UNKNOWN + released) for each, released in resident.items()]
                waiting.sort(key=lambda each: -each.distance_bytes)
                for victim in choose_victims(waiting, account_of(waiting, budget=50), "a", 1):
                    del resident[victim.digest]
            resident[digest] = clock
    assert hits / 900 > 0.48
