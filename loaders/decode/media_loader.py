"""What the loaders of sounds and of videos have in common: threads decode clips, some of which may be damaged."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from datasvc.errors import ConfigError
from datasvc.loaders.core.array_loader import ArrayLoader
from datasvc.loaders.core.batch import A, Batch
from datasvc.loaders.core.mixture import Mixture, check_column, weighted_splits
from datasvc.loaders.profiling.bottleneck import Resources
from datasvc.loaders.profiling.tuning import LoaderSetting
from datasvc.shards import Split
from datasvc.shards.format.schema import measured_among


class MediaBatch(Batch[A]):
    """Base of batches of clips.

    Attributes:
        bad: samples that do not decode: index in the batch -> name of the sample and reason.
    """

    bad: Mapping[int, str]


B = TypeVar("B", bound=MediaBatch[Any])


class MediaLoader(ArrayLoader[B]):
    """Batches of clips, which threads decode on the CPU.

    Attributes:
        num_bad: samples handed over so far that did not decode.
    """

    num_bad = 0
    _num_threads: int
    _num_processors: int  # that this rank may use

    def _deliver(self, decoded: B) -> B:
        self.num_bad += len(decoded.bad)
        return super()._deliver(decoded)

    def _bad_samples(self, finished: B) -> Collection[int]:
        return finished.bad

    @property
    @abstractmethod
    def _batch_bytes(self) -> int: ...

    def _resources(self) -> Resources:
        return dataclasses.replace(
            super()._resources(),
            unit="clips",
            num_threads=self._num_threads,
            num_processors=self._num_processors,
            batch_bytes=self._batch_bytes,
        )

    def _configure(self, setting: LoaderSetting) -> None:
        self._num_threads = setting.num_threads


def check_media_column(samples: Split | Mixture, column: str, measured: str, what: str) -> None:
    """Raise ConfigError if a split has no column of `what`, or was ingested without the column `measured` of them."""
    check_column(samples, column, what)
    for split in weighted_splits(samples):
        schema = split.table.sample_schema
        if measured not in measured_among(schema, schema.names):
            raise ConfigError(
                f"column {column!r} of {split!r} has bytes that no ingest has checked as {what}; export the data set "
                "and ingest it again"
            )
