"""The last epoch of a signal: the distribution of its values, and the samples with the largest ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from datasvc.errors import ConfigError, NotFoundError
from datasvc.ledger.signals import read_last_epoch
from datasvc.models.provenance.signal_values import recorded_order, recorded_splits, values_of_split
from datasvc.printable import json_value
from datasvc.repository import Repository
from datasvc.shards.query.sample_reader import NumberedSamples

_NUM_BINS: Final = 30


class ValueBin(NamedTuple):
    """The number of values in `start <= value < stop`, of the last bin also of those equal to `stop`."""

    start: float
    stop: float
    num_values: int


class SignalSample(NamedTuple):
    """A sample with its value: `number` is its place in the split, as in `split[number]`."""

    number: int
    key: str
    class_name: str | None
    value: float


@dataclass(frozen=True)
class SignalSummary:
    """The last epoch of a signal, of the samples of one split.

    Attributes:
        run: the run, NAME/ID.
        name: name of the signal.
        splits: the splits that the run read, such as "pets@3/train".
        data: that of these values, one of `splits`.
        ref: what opens its samples: a version, with the digest of a view.
        epoch: the last epoch that the run recorded.
        num_values: number of values of it.
        num_samples: number of samples of the split.
        num_nonfinite: number of values that are infinite or NaN.
        bins: the finite values, in ascending order.
        largest: the samples with the largest values, infinite ones included, the largest first.
    """

    run: str
    name: str
    splits: Sequence[str]
    data: str
    ref: str
    epoch: int
    num_values: int
    num_samples: int
    num_nonfinite: int
    bins: Sequence[ValueBin]
    largest: Sequence[SignalSample]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, as `datasvc runs signal --json` prints them."""
        rows = {name: [json_value(each._asdict()) for each in getattr(self, name)] for name in ("bins", "largest")}
        return {**vars(self), "splits": list(self.splits), **rows}


def summarize_signal(
    repository: Repository,
    run: str,
    name: str = "loss",
    *,
    data: str | None = None,
    count: int = 24,
    max_values: int | None = None,
) -> SignalSummary:
    """Return the distribution of the last epoch of a signal, and the samples with the largest values.

    Args:
        repository: repository of the run and of its data.
        run: reference to the run, `NAME/ID`.
        name: name of the signal.
        data: one of the splits that the run read, such as "pets@3/train"; None: the first.
        count: number of the samples with the largest values, at least 1.
        max_values: greatest number of values to read; None: no limit.

    Raises:
        ConfigError: `count` is not positive, there are more than `max_values`, or see `read_signal`.
        NotFoundError: the run did not read this split; or see `read_signal`.
        CorruptDataError, UnavailableError: see `read_signal`.
    """
    if count < 1:
        raise ConfigError(f"count is {count}; expected 1 or more")
    signal = read_last_epoch(repository, run, name, max_values=max_values)
    chosen = signal.data[0] if data is None else data
    if chosen not in signal.data:
        raise NotFoundError(f"run {run} did not read {chosen}: its data was {' and '.join(signal.data)}")
    split = recorded_splits(repository, signal)[signal.data.index(chosen)]
    numbers, values, _ = values_of_split(signal, recorded_order(signal), split)
    is_finite = np.isfinite(values)
    counts, edges = np.histogram(values[is_finite].astype(np.float64), bins=_NUM_BINS)
    # NaN comes last. A sample of a weighted view may have several values: its largest counts.
    by_value = np.argsort(-values, kind="stable")
    _, first = np.unique(numbers[by_value], return_index=True)
    largest = by_value[np.sort(first)][:count].tolist()
    samples = NumberedSamples(split).summaries(numbers[largest].tolist())
    return SignalSummary(
        run,
        name,
        signal.data,
        chosen,
        split.dataset if split.table.view is None else f"{split.dataset}[{split.digest}]",
        int(signal.epochs[-1]),
        len(values),
        len(split),
        int(len(values) - is_finite.sum()),
        [
            ValueBin(start, stop, number)
            for start, stop, number in zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
        ]
        if is_finite.any()
        else [],
        [
            SignalSample(sample.number, sample.key, sample.class_name, float(value))
            for sample, value in zip(samples, values[largest], strict=True)
        ],
    )
