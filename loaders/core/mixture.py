"""Weighted mixtures of splits, which loaders accept in place of a split. For their order see `datasvc.mix_order`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.ledger.masked import NOTHING_MASKED, Masked
from datasvc.mix_order import MixOrder, own_order
from datasvc.mix_schedule import MixStage
from datasvc.order import OrderConfig
from datasvc.printable import count_text
from datasvc.shards import DatasetVersion, Split
from datasvc.shards.format.schema import LABEL
from datasvc.shards.versions.labels import check_unicode_forms

_DEFAULT_BLOCK: Final = 4096


@dataclass(frozen=True)
class MixtureStage:
    """Weights of a mixture from some sample on.

    Attributes:
        start_samples: number of samples of the mixture, over all epochs, after which the weights hold. Rounded up to
            whole blocks.
        weights: weights by part of the mixture; a part that is left out has the weight 0.
        ramp: False: the weights change at `start_samples`. True: they change linearly, from block to block, from the
            start of the stage before until `start_samples`. A part whose weight is 0 at one end of a ramp is served
            with one sample in a block there.
    """

    start_samples: int
    weights: Mapping[Split | Mixture, float | Fraction]
    ramp: bool = False


class Mixture:
    """A weighted mixture of splits, which a loader accepts in place of a split.

    A weight is a fraction of the samples served, independent of the splits' sizes. The positions of all epochs are
    divided into blocks of `block` positions. In the first n blocks, for any n, each split serves its fraction of the
    samples, with an error of less than one sample. Each split is read to its end in its own access order, and then
    again in the order of its next epoch. Each such pass serves every sample of the split once.

    An epoch of the mixture has `epoch_samples` samples. Its end does not end a pass over a split: the next epoch
    continues the pass. With `tail="drop"`, the samples that a loader drops at the end of an epoch are missing in the
    pass. To drop none, let `epoch_samples` be a multiple of the global batch.

    With `stages`, the weights change during the run. Each split continues its pass over a change, so that no sample
    is lost or repeated. A run that is resumed may have other stages ahead; see `Loader.load_state_dict`.

    Args:
        parts: splits and their weights, as pairs or a mapping. Only ratios matter: 7, 2, 1 equals 0.7, 0.2, 0.1. A
            float counts as the decimal number that is written: 0.1 is exactly 1/10. A weight of 0 leaves a split out.
            A part may be a mixture without stages: its weight is multiplied by those of its splits. Its own
            `epoch_samples` and `block` are not used.
        epoch_samples: samples of an epoch; default: the number of samples in all splits that `parts` gives a weight
            above 0.
        block: number of positions that are mixed together. If it equals the global batch and `epoch_samples` is a
            multiple of it, the fractions are exact in every global batch.
        stages: later weights, in the order of their starts.

    Attributes:
        splits: all splits, in the order of `parts`.
        weights: weight of each split at the start, as the smallest integers.
        stages: the later weights, by block.

    Raises:
        ConfigError: there are no splits; a split occurs twice; a weight is negative or not finite, or gives less than
            one sample per block; a split with a weight has no samples; `epoch_samples` or `block` is below 1; a stage
            names a part that the mixture does not have, or does not start in a later block than the stage before.
    """

    def __init__(
        self,
        parts: Mapping[Split | Mixture, float | Fraction] | Iterable[tuple[Split | Mixture, float | Fraction]],
        *,
        epoch_samples: int | None = None,
        block: int = _DEFAULT_BLOCK,
        stages: Sequence[MixtureStage] = (),
    ) -> None:
        pairs = list(parts.items() if isinstance(parts, Mapping) else parts)
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ConfigError(f"a part of a mixture is {pair!r}; expected a split and its weight, as a pair")
            check_samples(pair[0])
            if isinstance(pair[0], Mixture) and pair[0].stages:
                raise ConfigError(f"a part of a mixture is {pair[0]!r}; give the stages to the outer mixture")
        self.splits: tuple[Split, ...] = tuple(split for part, _ in pairs for split in splits_of(part))
        self.weights: tuple[int, ...] = _multiply_weights(pairs)
        self.block = block
        if block < 1:
            raise ConfigError(f"block is {block}; expected at least 1")
        self.stages: tuple[MixStage, ...] = tuple(self._place_stages([part for part, _ in pairs], stages))
        self._check()
        default_samples = sum(
            split.num_positions for split, weight in zip(self.splits, self.weights, strict=True) if weight
        )
        self.epoch_samples = default_samples if epoch_samples is None else epoch_samples
        if self.epoch_samples < 1:
            raise ConfigError(f"epoch_samples is {epoch_samples}; expected at least 1")
        if self.stages:
            self.order(0)  # checks the weights of ramps

    def __len__(self) -> int:
        return self.epoch_samples

    @property
    def num_positions(self) -> int:
        """Positions of an epoch: `epoch_samples`."""
        return self.epoch_samples

    def __repr__(self) -> str:
        parts = [f"{weight} {name_of(split)}" for split, weight in zip(self.splits, self.weights, strict=True)]
        stages = f", {count_text(len(self.stages), 'later stage')}" if self.stages else ""
        return f"Mixture({' : '.join(parts)}, {count_text(len(self), 'sample')}{stages})"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the splits, such as "digits@1/train", in the order of a batch's `sources`."""
        return tuple(map(name_of, self.splits))

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names of the mixture's labels: the names of all splits, each once, in the order of label values.

        Loaders map each split's labels to the indices of these names. Empty if the splits have no class names. The
        splits of later stages come last, so that a change of the stages ahead changes no label of earlier ones.
        """
        by_stage = (weights for _, weights, _ in (MixStage(0, self.weights), *self.stages))
        order = dict.fromkeys(number for weights in by_stage for number, weight in enumerate(weights) if weight)
        return tuple(dict.fromkeys(name for number in order for name in self.splits[number].classes))

    def order(self, seed: int) -> MixOrder:
        """Return the order that assigns positions to splits, for a loader's seed."""
        return MixOrder(
            [split.num_positions for split in self.splits],
            self.weights,
            epoch_samples=self.epoch_samples,
            block=self.block,
            seed=seed,
            stages=self.stages,
        )

    def describe(self) -> dict[str, Any]:
        """Return the mixture as JSON values; equal values mean equal samples at equal positions."""
        description: dict[str, Any] = {
            "splits": [{"name": f"{split.dataset}/{split.name}", "version": split.digest} for split in self.splits],
            "weights": list(self.weights),
            "epoch_samples": self.epoch_samples,
            "block": self.block,
        }
        if self.stages:
            description["stages"] = [
                {"start": stage.first * self.block, "weights": list(stage.weights), "ramp": stage.is_ramp}
                for stage in self.stages
            ]
        return description

    def _place_stages(self, parts: Sequence[Split | Mixture], stages: Sequence[MixtureStage]) -> Iterator[MixStage]:
        """Yield the stages with their first blocks, and the weights of all splits."""
        first = 0
        for stage in stages:
            unknown = [part for part in stage.weights if part not in parts]
            if unknown:
                raise ConfigError(
                    f"the stage from sample {stage.start_samples} gives a weight to {unknown[0]!r}, which is no part "
                    "of the mixture; add it to the parts, with the weight 0"
                )
            # Round up, so that no sample before `start_samples` has the new weights.
            number = -(-stage.start_samples // self.block)
            if number <= first:
                raise ConfigError(
                    f"the stage from sample {stage.start_samples} starts in block {number}, expected a block after "
                    f"{first}, in which the weights before it start; give stages in the order of their starts, at "
                    f"least a block of {self.block} apart"
                )
            first = number
            yield MixStage(
                number, _multiply_weights([(part, stage.weights.get(part, 0)) for part in parts]), stage.ramp
            )

    def _check(self) -> None:
        names: dict[str, str] = {}
        for number, split in enumerate(self.splits):
            name = name_of(split)
            if split.digest in names:
                raise ConfigError(
                    f"{name} has the same samples as {names[split.digest]}; keep one of them, with the sum of both "
                    "weights"
                )
            names[split.digest] = name
            if split in weighted_splits(self) and not split.num_positions:
                raise ConfigError(f"{name} has a weight and no samples; leave it out, or give it the weight 0")
            for weights in (self.weights, *(stage.weights for stage in self.stages)):
                if 0 < weights[number] * self.block < sum(weights):
                    min_block = -(-sum(weights) // weights[number])  # rounded up
                    raise ConfigError(
                        f"the weight of {name} gives less than one sample in a block of {self.block}; give a block "
                        f"of at least {min_block}, or the weight 0"
                    )


def check_samples(samples: object, *, or_mixture: bool = True) -> None:
    """Raise ConfigError if a loader gets something else than a split, or a mixture of splits.

    The message says how to get a split from what was given.
    """
    if isinstance(samples, Split) and not or_mixture and samples.packs is not None:
        raise ConfigError(f"{samples!r} is packed, which only a TokenLoader reads; give the split without packs")
    if or_mixture and isinstance(samples, Mixture) and any(each.table.grouping for each in samples.splits):
        raise ConfigError(f"{samples!r} would divide the groups of an aspect: give its splits without groups")
    if isinstance(samples, Split) or (or_mixture and isinstance(samples, Mixture)):
        return
    if isinstance(samples, DatasetVersion):
        names = " or ".join(f"version[{name!r}]" for name in samples)
        advice = f"{samples.resolved} is a version of a data set: give a split of it, {names}"
    elif isinstance(samples, str):
        advice = f"{samples!r} is a text: give a split, datasvc.open(REPOSITORY).dataset('NAME@1')['train']"
    elif isinstance(samples, list | tuple) and samples and isinstance(samples[0], Mapping):
        advice = (
            "a list of samples is not a split: give the split itself, and leave the loop after the samples to read"
        )
    elif isinstance(samples, Mixture):
        advice = "a mixture is for ImageLoader, TokenLoader and AudioLoader: give one split"
    else:
        advice = f"{type(samples).__name__} is not a split: give one, such as repo.dataset('NAME@1')['train']"
    raise ConfigError(advice)


def splits_of(samples: Split | Mixture) -> tuple[Split, ...]:
    """Return all splits, including those of weight 0."""
    return samples.splits if isinstance(samples, Mixture) else (samples,)


def purged_samples(samples: Split | Mixture) -> Masked:
    """Return the masks of all samples that were purged when the splits were opened.

    A loader has them in its state, so that `trained-on` does not count what it serves of them.
    """
    masked = NOTHING_MASKED
    for split in splits_of(samples):
        if redacted := split.table.redacted:
            numbers = [number for number, info in enumerate(split.table.shards()) if info.digest in redacted]
            masked |= Masked.rows(split.digest, {each: split.table.redacted_rows(each) for each in numbers})
    return masked


def weighted_splits(samples: Split | Mixture) -> tuple[Split, ...]:
    """Return the splits with a weight above 0, at the start or in a later stage."""
    if not isinstance(samples, Mixture):
        return (samples,)
    most = map(max, zip(samples.weights, *(stage.weights for stage in samples.stages), strict=True))
    return tuple(split for split, weight in zip(samples.splits, most, strict=True) if weight)


def split_orders(samples: Split | Mixture, config: OrderConfig) -> list[OrderConfig]:
    """Return the access order of each split: that of the loader. Each split of a mixture gets a seed of its own."""
    if not isinstance(samples, Mixture):
        return [config]
    return [own_order(config, split.digest) for split in samples.splits]


def clock_steps(samples: Split | Mixture) -> list[int | None]:
    """Return, for each split, the mean bytes that a mixture reads per sample of this split.

    This includes the bytes of other splits that are read between two samples of this one. They count because the
    cache compares the next uses of the shards of all splits. With stages, it is the smallest mean of all stages, so
    that the cache plans each split as in the stage that reads it most often. None: no mixture, or a weight of 0.
    """
    if not isinstance(samples, Mixture):
        return [None]
    sizes = [split.table.size_bytes / max(1, split.num_positions) for split in samples.splits]
    steps: list[int | None] = [None] * len(sizes)
    for weights in (samples.weights, *(stage.weights for stage in samples.stages)):
        total = sum(size * weight for size, weight in zip(sizes, weights, strict=True))
        for number, weight in enumerate(weights):
            if weight:
                step = max(1, round(total / weight))
                steps[number] = min(step, steps[number] or step)
    return steps


def label_maps(samples: Split | Mixture) -> list[Integers | None]:
    """Return, for each split, the mixture's label for each label of the split, `int64[classes]`; None: equal labels.

    Raises:
        ConfigError: some splits have class names and others have none, so their labels cannot be matched; or two
            class names are one in two Unicode forms.
    """
    if not isinstance(samples, Mixture) or len({split.classes for split in weighted_splits(samples)}) == 1:
        return [None] * len(splits_of(samples))
    unnamed = [name_of(split) for split in weighted_splits(samples) if not split.classes]
    if unnamed:
        raise ConfigError(
            f"labels of {', '.join(unnamed)} have no class names, but those of other splits in the mixture have; "
            "ingest all splits with class names, or all without"
        )
    check_unicode_forms(samples.classes)
    label_of_class = {name: label for label, name in enumerate(samples.classes)}
    # -1 for a class that only splits of weight 0 have: no sample of these splits is served.
    return [np.array([label_of_class.get(name, -1) for name in split.classes], np.int64) for split in samples.splits]


def most_of(samples: Split | Mixture, run: int) -> list[int]:
    """Return, for each split, an upper bound on the number of its samples in any `run` consecutive positions."""
    return samples.order(0).most_of(run) if isinstance(samples, Mixture) else [run]


def name_of(split: Split) -> str:
    """Return the name of a split for messages, such as "digits@1/train"; of a view, with what it selects."""
    return split.title


def columns_of(samples: Split | Mixture) -> list[str]:
    """Return the columns that every split has, in the order of the first split."""
    first, *others = (split.table.sample_schema.names for split in weighted_splits(samples))
    return [name for name in first if all(name in other for other in others)]


def check_column(samples: Split | Mixture, column: str, what: str = "") -> None:
    """Raise ConfigError if a split lacks a column. The message calls the column `what` if that is given."""
    for split in weighted_splits(samples):
        names = split.table.sample_schema.names
        if column not in names:
            raise ConfigError(f"{split!r} has no {what or f'column {column!r}'}; its columns are {names}")


def holds_labels(samples: Split | Mixture, columns: Sequence[str]) -> bool:
    """Return whether the splits have labels that are class indices.

    Raises:
        ConfigError: the column `label` of a split does not hold integers, and `columns`, which the caller requests as
            they are stored, do not have it.
    """
    for split in weighted_splits(samples):
        schema = split.table.sample_schema
        if LABEL not in schema.names or pa.types.is_integer(schema.field(LABEL).type):
            continue
        if LABEL in columns:
            return False
        kind = schema.field(LABEL).type
        way = (
            f"ingest the data with --label-column {LABEL} (SourceOptions.label), which makes classes of text and 0 "
            "and 1 of booleans, or "
        )
        is_convertible = any(
            test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean)
        )
        raise ConfigError(
            f"the column {LABEL!r} of {split!r} is {kind}; labels are integers, the indices of classes: "
            f"{way if is_convertible else ''}request the values as they are with columns=[{LABEL!r}]"
        )
    return LABEL in columns_of(samples)


def largest(samples: Split | Mixture, statistic: str) -> int:
    """Return the largest value of a statistic in the shard tables, see `ShardTable.largest`."""
    return max(split.table.largest(statistic) for split in weighted_splits(samples))


def _multiply_weights(pairs: Sequence[tuple[Split | Mixture, float | Fraction]]) -> tuple[int, ...]:
    """Return the weight of each split, as the smallest integers: that of its part times that within the part."""
    weights: list[Fraction] = []
    for part, given in pairs:
        weight = _parse_weight(given, part)
        inner = part.weights if isinstance(part, Mixture) else (1,)
        weights += (weight * Fraction(each, sum(inner)) for each in inner)
    if not any(weights):
        raise ConfigError("a mixture, and each of its stages, needs at least one split with a weight above 0")
    return _as_integers(weights)


def _parse_weight(weight: float | Fraction, part: Split | Mixture) -> Fraction:
    """Return a weight as a fraction. A float counts as the shortest decimal number that represents it."""
    try:
        number = weight if isinstance(weight, int | Fraction) else float(weight)
        if math.isfinite(number) and number >= 0:
            # `repr` makes 0.1 exactly 1/10. The exact fraction of the binary number would have a huge denominator.
            return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)
    except (TypeError, ValueError, OverflowError):
        pass  # not a number: raise the same error as for a negative or infinite number
    name = repr(part) if isinstance(part, Mixture) else name_of(part)
    raise ConfigError(f"the weight of {name} is {weight!r}; expected a finite number, at least 0")


def _as_integers(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the smallest integers that have the same ratios as the weights."""
    denominator = math.lcm(*(weight.denominator for weight in weights))
    scaled = [int(weight * denominator) for weight in weights]
    divisor = math.gcd(*scaled)
    return tuple(weight // divisor for weight in scaled)


# Numbers and booleans are delivered as arrays, everything else as lists of Python values.


def is_array_column(data_type: pa.DataType) -> bool:
    """Return whether a column of this type is delivered as an array or tensor."""
    return any(is_kind(data_type) for is_kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def divide_columns(samples: Split | Mixture, columns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the columns that are delivered as arrays, and those that are delivered as lists.

    Raises:
        ConfigError: a split lacks a column; or a column has numbers or booleans in one split of a mixture, and
            another type in another split.
    """
    arrays = []
    for name in dict.fromkeys(columns):
        check_column(samples, name)
        types = {split.table.sample_schema.field(name).type for split in weighted_splits(samples)}
        if any(map(is_array_column, types)):
            if len(types) > 1:
                raise ConfigError(
                    f"column {name!r} of {samples!r} has several types, {sorted(map(str, types))}; ingest the splits "
                    "with one type, or leave the column out"
                )
            arrays.append(name)
    return arrays, [name for name in columns if name not in arrays]
