"""Several data sets as one, by weight. What a mixture is; which sample comes when is in `datasvc.mix_order`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.mix_order import MixOrder, own_order
from datasvc.order import OrderConfig
from datasvc.shards import Split

_BLOCK: Final = 4096


class Mixture:
    """Splits of several data sets, served side by side by weight. A loader takes one where it takes a split.

    A weight is a share of the samples served, whatever the sizes. Positions of the mixture, over all its epochs, are
    one line: of the first n blocks of it each split serves its share of the n * block samples, off by less than one
    sample. Each split is read in its own access order, to its end, then from the start in the order of its next
    epoch: in every pass each of its samples is served once, however its passes lie to the mixture's epochs.

    An epoch of the mixture is `epoch_samples` samples. It ends no split's pass: the next epoch goes on where the line
    stands. What a loader drops at the end of an epoch (tail="drop") is lost to the pass that it belongs to; with
    `epoch_samples` a multiple of the global batch nothing is.

    Args:
        parts: splits and their weights: pairs, or a mapping. Ratios count: 7, 2, 1 are 0.7, 0.2, 0.1, taken as the
            decimals they are written as. A weight of 0 leaves a split out.
        epoch_samples: samples of an epoch; default the samples of all splits with a weight.
        block: positions mixed together. With blocks of one global batch, and `epoch_samples` a multiple, every global
            batch has its shares.

    Raises:
        ConfigError: no splits; one twice; a weight is no finite number from 0 on, or less than one sample in a block;
            a split has a weight and no samples; `epoch_samples` or `block` is below 1.
    """

    def __init__(
        self,
        parts: Mapping[Split, float | Fraction] | Iterable[tuple[Split, float | Fraction]],
        *,
        epoch_samples: int | None = None,
        block: int = _BLOCK,
    ) -> None:
        pairs = list(parts.items() if isinstance(parts, Mapping) else parts)
        self.splits: tuple[Split, ...] = tuple(split for split, _ in pairs)
        self.weights: tuple[int, ...] = _as_integers([_parse(weight, split) for split, weight in pairs])
        self.block = block
        self._check()
        weighted = sum(len(split) for split, weight in zip(self.splits, self.weights, strict=True) if weight)
        self.epoch_samples = weighted if epoch_samples is None else epoch_samples
        if self.epoch_samples < 1:
            raise ConfigError(f"epoch_samples is {epoch_samples}; expected at least 1")

    def __len__(self) -> int:
        return self.epoch_samples

    def __repr__(self) -> str:
        parts = [f"{weight} {name_of(split)}" for split, weight in zip(self.splits, self.weights, strict=True)]
        return f"Mixture({' : '.join(parts)}, {len(self)} samples)"

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each split, such as "digits/train", by its number: that of a batch's `sources`."""
        return tuple(map(name_of, self.splits))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels that loaders of this mixture give, index by index: those of all splits, each once.

        A split's own labels are indices into its own names; loaders translate them. Empty without names.
        """
        return tuple(dict.fromkeys(name for split in weighted_splits(self) for name in split.classes))

    def order(self, seed: int) -> MixOrder:
        """Return which split serves each position, by a loader's seed."""
        return MixOrder(
            [len(split) for split in self.splits],
            self.weights,
            epoch_samples=self.epoch_samples,
            block=self.block,
            seed=seed,
        )

    def describe(self) -> dict[str, Any]:
        """Return what this mixture is, as JSON values: equal where two serve the same at the same positions."""
        return {
            "splits": [{"name": name_of(split), "version": split.digest} for split in self.splits],
            "weights": list(self.weights),
            "epoch_samples": self.epoch_samples,
            "block": self.block,
        }

    def _check(self) -> None:
        if not any(self.weights):
            raise ConfigError("a mixture needs a split with a weight above 0")
        if self.block < 1:
            raise ConfigError(f"block is {self.block}; expected at least 1")
        found: dict[str, str] = {}
        for split, weight in zip(self.splits, self.weights, strict=True):
            name = name_of(split)
            if split.digest in found:
                raise ConfigError(
                    f"{name} has the same samples as {found[split.digest]}; give one of them the weight of both"
                )
            found[split.digest] = name
            if weight and not len(split):
                raise ConfigError(f"{name} has a weight and no samples")
            if weight and weight * self.block < sum(self.weights):
                needed = -(-sum(self.weights) // weight)
                raise ConfigError(
                    f"the weight of {name} is less than one sample in a block of {self.block}; give a block of at "
                    f"least {needed}, or the weight 0"
                )


def splits_of(samples: Split | Mixture) -> tuple[Split, ...]:
    """Return the splits that samples are served from, by number; those of weight 0 too."""
    return samples.splits if isinstance(samples, Mixture) else (samples,)


def weighted_splits(samples: Split | Mixture) -> tuple[Split, ...]:
    """Return the splits that samples are served from, without those of weight 0."""
    if not isinstance(samples, Mixture):
        return (samples,)
    return tuple(split for split, weight in zip(samples.splits, samples.weights, strict=True) if weight)


def own_orders(samples: Split | Mixture, config: OrderConfig) -> list[OrderConfig]:
    """Return the access order of each split: the loader's, in a mixture each with a seed of its own."""
    if not isinstance(samples, Mixture):
        return [config]
    return [own_order(config, split.digest) for split in samples.splits]


def clock_steps(samples: Split | Mixture) -> list[int | None]:
    """Return by how many bytes the whole mixture goes on from one sample of each split to its next; None: as a split.

    So the cache compares the splits of a mixture by when they are needed, not by what is read of each until then.
    """
    if not isinstance(samples, Mixture):
        return [None]
    sizes = [split.table.size_bytes / max(1, len(split)) for split in samples.splits]
    total = sum(size * weight for size, weight in zip(sizes, samples.weights, strict=True))
    return [max(1, round(total / weight)) if weight else None for weight in samples.weights]


def label_maps(samples: Split | Mixture) -> list[Integers | None]:
    """Return, for each split, the label that each of its own labels becomes: `int64[classes]`; None: it stays.

    Raises:
        ConfigError: some splits have names for their labels and others have none, so that nobody knows what is equal.
    """
    if not isinstance(samples, Mixture) or len({split.classes for split in weighted_splits(samples)}) == 1:
        return [None] * len(splits_of(samples))
    nameless = [name_of(split) for split in weighted_splits(samples) if not split.classes]
    if nameless:
        raise ConfigError(f"labels of {', '.join(nameless)} have no names, others of the mixture have")
    number_of = {name: number for number, name in enumerate(samples.classes)}
    return [np.array([number_of.get(name, -1) for name in split.classes], np.int64) for split in samples.splits]


def most_of(samples: Split | Mixture, run: int) -> list[int]:
    """Return bounds on the samples of each split among `run` consecutive positions."""
    return samples.order(0).most_of(run) if isinstance(samples, Mixture) else [run]


def name_of(split: Split) -> str:
    """Return a split's name for messages, such as "digits@1/train"."""
    return f"{split.dataset}/{split.name}"


def columns_of(samples: Split | Mixture) -> list[str]:
    """Return the columns that every split has, in the order of the first."""
    first, *others = (split.table.sample_schema.names for split in weighted_splits(samples))
    return [name for name in first if all(name in other for other in others)]


def check_column(samples: Split | Mixture, column: str, what: str = "") -> None:
    """Raise ConfigError, naming the split, where one has no such column.

    Args:
        samples: a split, or a mixture.
        column: its name.
        what: the column in words; default its name.
    """
    for split in weighted_splits(samples):
        names = split.table.sample_schema.names
        if column not in names:
            raise ConfigError(f"{split!r} has no {what or f'column {column!r}'}; its columns are {names}")


def largest(samples: Split | Mixture, statistic: str) -> int:
    """Return the largest value of a column of the shard tables, see `ShardTable.largest`."""
    return max(split.table.largest(statistic) for split in weighted_splits(samples))


def _parse(weight: float | Fraction, split: Split) -> Fraction:
    """Return a weight exactly: a float as the shortest decimal that means it."""
    try:
        number = weight if isinstance(weight, int | Fraction) else float(weight)
        if math.isfinite(number) and number >= 0:
            return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"the weight of {name_of(split)} is {weight!r}; expected a finite number from 0 on")


def _as_integers(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the smallest integers in the same ratios."""
    common = math.lcm(*(weight.denominator for weight in weights))
    scaled = [int(weight * common) for weight in weights]
    divisor = math.gcd(*scaled) or 1
    return tuple(weight // divisor for weight in scaled)
