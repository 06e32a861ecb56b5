"""From sample batches to image batches: windows are planned, DALI decodes them, and a sample that fails is named."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from datasvc.errors import BadSampleError
from datasvc.keyed import Integers
from datasvc.shards.images import read_header
from datasvc.shards.schema import LABEL
from loaders.augment import Windows
from loaders.batches import SampleBatch
from loaders.pipeline import DecodePipeline, PipelineConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@dataclass(frozen=True)
class ImageBatch:
    """One rank's part of a global batch; unpacks to `images, labels`.

    Attributes:
        images: `float32[n, 3, size, size]` on the loader's device, normalised; owned by the caller.
        labels: `int64[n]` on the CPU; None where the data set has none.
        mask: `bool[n]`, False for samples that only pad the last batch.
        epoch: of the batch.
        positions: `int64[n]`, of the samples in that epoch.
    """

    images: torch.Tensor
    labels: torch.Tensor | None
    mask: torch.Tensor
    epoch: int
    positions: Integers

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter((self.images, self.labels))


class ImageDecoder:
    """A `Decoder` of images.

    Args:
        config: of the DALI graph.
        device: where the images shall lie.
        plan_windows: draws the windows of a batch.
        describe: names a sample of a batch, by its index there.
    """

    def __init__(
        self,
        config: PipelineConfig,
        *,
        device: str,
        plan_windows: Callable[[SampleBatch], Windows],
        describe: Callable[[SampleBatch, int], str],
    ) -> None:
        self._pipeline = DecodePipeline(config)
        self._size = config.size
        self._device = device
        self._plan_windows = plan_windows
        self._describe = describe
        self._under_way: deque[tuple[SampleBatch, Windows]] = deque()

    def feed(self, batch: SampleBatch) -> None:
        """See `Decoder`."""
        windows = self._plan_windows(batch)
        if batch.blobs:
            self._pipeline.feed(batch.blobs, windows)
        self._under_way.append((batch, windows))

    def take(self) -> ImageBatch:
        """See `Decoder`."""
        import torch

        batch, _ = self._under_way[0]
        images = self._images(batch)
        self._under_way.popleft()
        labels = torch.from_numpy(batch.columns[LABEL].astype(np.int64)) if LABEL in batch.columns else None
        return ImageBatch(images, labels, torch.from_numpy(batch.mask), batch.epoch, batch.positions)

    def close(self) -> None:
        """See `Decoder`."""
        self._under_way.clear()

    def _images(self, batch: SampleBatch) -> torch.Tensor:
        import torch

        if not batch.blobs:
            return torch.empty(0, 3, self._size, self._size, device=self._device)
        try:
            return self._pipeline.take()
        except RuntimeError as error:
            bad = self._bad_samples(batch) or [f"DALI refuses a sample that Pillow decodes ({error})"]
            raise BadSampleError(
                f"{len(bad)} of {len(batch.blobs)} samples of a batch do not decode: {'; '.join(bad)}; delete them "
                "from the data set, or ingest it with --decode-check --on-bad skip"
            ) from error

    def _bad_samples(self, batch: SampleBatch) -> list[str]:
        """Name the samples of a failed batch that do not decode: DALI tells of one at most."""
        bad = []
        for index, blob in enumerate(batch.blobs):
            try:
                read_header(blob.tobytes(), decode=True)
            except BadSampleError as error:
                bad.append(f"{self._describe(batch, index)}: {error}")
        return bad
