"""Who continues with whose copy after a change of ranks, as values."""

from hypothesis import given
from hypothesis import strategies as st

from datasvc.planning.layout import Layout
from datasvc.trainer.recipes.layouts.places import (
    IN_ROUND,
    Place,
    StateCopy,
    TransferPlan,
    find_places,
    plan_transfers,
)
from tests.examples import examples

OLD, NEW = (1, 4, False), (1, 8, False)


def held(*places, commit=NEW):
    """One copy of each rank, of (replica, part); None: a new rank."""
    return [() if place is None else (StateCopy(commit, Place(*place)),) for place in places]


def pairs(replicas):
    return [Place(replica, part) for replica in range(replicas) for part in range(2)]


def test_a_part_is_what_the_axes_that_divide_the_model_give_and_a_replica_has_all_of_them():
    own = find_places(Layout(replica=2, data=2, shard=2), has_own_steps=True)
    assert [(place.replica, place.part) for place in own] == [(0, 0), (0, 1)] * 2 + [(1, 0), (1, 1)] * 2
    together = find_places(Layout(data=2, pipeline=2, tensor=2), has_own_steps=False)
    assert [(place.replica, place.part) for place in together] == [(0, part) for part in (0, 1, 0, 1, 2, 3, 2, 3)]
    assert find_places(Layout(data=2), has_own_steps=True) == [Place(0, 0), Place(1, 0)]
    assert find_places(Layout(data=2), has_own_steps=False) == [Place(0, 0), Place(0, 0)]


def test_replicas_that_are_left_keep_their_state_and_a_new_one_takes_that_of_the_first():
    copies = held((0, 0), (0, 1), (2, 0), (2, 1), None, (1, 1))
    assert plan_transfers(copies, pairs(3)) == TransferPlan(NEW, (0, 1, 2, 3, 0, 1))


def test_ranks_that_make_each_step_together_keep_what_fits():
    copies = held((0, 1), (0, 0), None, (0, 1))
    places = [Place(0, part) for part in (0, 1, 0, 1)]
    assert plan_transfers(copies, places) == TransferPlan(NEW, (1, 0, 1, 3))


def test_without_a_whole_replica_weights_come_from_several_and_moments_begin_again():
    copies = held((0, 0), (1, 1), None, (1, 1))
    assert plan_transfers(copies, pairs(2)) == TransferPlan(NEW, (0, 1, 0, 3), keeps_moments=False)


def test_a_commit_that_some_ranks_missed_is_undone_and_one_of_a_later_round_is_newer():
    both = (StateCopy(NEW, Place(0, 0)), StateCopy(OLD, Place(0, 0)))
    assert plan_transfers([both, *held((0, 1), commit=OLD)], pairs(1)).commit == OLD
    stale = held((0, 0), (0, 1), commit=(1, 10, False))
    later = held((0, 0), (0, 1), commit=(2, 9, False))
    assert plan_transfers([*stale, *later], pairs(2)).commit == (2, 9, False)


def test_after_a_loss_the_ranks_take_the_last_step_that_one_has_of_each_part():
    """Each rank has the copy that all made in step 4, and one that it made when it found the loss."""

    def after(*ranks):
        return [
            (*([] if step is None else [StateCopy((1, step, ends), Place(0, part))]), StateCopy(OLD, Place(0, part)))
            for part, step, ends in ranks
        ]

    def plan(*ranks):
        return plan_transfers(after(*ranks), [Place(0, part) for part, _, _ in ranks])

    assert plan((0, 7, False), (0, 7, False)) == TransferPlan((1, 7, False), (0, 1))
    assert plan((0, 7, False), (0, 8, False), (0, 7, False)) == TransferPlan((1, 8, False), (1, 1, 1))
    assert plan((0, 8, False), (1, 7, False), (0, 7, False), (1, 7, False)).sources == (2, 1, 2, 3)
    # One part was made only in step 8, the other only in step 7; or a rank was changing its weights.
    assert plan((0, 8, False), (1, 7, False)) == TransferPlan(OLD, (0, 1))
    assert plan((0, 7, False), (1, None, False)) == TransferPlan(OLD, (0, 1))
    # After the evaluation at the end of an epoch, the weights are those of its last step.
    assert plan((0, 8, False), (0, 8, True)) == TransferPlan((1, 8, True), (1, 1))


def test_a_round_is_continued_by_replicas_that_are_whole_and_others_take_over_the_first():
    commit = (1, 8, IN_ROUND)

    def after(*ranks):
        return [
            () if rank is None else (StateCopy(commit, Place(*rank[:2]), rank[2]), StateCopy(NEW, Place(*rank[:2])))
            for rank in ranks
        ]

    # The second replica has lost a rank.
    copies = after((0, 0, 4), (0, 1, 4), (2, 0, 6), (2, 1, 6), (1, 1, 4), None)
    plan = plan_transfers(copies, pairs(3))
    assert plan == TransferPlan(commit, (0, 1, 2, 3, 0, 1), num_applied=(4, 4, 6, 6, None, None))
    # The ranks of the first one differ by a step, so its weights are of no step.
    copies = after((0, 0, 4), (0, 1, 6), (2, 0, 6), (2, 1, 6))
    plan = plan_transfers(copies, pairs(2))
    assert plan == TransferPlan(commit, (2, 3, 2, 3), num_applied=(None, None, 6, 6))
    # No replica is whole: all go back to the last copy.
    assert plan_transfers(after((0, 0, 4), (0, 1, 6), (2, 0, 6), None), pairs(2)).commit == NEW


def test_a_replica_whose_ranks_differ_by_a_step_of_the_rest_of_a_round_continues_from_the_start_of_the_rest():
    """All had a copy with four samples at the start of the rest."""
    rest = (2, 8, IN_ROUND)

    def copy(replica, part, num_applied, commit=rest):
        return StateCopy(commit, Place(replica, part), num_applied)

    # The second replica has lost a rank.
    copies = [(copy(0, 0, 6), copy(0, 0, 4)), (copy(0, 1, 4),), (copy(1, 0, 4),), ()]
    assert plan_transfers(copies, pairs(2)) == TransferPlan(rest, (0, 1, 0, 1), num_applied=(4, 4, None, None))
    # The ranks with part 0 have ended their averaging, in an ordinary round and in a rest, and those with part 1 not.
    begun, ended = (1, 8, IN_ROUND), (1, 12, IN_ROUND)
    copies = [
        (copy(replica, part, 16 * part, begun if part else ended), copy(replica, part, 0, NEW))
        for replica in range(2)
        for part in range(2)
    ]
    assert plan_transfers(copies, pairs(2)) == TransferPlan(NEW, (0, 1, 2, 3))
    ended = (2, 12, IN_ROUND)
    copies = [
        (copy(replica, part, 6 * part, rest if part else ended), copy(replica, part, 4))
        for replica in range(2)
        for part in range(2)
    ]
    assert plan_transfers(copies, pairs(2)) == TransferPlan(rest, (0, 1, 2, 3), num_applied=(4, 4, 4, 4))


def test_without_a_whole_replica_in_a_round_all_parts_are_lost():
    copies = held((0, 0), None, None, (1, 1), commit=(1, 8, IN_ROUND))
    assert plan_transfers(copies, pairs(2)) == TransferPlan(None, missing=(0, 1))


def test_a_part_that_nobody_has_is_named_and_a_job_that_begins_misses_none():
    assert plan_transfers(held((0, 0), None), pairs(1)) == TransferPlan(None, missing=(1,))
    assert plan_transfers([(), ()], pairs(1)) == TransferPlan(None)


@examples(300)
@given(st.lists(st.none() | st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=2, max_size=6), st.booleans())
def test_every_rank_gets_its_part_and_a_replica_gets_it_from_one_replica(found, has_own_steps):
    found = [place if place is None or has_own_steps else (0, place[1]) for place in found[: len(found) // 2 * 2]]
    places = [place if has_own_steps else Place(0, place.part) for place in pairs(len(found) // 2)]
    plan = plan_transfers(held(*found), places)
    if plan.commit is None:
        assert {place[1] for place in found if place} != {0, 1}
        return
    assert [found[source][1] for source in plan.sources] == [place.part for place in places]
    if plan.keeps_moments:
        for replica in {place.replica for place in places}:
            taken = {found[s][0] for s, place in zip(plan.sources, places, strict=True) if place.replica == replica}
            assert len(taken) == 1
