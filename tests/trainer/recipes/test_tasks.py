"""What is counted in an evaluation, against counting by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.models import LogitsWithAuxiliary
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.classification import Classification
from datasvc.trainer.recipes.tasks.language import LanguageModelling
from datasvc.trainer.recipes.tasks.task import Examples
from datasvc.trainer.recipes.training_data import choose_task

CONFIG = TrainConfig(data="d", repo="r", name="m", label_smoothing=0.1, vocabulary=7)


def as_it_is(logits, **extra):
    """A model that gives what it is given."""
    return logits


def test_padding_counts_nowhere_and_every_image_once(digits):
    task = Classification(CONFIG, digits["train"])
    logits, targets = torch.randn(50, 10), torch.randint(10, (50,))
    mask = torch.rand(50) < 0.7
    halves = Examples(logits, targets, mask).split(32)
    found = task.metrics(sum(task.sum_metrics(as_it_is, part) for part in halves))
    logits, targets = logits[mask], targets[mask]
    ranks = (logits > logits.gather(1, targets[:, None])).sum(1)
    assert found["val_accuracy"] == (ranks < 1).double().mean().item()
    assert found["val_top5"] == (ranks < 5).double().mean().item()
    assert found["val_loss"] == pytest.approx(F.cross_entropy(logits, targets).item())


def test_the_loss_smooths_labels_and_takes_auxiliary_classifiers_in(digits):
    task = Classification(CONFIG, digits["train"])
    logits, targets = torch.randn(6, 10), torch.randint(10, (6,))
    examples = Examples(logits, targets, torch.ones(6, dtype=torch.bool))
    even, log = torch.full((6, 10), 0.1 / 10), F.log_softmax(logits, dim=1)
    even[torch.arange(6), targets] += 0.9
    assert task.sum_loss(as_it_is, examples).item() == pytest.approx(-(even * log).sum().item(), rel=1e-5)
    alone = task.sum_loss(as_it_is, examples).item()
    both = task.sum_loss(lambda inputs: LogitsWithAuxiliary(inputs, (inputs, inputs), 0.3), examples).item()
    assert both == pytest.approx(1.6 * alone, rel=1e-5)


@pytest.mark.parametrize(
    "setting",
    [
        {"decode": "cpu"},
        {"on_bad": "mask"},
        {"mean": (0.0, 0.0, 0.0)},
        {"std": (1.0, 1.0, 1.0)},
        {"jitter": "1,0,0,0"},
    ],
    ids=str,
)
def test_options_of_images_are_refused_for_tokens(setting):
    config = TrainConfig(data="d", repo="r", name="m", vocabulary=7, **setting)
    option = "--" + "".join(setting).replace("_", "-")
    with pytest.raises(ConfigError, match=f"{option} is for images, and .* holds tokens; leave it out"):
        LanguageModelling(config, split=None)


def test_tokens_without_a_next_one_count_nowhere():
    task = LanguageModelling(CONFIG, split=None)
    logits, targets = torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    targets[:, -1] = targets[1, 2] = -100
    mask = torch.tensor([True, True, True, False])
    examples = Examples(logits, targets, mask)
    counted = (targets != -100) & mask[:, None]
    found = task.metrics(task.sum_metrics(as_it_is, examples))
    loss = F.cross_entropy(logits[counted], targets[counted]).item()
    assert found["val_loss"] == pytest.approx(loss)
    assert found["val_perplexity"] == pytest.approx(math.exp(loss))
    assert found["val_accuracy"] == (logits.argmax(-1) == targets)[counted].double().mean().item()
    assert task.count_targets(examples) == 4 * 4 - 1
    assert task.metrics(torch.tensor([0.0, 2000.0, 1.0]))["val_perplexity"] == math.inf


def test_data_chooses_the_task_and_data_of_neither_kind_is_refused(digits):
    assert isinstance(choose_task(CONFIG, digits["train"]), Classification)

    def split_with(*columns):
        return SimpleNamespace(table=SimpleNamespace(sample_schema=SimpleNamespace(names=list(columns))), classes=())

    assert isinstance(choose_task(CONFIG, split_with("key", "tokens")), LanguageModelling)
    with pytest.raises(ConfigError, match="neither images, sounds nor tokens"):
        choose_task(CONFIG, split_with("key", "text"))
    with pytest.raises(ConfigError, match="no labels"):
        choose_task(CONFIG, split_with("key", "image"))
