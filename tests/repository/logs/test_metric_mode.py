import pytest

from datasvc.errors import ConfigError
from datasvc.repository.logs.references import choose_metric_mode

LOW = """
loss, val_loss, val/loss, Loss/train, valLoss, MSELoss, eval.loss.epoch, ema_val_perplexity, error, error_rate,
ErrorRate, top-level error, box_loss, train loss (mean), test PPL, loss/1
"""
HIGH = """
accuracy, val_accuracy, acc, acc@1, Acc/top1, eval.top1, top5, top_1, top-5, Top 1 accuracy, accuracy_1, acc 5,
val2_accuracy, imagenet/val/top1_ema, F1, f1_score, recall@10, val_top_1, miou, evalTop1
"""
UNCLEAR = """
score, reward, , 1, glossary, closs, lossless, stop1, topology, bestest, map, 1-accuracy, 1 - accuracy,
1-val_accuracy, val/1-acc, 1 - loss, 1_minus_acc, 2 loss, 0.5*loss, top1_error, accuracy_loss, loss_accuracy,
neg_loss, neg_mean_squared_error, 1 minus accuracy, loss_scale, loss_weight, error_threshold, accuracy_gap,
accuracy_std, loss_reduction, errorless
"""


def names(text):
    return [name.strip() for name in text.split(",")]


@pytest.mark.parametrize("metric", names(LOW))
def test_a_low_loss_perplexity_or_error_is_better_wherever_it_was_measured(metric):
    assert choose_metric_mode(metric) == "min"


@pytest.mark.parametrize("metric", names(HIGH))
def test_a_high_accuracy_is_better_wherever_it_was_measured(metric):
    assert choose_metric_mode(metric) == "max"


@pytest.mark.parametrize("metric", names(UNCLEAR))
def test_no_name_is_guessed_at(metric):
    with pytest.raises(ConfigError, match="give --mode max or --mode min"):
        choose_metric_mode(metric)
    assert choose_metric_mode(metric, "min") == "min"


def test_a_given_mode_takes_precedence_over_the_name_and_is_checked():
    assert choose_metric_mode("loss", "max") == "max"
    with pytest.raises(ConfigError, match="'max' or 'min'"):
        choose_metric_mode("loss", "low")
    with pytest.raises(ConfigError, match=r"give --stop-mode max .*stop_mode='max'"):
        choose_metric_mode("score", option="--stop-mode")
