"""Whom to leave alone, and for how long, on a clock of the test's own."""

import pytest

from datasvc.cache.peers.peer_health import PeerHealth
from datasvc.testing import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def health(clock):
    return PeerHealth(clock)


def pause(health, clock):
    """Return for how long the peer is left alone; ends when one may try it again."""
    start = clock.now_s
    while not health.may_request():
        clock.advance(0.5)
    return clock.now_s - start


def test_a_peer_that_fails_is_left_alone_for_a_growing_while(health, clock):
    pauses = []
    for _ in range(9):
        health.record_failure()
        pauses.append(pause(health, clock))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_peer_that_lies_is_left_alone_for_longer_up_to_an_hour(health, clock):
    pauses = []
    for _ in range(8):
        health.record_integrity(intact=False)
        pauses.append(pause(health, clock))
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600]


def test_failures_of_many_requests_at_the_same_time_are_one(health, clock):
    for _ in range(8):
        health.record_failure()
    assert pause(health, clock) == 1
    assert health.report.num_failed == 8


def test_of_many_who_would_try_again_one_does(health, clock):
    health.record_failure()
    clock.advance(1)
    assert [health.may_request() for _ in range(3)] == [True, False, False]


def test_a_good_object_ends_all_pauses(health, clock):
    health.record_failure()
    pause(health, clock)
    health.record_integrity(intact=True)
    assert [health.may_request() for _ in range(3)] == [True] * 3
    health.record_failure()
    assert pause(health, clock) == 1


def test_a_peer_that_lacks_an_object_is_well_but_a_liar_stays_one(health, clock):
    health.record_failure()
    pause(health, clock)
    health.record_missing()
    assert health.may_request()
    health.record_integrity(intact=False)
    health.record_missing()
    assert not health.may_request()


def test_many_failures_in_a_row_overflow_nothing(health, clock):
    for _ in range(3000):
        health.record_failure()
        clock.advance(60)
    assert health.may_request()


def test_a_peer_that_is_lost_and_back_is_logged_once_each(clock, caplog):
    caplog.set_level("INFO")
    health = PeerHealth(clock, name="http://node2:8765")
    for _ in range(3):
        health.record_failure("it hung up")
    health.record_integrity(intact=True)
    health.record_integrity(intact=True)
    health.record_failure("again")
    health.record_missing()
    health.record_integrity(intact=False)
    health.record_missing()  # proves nothing
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(": ")[0] for line in lines] == [
        "peer http://node2:8765 is lost",
        "peer http://node2:8765 is back",
        "peer http://node2:8765 is lost",
        "peer http://node2:8765 is back",
        "peer http://node2:8765 sent wrong bytes of an object; they are fetched from another source",
    ]
    assert "it hung up" in lines[0]
