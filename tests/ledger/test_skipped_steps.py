"""Skipped steps as positions: every form of the setting, and the steps that a run has left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.ledger.masked import Masked
from datasvc.ledger.skipped_steps import SkippedSteps, StepCursor, parse_skip, up_to


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", [SkippedSteps(5, 5)]),
        ("5-7, 9", [SkippedSteps(5, 7), SkippedSteps(9, 9)]),
        ("5:0-31,6-6:3", [SkippedSteps(5, 5, (0, 31)), SkippedSteps(6, 6, (3, 3))]),
    ],
)
def test_steps_and_samples_of_steps_are_read(text, expected):
    assert list(parse_skip(text)) == expected


@pytest.mark.parametrize("text", ["", " ", "5,", "5-", "-5", "5:", "5:-3", "5:3-", "1.5", "five", "5;6", "5:1:2"])
def test_a_setting_of_another_form_is_refused_with_the_forms(text):
    with pytest.raises(ConfigError, match="expected steps such as '1200-1210'"):
        parse_skip(text)


@pytest.mark.parametrize("text", ["0", "0-3", "7-5", "9,7-5", "5:3-1"])
def test_step_0_and_reversed_ranges_are_refused(text):
    with pytest.raises(ConfigError, match="steps count from 1, and a range ends where it starts or later"):
        parse_skip(text)


def test_the_part_up_to_a_step_has_no_later_steps():
    assert up_to("2-3,5-90:1-2,7,100", 7) == "2-3,5-7:1-2,7-7"
    assert up_to("8-9", 7) == ""


@given(
    st.integers(1, 9), st.integers(1, 40), st.integers(0, 50), st.integers(0, 3), st.integers(0, 4),
    st.sampled_from(["drop", "short", "pad"]),
)  # fmt: skip
def test_the_end_of_a_run_is_the_step_after_which_the_next_one_is_in_a_later_epoch(
    global_batch, num_samples, step, epoch, num_epochs, tail
):
    num_samples = max(num_samples, global_batch)
    position = 0 if num_samples < 2 * global_batch else global_batch
    steps = StepCursor(step, (epoch, position), num_samples, global_batch, tail)
    end = steps.step_after(num_epochs)
    (after,) = steps.ranges(end + 1, end + 1)
    assert after[1] == max(num_epochs, epoch)
    if end > step:
        ((_, last_epoch, _, _),) = steps.ranges(end, end)
        assert last_epoch == num_epochs - 1


def test_samples_past_the_end_of_a_batch_are_refused():
    steps = StepCursor(0, (0, 0), 20, 8, "short")
    assert steps.plan_masks(parse_skip("3:3")) == Masked(((0, 19, 20),))
    with pytest.raises(ConfigError, match="skip names sample 4 of step 3, whose batch has the samples 0 to 3"):
        steps.plan_masks(parse_skip("3:4"))
