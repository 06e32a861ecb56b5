"""What a search for samples found: each time that one was consumed, and which versions have it behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from datasvc.keyed_random import Integers
from datasvc.models.provenance.consumed_ranges import EpochPart
from datasvc.models.provenance.key_positions import Served
from datasvc.models.provenance.segments import Consumed

Bits = npt.NDArray[np.uint8]
"""A bit for each sample that is asked for, lowest first."""


class SampleUse(NamedTuple):
    """A sample in a batch of some training.

    Attributes:
        key: of the sample.
        data: split that it came from, "imagenet@3/train".
        version: whose training it was, "digits-cnn@3 elsewhere" where that is in another repository; all versions
            that continue it have it too.
        epoch: of what the run read: of the split, or the mixture.
        position: in that epoch.
        step: optimizer step that consumed it, counted from 1; None where the entry does not say how long steps were.
        is_certain: False where the end of an epoch, and with it the sample, may have been dropped: the entry was
            saved by a program that did not write down its batch size.
    """

    key: str
    data: str
    version: str
    epoch: int
    position: int
    step: int | None
    is_certain: bool


@dataclass(frozen=True)
class VersionUses:
    """How many of the samples a version's weights have behind them.

    Attributes:
        name: "digits-cnn@3".
        num_samples: of those asked for, each counted once.
        num_own: consumed by its own training, after the versions that it continues.
        is_complete: whether everything is known that it and the versions above it consumed; otherwise it may have
            seen more of them.
    """

    name: str
    num_samples: int
    num_own: int
    is_complete: bool


class UseBatch(NamedTuple):
    """What one version consumed in one epoch."""

    consumed: Consumed
    part: EpochPart
    served: Served


@dataclass(frozen=True)
class ConsumerReport:
    """Which versions consumed which samples.

    Attributes:
        keys: that were asked for, in that order.
        missing: numbers of keys that are in no data which these versions read.
        versions: that were asked for, with all that they continue taken into account.
        gaps: by version, of those asked for and those above them: what is not known of it, a line each.
        chunks: what was found, version by version, in the order of training.
        seen: by version, which of the samples its weights have behind them.
    """

    keys: Sequence[str]
    missing: Integers
    versions: Sequence[VersionUses]
    gaps: Mapping[str, Sequence[str]]
    chunks: Sequence[UseBatch] = field(repr=False)
    seen: Mapping[str, Bits] = field(repr=False)

    def sightings(self, number: int) -> list[SampleUse]:
        """Return each time that a sample, by its number in `keys`, was consumed: in the order of the versions."""
        return [each for chunk in self.chunks for each in self._sightings(chunk, chunk.served.keys == number)]

    def all_sightings(self) -> Iterator[SampleUse]:
        """Yield each time that any of the samples was consumed, version by version, in the order of training."""
        for chunk in self.chunks:
            yield from self._sightings(chunk, np.ones(len(chunk.served.keys), np.bool_))

    def versions_with(self, number: int) -> list[str]:
        """Return the versions asked for whose weights have a sample, by its number in `keys`, behind them."""
        byte, bit = divmod(number, 8)
        return [each.name for each in self.versions if self.seen[each.name][byte] >> bit & 1]

    def _sightings(self, chunk: UseBatch, chosen: npt.NDArray[np.bool_]) -> Iterator[SampleUse]:
        served = chunk.served[np.flatnonzero(chosen)]
        steps = chunk.part.steps_of(served.positions)
        names = chunk.consumed.segment.order.names
        told = [None] * len(served.keys) if steps is None else steps.tolist()
        rows = zip(served.keys.tolist(), served.sources.tolist(), served.positions.tolist(), told, strict=True)
        for key, source, position, step in rows:
            yield SampleUse(
                self.keys[key], names[source], chunk.consumed.version, chunk.part.epoch, position, step,
                chunk.part.is_certain,
            )  # fmt: skip
