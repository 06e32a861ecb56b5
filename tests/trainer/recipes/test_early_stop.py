import math

import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.run import EarlyStop


def steps_until_stop(metric, patience, values):
    stop = EarlyStop(metric, patience)
    for number, value in enumerate(values, 1):
        stop.update({metric: value})
        if stop.is_reached:
            return number
    return None


def test_a_run_ends_after_so_many_evaluations_without_a_new_best():
    assert steps_until_stop("val_loss", 2, [3.0, 2.0, 2.5, 1.0, 1.0, 1.1]) == 6
    assert steps_until_stop("val_accuracy", 2, [0.3, 0.4, 0.4, 0.5, 0.45, 0.5]) == 6
    assert steps_until_stop("ema_val_perplexity", 1, [3.0, 2.0, 2.5]) == 3
    assert steps_until_stop("val/error_rate", 1, [0.3, 0.2, 0.25]) == 3


def test_without_patience_it_never_ends_early_and_needs_no_metric():
    stop = EarlyStop("val_loss", None)
    stop.update({})
    assert not stop.is_reached


def test_a_metric_whose_better_end_its_name_does_not_tell_needs_a_mode():
    with pytest.raises(
        ConfigError, match=r"'reward' does not show whether a high or a low value is better.*--stop-mode"
    ):
        EarlyStop("reward", 1)
    assert not EarlyStop("reward", None).is_reached
    for mode, is_reached in (("min", False), ("max", True)):
        stop = EarlyStop("reward", 1, mode)
        stop.update({"reward": 2.0})
        stop.update({"reward": 1.0})
        assert stop.is_reached == is_reached


def test_nan_is_no_best_and_is_beaten_by_anything():
    assert steps_until_stop("val_loss", 3, [math.nan, math.nan, 5.0, math.nan, math.nan, 4.0]) is None
    assert steps_until_stop("val_loss", 3, [math.nan] * 3) == 3


def test_the_count_survives_a_restore():
    stop = EarlyStop("val_loss", 2)
    for value in (1.0, 2.0):
        stop.update({"val_loss": value})
    restored = EarlyStop("val_loss", 2)
    restored.load_state_dict(stop.state_dict())
    restored.update({"val_loss": 1.5})
    assert restored.is_reached


def counted(metric, patience, values, mode=None):
    stop = EarlyStop(metric, patience, mode)
    for value in values:
        stop.update({metric: value})
    return stop


@pytest.mark.parametrize(
    ("metric", "mode", "continues"),
    [("val_loss", None, True), ("val_loss", "min", True), ("val_accuracy", None, False), ("val_loss", "max", False)],
)
def test_a_state_of_another_metric_or_mode_is_not_continued(metric, mode, continues):
    restored = EarlyStop(metric, 2, mode)
    restored.load_state_dict(counted("val_loss", 2, [2.3, 2.4]).state_dict())
    # Worse than the best of the state in the mode of this run.
    for value in (2.5, 2.6) if continues else (0.5, 0.6):
        restored.update({metric: value})
        assert restored.is_reached == continues


def test_a_state_without_a_metric_is_of_this_one():
    restored = EarlyStop("val_accuracy", 2)
    restored.load_state_dict({"best": 0.9, "num_without": 1})
    restored.update({"val_accuracy": 0.8})
    assert restored.is_reached


def test_a_run_without_patience_keeps_the_state_for_a_later_run():
    without = EarlyStop("val_accuracy", None)
    without.load_state_dict(counted("val_loss", 2, [2.3, 2.4]).state_dict())
    later = EarlyStop("val_loss", 2)
    later.load_state_dict(without.state_dict())
    later.update({"val_loss": 2.5})
    assert later.is_reached


def test_an_unknown_metric_says_which_there_are():
    with pytest.raises(ConfigError, match="val_accuracy, val_loss"):
        EarlyStop("val_f1", 1).update({"val_loss": 1.0, "val_accuracy": 0.5})
