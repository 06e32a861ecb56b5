"""Who is kept a batch, who waits for whom and who is too late: without loaders, and without clocks."""

import secrets
from contextlib import ExitStack

import pytest

from datasvc.errors import LagError
from datasvc.loaders.core.batches import Cursor
from datasvc.loaders.decode_sharing import DecodeGroup
from datasvc.loaders.decode_sharing.decoder import Pace, SharingCounts
from datasvc.loaders.decode_sharing.group_folder import GroupFolder, PendingStep
from datasvc.loaders.ranks.data_ranks import DataRanks

EPOCH, BATCH = 10, 8


@pytest.fixture
def members():
    """Jobs of one group, which leave at the end."""
    with ExitStack() as stack:

        def join(count):
            found = [GroupFolder(name, DataRanks(), {"batch_size": BATCH}) for _ in range(count)]
            for folder in found:
                folder.join()
                stack.callback(folder.leave)
            return found

        name = f"test-{secrets.token_hex(8)}"
        yield join


@pytest.fixture
def waits(monkeypatch):
    """The steps that were waited for; each wait ends with the batch, unless its step is in the set `silent`."""
    waited = []

    def wait(pending, _):
        waited.append(step_of(pending.cursor))
        if waited[-1] in waits.silent:
            return False
        waits.finish(pending.cursor)
        return True

    def waits():
        return waited

    waits.silent, waits.finish = set(), None
    monkeypatch.setattr(PendingStep, "wait", wait)
    return waits


def cursor_of(step):
    return Cursor(step // EPOCH, step % EPOCH * BATCH)


def step_of(cursor):
    return cursor.epoch * EPOCH + cursor.position // BATCH


def pace_of(folder, **settings):
    counts = SharingCounts()
    return Pace(DecodeGroup("x", **settings), folder, counts, steps_per_epoch=EPOCH, global_batch=BATCH), counts


def test_batches_within_the_lag_are_kept_across_epochs_too(members):
    pace, _ = pace_of(*members(1), lag=3)
    assert [step for step in range(30) if pace.is_kept(cursor_of(step), cursor_of(11))] == list(range(8, 15))


def test_of_many_that_need_a_step_one_decodes_it_and_the_others_get_its_batch(members):
    folders = members(5)
    found = [folder.find_or_claim(cursor_of(3)) for folder in folders]
    assert found[0] is None
    assert all(isinstance(each, PendingStep) for each in found[1:])
    folders[0].publish(cursor_of(3), "batch")
    for folder, pending in zip(folders[1:], found[1:], strict=True):
        with pending:
            assert pending.wait(60)
        assert folder.find(cursor_of(3)) == "batch"


def test_a_step_that_is_given_up_is_free_for_the_next(members):
    first, second = members(2)
    assert first.find_or_claim(cursor_of(3)) is None
    with second.find(cursor_of(3)) as pending:
        first.abandon(cursor_of(3))
        assert pending.wait(60)
    assert second.find_or_claim(cursor_of(3)) is None
    first.publish(cursor_of(3), "too late")
    with first.find(cursor_of(3)) as pending:
        assert not pending.wait(0)


def test_a_job_that_was_given_up_does_not_replace_the_batch_of_its_successor(members):
    silent, other, third = members(3)
    for folder in (silent, other):
        assert folder.find_or_claim(cursor_of(3)) is None
        if folder is silent:
            with other.find(cursor_of(3)) as pending:
                other.give_up(pending)
    other.publish(cursor_of(3), "batch")
    silent.publish(cursor_of(3), "late")
    assert third.find(cursor_of(3)) == "batch"
    silent.leave()
    assert third.find(cursor_of(3)) == "batch"


def test_jobs_further_behind_than_the_lag_are_waited_for_while_they_decode(members, waits):
    fast, slow = members(2)
    waits.finish = slow.abandon
    for step in (1, 2, 3, 9):
        assert slow.find_or_claim(cursor_of(step)) is None
    slow.publish(cursor_of(2), "batch")
    pace, counts = pace_of(fast, lag=4, patience=30)
    pace.wait_for_others(cursor_of(12))
    assert waits() == [1, 3]  # not for what is decoded, and not for who is within the lag
    assert counts == SharingCounts()


def test_others_are_waited_for_as_far_as_patience_goes_and_it_comes_back_with_batches(members, waits):
    fast, slow = members(2)
    waits.finish = slow.abandon
    pace, _ = pace_of(fast, lag=1, patience=8)

    def wait_for(count):
        for step in range(count):
            assert slow.find_or_claim(cursor_of(4 + step)) is None
        before = len(waits())
        pace.wait_for_others(cursor_of(10))
        for step in range(count):
            slow.abandon(cursor_of(4 + step))
        return len(waits()) - before

    assert wait_for(2) == 2
    assert wait_for(4) == 4
    assert wait_for(4) == 0  # all are further behind than the 2 that are left
    for _ in range(8 * 4):
        pace.advance()
    assert wait_for(1) == 1


def test_a_silent_job_is_not_waited_for_again(members, waits):
    fast, slow = members(2)
    waits.silent = {4, 5}
    for step in (4, 5):
        assert slow.find_or_claim(cursor_of(step)) is None
    pace, _ = pace_of(fast, lag=1, patience=20)
    pace.wait_for_others(cursor_of(10))
    assert waits() == [4]


def test_who_is_ahead_is_not_waited_for_and_who_is_far_behind_is_told(members, waits):
    slow, fast, third = members(3)
    assert fast.find_or_claim(cursor_of(20)) is None
    assert third.find_or_claim(cursor_of(1)) is None
    pace, counts = pace_of(slow, lag=4, patience=0)
    with pytest.warns(RuntimeWarning, match="14 batches behind the fastest"):
        pace.wait_for_others(cursor_of(6))
    pace.wait_for_others(cursor_of(7))  # warned once
    assert (counts.behind, counts.last_behind) == (1, 13)
    strict, _ = pace_of(slow, lag=4, patience=0, when_behind="raise")
    with pytest.raises(LagError, match="13 batches behind"):
        strict.wait_for_others(cursor_of(7))
    strict.wait_for_others(cursor_of(16))
    assert waits() == []


def test_a_job_that_left_is_not_ahead(members, waits):
    slow, fast = members(2)
    assert fast.find_or_claim(cursor_of(20)) is None
    fast.publish(cursor_of(20), "batch")
    fast.leave()
    pace, counts = pace_of(slow, lag=4, patience=0, when_behind="raise")
    pace.wait_for_others(cursor_of(6))
    assert (counts.behind, waits()) == (0, [])


def test_memory_that_no_job_maps_is_used_again(members):
    first, second = members(2)
    for step in range(20):
        assert first.find_or_claim(cursor_of(step)) is None
        first.publish(cursor_of(step), "batch")
        assert second.find(cursor_of(step)) == "batch"
        first.retire(lambda cursor, step=step: step_of(cursor) > step - 3)
    used = {buffer.descriptor for buffer in (*first._published.values(), *first._spare)}
    assert len(used) == 4
