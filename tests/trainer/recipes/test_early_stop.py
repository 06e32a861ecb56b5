import math

import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.early_stop import EarlyStop


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


def test_an_unknown_metric_says_which_there_are():
    with pytest.raises(ConfigError, match="val_accuracy, val_loss"):
        EarlyStop("val_f1", 1).update({"val_loss": 1.0, "val_accuracy": 0.5})
