"""`repo.models.batch_at`: the batch of a step as the training got it, with the keys of its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.replay.recorded_steps import RecordedStep, find_run_step, find_step
from datasvc.repository import Repository

if TYPE_CHECKING:
    from datasvc.loaders import Batch


@dataclass(frozen=True)
class ReplayedBatch:
    """The batch of one step of a run.

    Attributes:
        step: positions of the batch, and the version that records them.
        rank: data rank whose part this is; None: the global batch, in the order of positions.
        positions: `int64[n]`, positions of the samples in the epoch, without padding.
        keys: key of each sample.
        sources: split of each sample, such as "digits@1/train".
        is_masked: `bool[n]`, other samples, which the run masked on request.
        is_purged: `bool[n]`, samples whose values were purged, mostly after the run: `batch` masks them.
    """

    step: RecordedStep
    rank: int | None
    positions: Integers
    keys: list[str]
    sources: list[str]
    is_masked: npt.NDArray[np.bool_]
    is_purged: npt.NDArray[np.bool_]
    _open: Callable[[], Any] = field(repr=False, compare=False)

    @cached_property
    def batch(self) -> Batch[Any]:
        """The batch as the training got it: pixels or tokens, augmented, as tensors on the CPU.

        Purged samples are masked, see `purged`.

        Raises:
            ConfigError: the entry does not record the settings of the loader, or the run had a transform.
            NotFoundError: samples of the batch were removed since.
        """
        with self._open() as loader:
            batch: Batch[Any] = next(iter(loader))
        return batch

    @property
    def masked(self) -> list[str]:
        """Keys of the samples of `is_masked`."""
        return list(compress(self.keys, self.is_masked))

    @property
    def purged(self) -> list[str]:
        """Keys of the samples of `is_purged`."""
        return list(compress(self.keys, self.is_purged))

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values, without pixels and tokens."""
        step = self.step
        names = ("position", "key", "data", "masked", "purged")
        columns = (self.positions.tolist(), self.keys, self.sources, self.is_masked.tolist(), self.is_purged.tolist())
        return {
            "step": step.step,
            "version": step.version,
            "run": step.run,
            "recorded": step.is_recorded,
            "data": str(step.use),
            "epoch": step.epoch,
            "start": step.start,
            "stop": step.stop,
            "ranks": step.ranks,
            "rank": self.rank,
            "samples": [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)],
        }


def batch_at(
    repository: Repository,
    ref: str,
    step: int | None = None,
    *,
    rank: int | None = None,
    transform: Callable[..., Any] | None = None,
) -> ReplayedBatch:
    """Return the batch of one optimizer step, from the entry of a version alone.

    Args:
        repository: repository of the model and its data.
        ref: "RUN@STEP", such as "digits-cnn@1200" for the newest run of this name or "digits-cnn/ID@1200"; with
            `step`, a model version such as "digits-cnn@3", or a run.
        step: the step, counted from 1.
        rank: data rank whose part to return; None: the global batch.
        transform: the transform of the images, for a run that had one.

    Raises:
        NotFoundError: there is no such run, version or step, or data was removed since.
        ConfigError: `ref` has another form, or there is no such rank.
        CorruptDataError, UnavailableError: an entry or an index cannot be read.
    """
    from datasvc.replay.rebuild import locate_batch, open_loader  # the loaders take longer to import than the rest

    if step is None:
        ref, _, number = ref.rpartition("@")
        if not ref or not number.isdecimal():
            raise ConfigError(
                f"{ref or number!r} names no step; give RUN@STEP, such as digits-cnn@1200, or a version and its "
                "step, such as digits-cnn@3 --step 1200"
            )
        step = int(number)
    if step < 1:
        raise ConfigError(f"step is {step}; steps count from 1")
    recorded = find_step(repository, ref, step) if "@" in ref else find_run_step(repository, ref, step)
    located = locate_batch(repository, recorded, rank=rank)
    return ReplayedBatch(
        recorded, rank, *located, lambda: open_loader(repository, recorded, rank=rank, transform=transform)
    )
