"""Result of `find_consumers`: every use of the requested samples, and the versions that consumed them.

Uses are kept as arrays, and become `SampleUse` values only when a caller reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.keyed_random import Integers
from datasvc.models.provenance.consumed_ranges import EpochPart
from datasvc.models.provenance.key_lookup import Served
from datasvc.models.provenance.segments import Consumed
from datasvc.shown import ShownTable, rows_to_arrow

Bits = npt.NDArray[np.uint8]
"""Set of requested samples, one bit each: sample n is in the set if bit n % 8 of byte n // 8 is 1."""


class SampleUse(NamedTuple):
    """One use of a sample in training.

    Attributes:
        key: key of the sample.
        data: split of the sample, such as "imagenet@3/train".
        version: version whose training consumed the sample; "digits-cnn@3 elsewhere" if the version is only in
            another repository. The use also counts for all versions that continue this one.
        epoch: epoch of the split, or of the mixture if the run read one.
        position: position in that epoch.
        step: optimizer step that consumed the sample, counted from 1; None if unknown.
        is_certain: False if the sample may have been dropped at the end of an epoch, because the entry does not
            record the batch size.
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
    """Number of requested samples that a version consumed.

    Attributes:
        name: name of the version, such as "digits-cnn@3".
        num_samples: number of distinct samples that it or an ancestor consumed.
        num_own: number of distinct samples that its own training consumed.
        is_complete: False if it is unknown what a part of its training, or of an ancestor's, consumed. Then
            `num_samples` is a lower bound.
    """

    name: str
    num_samples: int
    num_own: int
    is_complete: bool


class UseBatch(NamedTuple):
    """Requested samples that one version consumed in one epoch.

    Attributes:
        consumed: segment that contains them.
        part: part of the segment in this epoch.
        served: the samples, with their positions in the epoch.
    """

    consumed: Consumed
    part: EpochPart
    served: Served


@dataclass(frozen=True)
class ConsumerReport(ShownTable):
    """Versions that consumed the requested samples.

    Attributes:
        keys: requested keys, in the requested order.
        missing: `int64[n]`, indices in `keys` of keys that occur in no data that these versions read.
        versions: the requested versions, with the number of samples that each consumed.
        gaps: unknown parts of the consumption, one line each, by name of a requested version or ancestor.
        chunks: uses of the samples, one batch per version and epoch, ordered by version and training.
        seen: for each requested version and each ancestor, by name: the samples that it or its ancestors consumed.
    """

    keys: Sequence[str]
    missing: Integers
    versions: Sequence[VersionUses]
    gaps: Mapping[str, Sequence[str]]
    chunks: Sequence[UseBatch] = field(repr=False)
    seen: Mapping[str, Bits] = field(repr=False)

    def uses(self, number: int) -> list[SampleUse]:
        """Return the uses of the sample `keys[number]`, ordered by version and training."""
        return [use for batch in self.chunks for use in self._uses(batch, batch.served.keys == number)]

    def all_uses(self) -> Iterator[SampleUse]:
        """Yield the uses of all requested samples, ordered by version and training."""
        for batch in self.chunks:
            yield from self._uses(batch, np.ones(len(batch.served.keys), np.bool_))

    def versions_with(self, number: int) -> list[str]:
        """Return the requested versions that consumed the sample `keys[number]`, or have an ancestor that did."""
        byte, bit = divmod(number, 8)
        return [version.name for version in self.versions if self.seen[version.name][byte] >> bit & 1]

    def to_arrow(self) -> pa.Table:
        """Return a row for each use, with the fields of `SampleUse`, ordered by version and training."""
        return rows_to_arrow([use._asdict() for use in self.all_uses()])

    def to_json(self, max_keys: int | None = None) -> dict[str, Any]:
        """Return JSON values, with the uses of the first `max_keys` samples (None: all)."""
        if max_keys is None or max_keys >= len(self.keys):
            uses = self.all_uses()  # one pass over all uses, instead of one for each key
        else:
            uses = (use for number in range(max_keys) for use in self.uses(number))
        return {
            "samples": len(self.keys),
            "missing": [self.keys[number] for number in self.missing.tolist()],
            "versions": [
                {
                    "version": version.name,
                    "samples": version.num_samples,
                    "own": version.num_own,
                    "complete": version.is_complete,
                }
                for version in self.versions
            ],
            "gaps": {name: list(gaps) for name, gaps in self.gaps.items()},
            "consumed": [use._asdict() for use in uses],
        }

    def _uses(self, batch: UseBatch, chosen: npt.NDArray[np.bool_]) -> Iterator[SampleUse]:
        """Yield the uses of a batch where `chosen` is True."""
        served = batch.served[np.flatnonzero(chosen)]
        steps = batch.part.steps_of(served.positions)
        names = batch.consumed.segment.order.names
        # Use lists of Python integers, because reading numpy arrays element by element is much slower.
        step_list = [None] * len(served.keys) if steps is None else steps.tolist()
        rows = zip(served.keys.tolist(), served.sources.tolist(), served.positions.tolist(), step_list, strict=True)
        for key, source, position, step in rows:
            yield SampleUse(
                self.keys[key], names[source], batch.consumed.version, batch.part.epoch, position, step,
                batch.part.is_certain,
            )  # fmt: skip
