"""Chooses the task of a run by the columns of its data."""

from __future__ import annotations

from datasvc.errors import ConfigError
from datasvc.loaders import Mixture
from datasvc.loaders.core.mixture import columns_of
from datasvc.shards import Split
from datasvc.shards.format.schema import IMAGE
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.classification import Classification
from datasvc.trainer.recipes.tasks.language import LanguageModelling
from datasvc.trainer.recipes.tasks.task import Task


def choose_task(config: TrainConfig, split: Split | Mixture) -> Task:
    """Return the task for a split or mixture: classification of its images, or language modelling of its tokens.

    Raises:
        ConfigError: the samples have neither images nor tokens.
    """
    columns = columns_of(split)
    if IMAGE in columns:
        return Classification(config, split)
    if config.token_column in columns:
        return LanguageModelling(config, split)
    raise ConfigError(f"{split!r} has neither images nor tokens to train on; its columns are {', '.join(columns)}")
