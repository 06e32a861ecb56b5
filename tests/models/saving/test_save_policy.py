"""When to save, by a clock that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.models.saving.save_policy import SaveCost, SavePolicy, SaveScheduler, parse_policy


class Run:
    """Steps of a training that saves whenever it is told to; every save takes `writing` steps beside the training."""

    def __init__(self, pace, *, step_s=1.0, stall_s=0.5, slowed_s=0.0, writing=0, device_s=0.0):
        self.now_s = 0.0
        self.scheduler = SaveScheduler(pace, now=lambda: self.now_s)
        self.step_s, self.stall_s, self.slowed_s, self.writing = step_s, stall_s, slowed_s, writing
        self.step, self.left, self.lost_s, self.saves = 0, 0, 0.0, []
        self.device_s, self.copying_s = device_s, 0.0

    def go(self, num_steps):
        for _ in range(num_steps):
            self.step += 1
            slowed_s = self.slowed_s if self.left else 0.0
            self.now_s += self.step_s + slowed_s + self.copying_s
            self.lost_s += slowed_s + self.copying_s
            if self.copying_s:
                self.scheduler.record_device_copy(self.copying_s)
                self.copying_s = 0.0
            self.left = max(0, self.left - 1)
            self.scheduler.end_step(is_saving=self.left > 0)
            if self.scheduler.decide(self.step, is_saving=self.left > 0).is_due:
                self.now_s += self.stall_s
                self.lost_s += self.stall_s
                self.scheduler.record_stall(self.stall_s)
                self.saves.append(self.step)
                self.left, self.copying_s = self.writing, self.device_s
        return self


def test_steps_save_at_their_multiples_wherever_the_run_begins():
    run = Run(SavePolicy(every_steps=4))
    run.step = 5
    assert run.go(12).saves == [8, 12, 16]


def test_a_duration_saves_so_long_after_the_last_save():
    assert Run(SavePolicy(every_s=10.0), step_s=3.0, stall_s=0.0).go(14).saves == [4, 8, 12]


def test_a_pace_that_says_nothing_never_saves():
    assert Run(SavePolicy()).go(100).saves == []


@given(
    step_s=st.floats(0.01, 10),
    stall_s=st.floats(0.001, 100),
    slowed=st.floats(0, 3),
    writing=st.integers(0, 30),
    device=st.floats(0, 3),
    share=st.sampled_from([0.01, 0.03, 0.2]),
)
def test_saves_take_no_more_than_their_share_of_the_time_but_for_the_last_one(
    step_s, stall_s, slowed, writing, device, share
):
    run = Run(
        SavePolicy(max_stall=share),
        step_s=step_s,
        stall_s=stall_s,
        slowed_s=slowed * step_s,
        writing=writing,
        device_s=device * step_s,
    )
    run.go(2000)
    one_save_s = stall_s + writing * run.slowed_s + run.device_s
    assert run.saves[0] <= 10, "the first is not held back"
    assert run.lost_s <= share * run.now_s + one_save_s * 1.001 + step_s
    cost = run.scheduler.cost
    assert cost.stall_s == pytest.approx(len(run.saves) * stall_s)
    assert cost.stall_s + cost.slowed_s == pytest.approx(run.lost_s, abs=1e-6 * run.now_s)
    assert cost.share == pytest.approx(run.lost_s / run.now_s, abs=1e-6)


def test_what_saves_may_take_is_used_and_a_stall_spaces_them_out():
    run = Run(SavePolicy(max_stall=0.03), stall_s=0.3).go(5000)
    assert run.lost_s == pytest.approx(0.03 * run.now_s, rel=0.15)
    assert {b - a for a, b in zip(run.saves, run.saves[1:], strict=False)} <= {10, 11}


def test_steps_that_writing_slows_down_count_as_a_stall_does():
    quiet = Run(SavePolicy(max_stall=0.1), stall_s=0.1, writing=10).go(1000)
    slowed = Run(SavePolicy(max_stall=0.1), stall_s=0.1, writing=10, slowed_s=0.5).go(1000)
    assert len(slowed.saves) < len(quiet.saves) / 2


def test_a_share_holds_back_what_steps_would_save():
    run = Run(SavePolicy(every_steps=10, max_stall=0.01), stall_s=1.0).go(400)
    assert all(step % 10 == 0 for step in run.saves)
    assert len(run.saves) <= 5


def test_a_long_break_is_no_step_that_was_slowed_down():
    run = Run(SavePolicy(max_stall=0.03), stall_s=0.03, writing=3).go(12)
    run.now_s += 1000  # an evaluation, beside which the save is still being written
    before = run.scheduler.overhead_s
    run.left = 2
    run.go(1)
    assert run.scheduler.overhead_s <= before


def test_short_steps_that_writing_slows_down_many_times_over_count_too():
    """Steps of 2 ms, each of which waits half a second for the writing."""
    run = Run(SavePolicy(max_stall=0.03), step_s=0.002, stall_s=0.001, writing=3, slowed_s=0.5).go(100_000)
    last_save_s = 3 * 0.5 + 0.001
    assert run.lost_s - last_save_s == pytest.approx(0.03 * run.now_s, rel=0.05)


def test_steps_that_are_quicker_beside_the_writing_do_not_pay_for_its_stall():
    """The machine was busy with something else while it was measured how long a step takes, and no more."""
    run = Run(SavePolicy(max_stall=0.03), step_s=10.0, stall_s=1.0, writing=2)
    while not run.saves:
        run.go(1)
    run.step_s = 1.0
    assert run.go(1000).saves[1] - run.saves[0] >= 33
    assert run.scheduler.cost.slowed_s == 0


def test_a_save_waits_until_it_is_known_again_how_long_a_step_takes():
    run = Run(SavePolicy(max_stall=0.5), stall_s=0.1, writing=4).go(100)
    assert run.saves == [8, 20, 32, 44, 56, 68, 80, 92]


def test_what_saving_cost_is_told_since_any_moment():
    run = Run(SavePolicy(every_steps=10), stall_s=0.5, writing=2, slowed_s=0.25).go(15)
    before = run.scheduler.cost
    assert (before.stall_s, before.slowed_s, before.training_s) == pytest.approx((0.5, 0.5, 16.0))
    run.go(10)
    since = run.scheduler.cost - before
    assert (since.stall_s, since.slowed_s, since.training_s) == pytest.approx((0.5, 0.5, 11.0))
    assert since.share == pytest.approx(1 / 11)
    assert SaveCost().share == 0


def test_a_device_that_copies_does_not_put_off_a_save_by_time():
    assert Run(SavePolicy(every_s=10.0), step_s=3.0, stall_s=0.0, writing=1, device_s=0.001).go(14).saves == [
        4,
        8,
        12,
    ]


def just_saved(stall_s=0.0):
    """Return a run of steps of 1 s that has saved this moment, for the first time."""
    run = Run(SavePolicy(max_stall=0.03), stall_s=stall_s)
    while not run.saves:
        run.go(1)
    return run


@pytest.mark.parametrize("seen_s", [0.0, 0.2, 0.5])
def test_what_a_device_copies_is_owed_once_however_much_of_it_a_step_shows(seen_s):
    run = just_saved()
    run.now_s += 1.0 + seen_s
    run.scheduler.record_device_copy(0.5)
    run.scheduler.end_step(is_saving=True)
    assert run.scheduler.overhead_s == pytest.approx(0.5 - 0.03 * (1.0 + seen_s))
    assert run.scheduler.cost.slowed_s == pytest.approx(seen_s)


def test_what_a_device_copied_is_owed_once_when_it_is_told_after_the_step_that_shows_it():
    run = just_saved()
    run.now_s += 1.5
    run.scheduler.end_step(is_saving=True)
    run.scheduler.record_device_copy(0.5)
    assert run.scheduler.overhead_s == pytest.approx(0.5 - 0.03 * 1.5)


def test_writing_that_slows_steps_down_is_owed_beside_what_a_device_copied():
    run = just_saved()
    run.scheduler.record_device_copy(0.5)
    for took_s in (1.5, 1.25):
        run.now_s += took_s
        run.scheduler.end_step(is_saving=True)
    assert run.scheduler.overhead_s == pytest.approx(0.5 + 0.25 - 0.03 * 2.75)
    assert run.scheduler.cost.slowed_s == pytest.approx(0.75)


def test_copying_that_lasts_as_long_as_a_break_is_owed_once_and_what_is_written_after_it_too():
    run = just_saved()
    run.scheduler.record_device_copy(20.0)
    for took_s in (21.0, 1.25):
        run.now_s += took_s
        run.scheduler.end_step(is_saving=True)
    assert run.scheduler.overhead_s == pytest.approx(20.0 + 0.25 - 0.03 * 22.25)
    assert run.scheduler.cost.slowed_s == pytest.approx(20.25)


def test_the_copy_of_the_save_before_pays_for_nothing_of_the_next():
    run = just_saved()
    run.scheduler.record_device_copy(0.5)
    run.scheduler.record_stall(0.0)
    run.now_s += 1.25
    run.scheduler.end_step(is_saving=True)
    assert run.scheduler.overhead_s == pytest.approx(0.5 + 0.25 - 0.03 * 1.25)


def test_a_multiple_among_the_steps_before_the_first_check_is_not_missed():
    for since, is_due in ((None, False), (0, True), (3, True), (5, False)):
        assert SaveScheduler(SavePolicy(every_steps=5)).decide(7, is_saving=False, since=since).is_due is is_due
    scheduler = SaveScheduler(SavePolicy(every_steps=5))
    scheduler.decide(5, is_saving=False)
    assert not scheduler.decide(7, is_saving=False, since=0).is_due  # it was saved at step 5


def looks(run, num_steps):
    """Return the steps at which one of several ranks looks."""
    steps, upcoming = [], run.step
    for step in range(run.step + 1, run.step + num_steps + 1):
        run.now_s += run.step_s
        run.scheduler.end_step(is_saving=False)
        if step >= upcoming:
            steps.append(step)
            upcoming = run.scheduler.decide(step, is_saving=False).next_step
    run.step += num_steps
    return steps


def test_several_ranks_come_to_look_about_once_a_second_and_at_every_multiple():
    run = Run(SavePolicy(every_steps=1000), step_s=1 / 64)
    assert looks(run, 1200) == [1, 3, 7, 15, 31, *range(63, 1000, 64), 1000, 1064, 1128, 1192]


def test_a_step_that_took_long_makes_several_ranks_look_more_often_at_once():
    run = Run(SavePolicy(every_s=1e9), step_s=0.01)
    looks(run, 1000)
    run.step_s = 0.5
    (first, *others) = looks(run, 110)
    assert first - 1000 <= 100
    assert {b - a for a, b in zip([first, *others], others, strict=False)} == {2}


@pytest.mark.parametrize(
    ("every", "max_stall", "pace"),
    [
        (1000, None, SavePolicy(every_steps=1000)),
        ("10min", "3%", SavePolicy(every_s=600.0, max_stall=0.03)),
        ("1.5 h", 0.2, SavePolicy(every_s=5400.0, max_stall=0.2)),
        (None, None, SavePolicy()),
        ("1000 steps", None, SavePolicy(every_steps=1000)),
        ("1 step", "3%", SavePolicy(every_steps=1, max_stall=0.03)),
    ],
)
def test_a_pace_is_read_as_people_write_it(every, max_stall, pace):
    assert parse_policy(every, max_stall) == pace


@pytest.mark.parametrize(
    ("every", "max_stall", "said"),
    [
        (0, None, "every is 0"),
        ("0 steps", None, "every is 0"),
        (True, None, "every is True"),
        (1.5, None, "every is 1.5"),
        ("often", None, "'often' is not a valid duration"),
        ("0s", None, "'0s' is not a valid duration"),
        (None, "3", "'3' is not a valid share"),
        (None, "100%", "max_stall is '100%'"),
        (None, 0.0, "max_stall is 0.0"),
    ],
)
def test_a_pace_that_means_nothing_is_refused_with_what_would(every, max_stall, said):
    with pytest.raises(ConfigError, match=said):
        parse_policy(every, max_stall)
