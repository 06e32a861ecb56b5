"""The data of a run: the split or mixture to train on, and the one to evaluate on; and the task that fits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datasvc.api import DataRepository
from datasvc.errors import ConfigError
from datasvc.loaders import Mixture, MixtureStage, TokenFormat
from datasvc.loaders.core.mixture import columns_of
from datasvc.loaders.tokens.token_loader import pack_split
from datasvc.shards import DatasetVersion, Split
from datasvc.shards.format.schema import AUDIO, IMAGE
from datasvc.shards.views.reference import name_exactly
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.audio import AudioClassification
from datasvc.trainer.recipes.tasks.classification import Classification
from datasvc.trainer.recipes.tasks.language import LanguageModelling
from datasvc.trainer.recipes.tasks.task import Task


@dataclass(frozen=True)
class TrainingData:
    """The data of a run.

    Attributes:
        train: split or mixture to train on.
        val: samples to evaluate, each once; None if no data set has a split "val".
    """

    train: Split | Mixture
    val: Split | Mixture | None


def resolve_data(repo: DataRepository, config: TrainConfig) -> list[str]:
    """Return the version of each data set, such as "digits@1". Call it on one rank: between calls, a tag may move.

    A view is evaluated and stored here, and returned with the digests of its tables: all ranks read the same samples.
    So are packs. Raises also ConfigError: the data has no packs, or none of these.
    """
    datasets = [repo.dataset(reference) for reference, _ in config.parse_data()]
    if config.pack is None:
        return [name_exactly(dataset, ("train", "val")) for dataset in datasets]
    return [_name_packed(dataset, config) for dataset in datasets]


def _name_packed(dataset: DatasetVersion, config: TrainConfig) -> str:
    """Return a reference that opens the packs of a version."""
    assert config.pack is not None
    stored = TokenFormat(config.token_column, dtype=config.token_dtype)
    options = {"too_long": config.too_long, "loss_mask": config.loss_mask}
    packed = [
        split if split.packs is not None else pack_split(split, config.pack, config.block_tokens, stored, **options)
        for split in (dataset[name] for name in ("train", "val") if name in dataset)
    ]
    return f"{dataset.resolved}[{','.join(split.digest for split in packed)}]"


def open_data(repo: DataRepository, config: TrainConfig, versions: Sequence[str]) -> TrainingData:
    """Open the configured data in the versions that `resolve_data` has returned.

    Raises:
        ConfigError: the data sets do not make a mixture.
        NotFoundError: a data set has no split "train".
    """
    datasets = [repo.dataset(version) for version in versions]
    if len(datasets) == 1:
        (dataset,) = datasets
        val = dataset["val"] if "val" in dataset else None  # noqa: SIM401 - a missing split is no KeyError here
        return TrainingData(dataset["train"], val)
    weights = [weight for _, weight in config.parse_data()]
    splits = [dataset["train"] for dataset in datasets]
    stages = config.parse_stages()
    train = Mixture(
        list(zip(splits, weights, strict=True)),
        epoch_samples=config.epoch_samples,
        block=config.mixture_block,
        stages=[MixtureStage(start, dict(zip(splits, later, strict=True)), ramp) for start, later, ramp in stages],
    )
    # In the order in which stages begin with them, which is that of the classes.
    served = dict.fromkeys(
        number
        for each in (weights, *(later for _, later, _ in stages))
        for number, weight in enumerate(each)
        if weight
    )
    evaluated = [datasets[number]["val"] for number in served if "val" in datasets[number]]
    return TrainingData(train, _join_val(evaluated, train.classes))


def _join_val(splits: Sequence[Split], classes: Sequence[str]) -> Split | Mixture | None:
    """Return the samples of all splits, each once; None if there are none."""
    # Two versions of a data set often have the same samples in "val".
    by_digest = {split.digest: split for split in splits if split.num_positions}
    if not by_digest:
        return None
    val: Split | Mixture = next(iter(by_digest.values()))
    if len(by_digest) > 1:
        # Weights equal to the sizes and a block of all samples: an epoch has each sample once.
        num_samples = sum(split.num_positions for split in by_digest.values())
        sizes = [(split, split.num_positions) for split in by_digest.values()]
        val = Mixture(sizes, epoch_samples=num_samples, block=num_samples)
    # Labels are numbered in the order in which the data sets name the classes.
    if tuple(val.classes) != tuple(classes[: len(val.classes)]):
        raise ConfigError(
            f"the classes of {val!r} have other numbers than those of the training data, because not every data set "
            "has a split 'val'; name the data sets that have one first in --data"
        )
    return val


def choose_task(config: TrainConfig, split: Split | Mixture) -> Task:
    """Return the task for a split or mixture: classification of images or sounds, or language modelling of tokens.

    Raises:
        ConfigError: the samples have neither images, sounds nor tokens.
    """
    columns = columns_of(split)
    if IMAGE in columns:
        return Classification(config, split)
    if AUDIO in columns:
        return AudioClassification(config, split)
    if config.token_column in columns:
        return LanguageModelling(config, split)
    raise ConfigError(
        f"{split!r} has neither images, sounds nor tokens to train on; its columns are {', '.join(columns)}"
    )
