from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.eviction import Candidate, choose_victims
from datasvc.repository.objects import digest_of

candidates = st.lists(
    st.builds(
        Candidate, st.integers(0, 10**9).map(lambda n: digest_of(b"%d" % n)), st.integers(1, 100), st.integers(0, 50)
    ),
    unique_by=lambda each: each.digest,
    max_size=20,
)


@given(candidates, st.integers(-10, 1500))
def test_victims_free_enough_or_nothing_is_evicted(given_candidates, needed):
    victims = choose_victims(given_candidates, needed)
    if victims is None:
        assert sum(each.size_bytes for each in given_candidates) < needed
    else:
        assert sum(each.size_bytes for each in victims) >= needed
        # None is evicted in vain: without the last one it would not have been enough.
        assert sum(each.size_bytes for each in victims[:-1]) < max(needed, 1)


@given(candidates, st.integers(1, 500))
def test_what_was_released_last_goes_first(given_candidates, needed):
    victims = choose_victims(given_candidates, needed)
    if victims:
        assert all(not each.is_stale for each in given_candidates)
        kept = [each for each in given_candidates if each not in victims]
        assert all(each.released <= victims[-1].released for each in kept)


def test_shuffled_epochs_hit_with_the_share_of_the_data_that_fits():
    """Ten epochs over 100 shards, space for 50: no policy beats a half, LRU gets some 15 %."""
    import random

    digests, resident, clock, hits = [digest_of(b"%d" % n) for n in range(100)], {}, 0, 0
    generator = random.Random(1)
    for epoch in range(10):
        for digest in generator.sample(digests, 100):
            clock += 1
            if digest in resident:
                hits += epoch > 0
            elif len(resident) == 50:
                for victim in choose_victims([Candidate(d, 1, r) for d, r in resident.items()], 1):
                    del resident[victim.digest]
            resident[digest] = clock
    assert hits / 900 > 0.48


@given(candidates, candidates, st.integers(1, 500))
def test_what_dead_jobs_left_goes_before_anything_of_a_living_one_the_oldest_first(living, dead, needed):
    known = {each.digest for each in living}
    stale = [replace(each, is_stale=True) for each in dead if each.digest not in known]
    victims = choose_victims([*living, *stale], needed) or []
    if any(not victim.is_stale for victim in victims):
        assert set(stale) <= set(victims)
    gone = [each for each in victims if each.is_stale]
    assert all(kept.released >= gone[-1].released for kept in stale if gone and kept not in gone)
