"""When a loss will reach a target, from the curve so far."""

import dataclasses

import numpy as np
import pytest

from datasvc.errors import ConfigError
from datasvc.runs import RunLog, Series, read_run

STEPS = 2000


def history_of(repository, values, before=0):
    """The history of a run whose log combines no steps: its curve is replaced by these values."""
    with RunLog.open(repository, "falling") as log:
        log.report("step", step=1, loss=1.0)
    values = np.asarray(values, np.float64)
    numbers = np.arange(1, len(values) + 1) + before
    series = Series(numbers, values, values, values, numbers.astype(float), np.ones_like(numbers))
    return dataclasses.replace(read_run(repository, log.name, log.id), series={"loss": series})


@pytest.mark.slow
def test_the_step_of_a_target_is_found_from_a_third_of_the_steps_and_its_interval_has_it(repository):
    steps = np.arange(1, STEPS + 1)
    inside, found = [], []
    for seed in range(20):
        random = np.random.default_rng(seed)
        limit, scale, exponent = random.uniform(0, 0.5), random.uniform(5, 30), random.uniform(0.3, 1.0)
        clean = limit + scale * steps**-exponent
        forecast = history_of(repository, clean * (1 + 0.03 * random.standard_normal(STEPS))).forecast(
            limit + scale * (3 * STEPS) ** -exponent
        )
        found.append(np.inf if forecast.step is None else forecast.step / (3 * STEPS))
        inside.append(forecast.low <= 3 * STEPS and (forecast.high is None or forecast.high >= 3 * STEPS))
    assert sum(inside) >= 18
    assert np.median(found) == pytest.approx(1, abs=0.1)


def test_a_curve_that_stays_above_the_target_has_no_step_and_says_what_it_approaches(repository):
    noise = np.random.default_rng(0).standard_normal(STEPS)
    forecast = history_of(repository, 1 + 0.05 * noise).forecast(0.5)
    assert (forecast.step, forecast.low, forecast.high) == (None, None, None)
    assert forecast.limit == pytest.approx(1, abs=0.2)
    assert "loss 0.5 is not expected: the curve approaches" in str(forecast)


def test_a_target_that_is_reached_already_has_the_step_at_which_it_was(repository):
    forecast = history_of(repository, 100 / np.arange(1, STEPS + 1)).forecast(100 / 500)
    assert forecast.step == pytest.approx(500, abs=STEPS / 64)
    assert "was reached at about step" in str(forecast)


def test_a_loss_that_rises_again_has_reached_the_targets_on_its_way(repository):
    forecast = history_of(repository, 0.2 + np.abs(np.arange(1, 1001) - 300) / 100).forecast(0.5)
    assert forecast.step == forecast.low == forecast.high == pytest.approx(280, abs=1000 / 64)


def test_the_curve_of_a_run_that_continues_another_one_begins_at_its_own_first_step(repository):
    values = 1 + 10 / np.sqrt(np.arange(1, STEPS + 1) + 10)
    first, later = (history_of(repository, values, before).forecast(1.15) for before in (0, 100_000))
    assert first.step is not None
    assert (later.step, later.low, later.newest_step) == (first.step + 100_000, first.low + 100_000, STEPS + 100_000)
    assert later.limit == first.limit >= 0


def test_steps_after_the_last_finite_value_do_not_count(repository):
    values = np.append(1 / np.arange(1, 601), np.full(400, np.nan))
    assert history_of(repository, values).forecast(0.001).newest_step == 600


@pytest.mark.parametrize("values", [[], [1.0] * 15, [np.nan] * 100, [np.inf] * 90 + [1.0] * 10])
def test_too_few_finite_points_are_an_error_that_names_the_curve(repository, values):
    with pytest.raises(
        ConfigError, match=r"'loss' of falling/.* has \d+ points with finite values .*; a forecast needs 16"
    ):
        history_of(repository, values).forecast(0.1)


def test_an_unknown_curve_and_a_target_that_is_no_number_are_errors(repository):
    history = history_of(repository, 1 / np.arange(1, STEPS + 1))
    with pytest.raises(ConfigError, match="has no curve 'perplexity'; its curves are: loss"):
        history.forecast(0.1, "perplexity")
    with pytest.raises(ConfigError, match="the target is nan"):
        history.forecast(float("nan"))


def test_zeros_and_rising_losses_give_forecasts(repository):
    assert history_of(repository, np.zeros(STEPS)).forecast(-1.0).step is None
    assert history_of(repository, np.arange(STEPS)).forecast(-1.0).step is None
    assert history_of(repository, np.zeros(STEPS)).forecast(0.5).step is not None
