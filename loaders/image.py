"""ImageLoader: decoded image batches in the access order, exact to the sample over any restart."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from datasvc.cache import Cache
from datasvc.cache.following import FollowedShards
from datasvc.cache.plan import check_window, window_bytes
from datasvc.cache.records import footprint
from datasvc.errors import BadSampleError, ConfigError
from datasvc.keyed import Integers
from datasvc.order import OrderConfig, OrderState, Shuffle, Tail, count_steps, lanes_of_rank, parse_tail
from datasvc.shards import Split
from datasvc.shards.images import read_header
from datasvc.shards.schema import HEIGHT, IMAGE, LABEL, WIDTH
from loaders.augment import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    AugmentConfig,
    Windows,
    plan_centre_windows,
    plan_random_windows,
)
from loaders.batches import Cursor, SampleBatch, SampleBatches
from loaders.pipeline import DecodePipeline, PipelineConfig

if TYPE_CHECKING:
    import torch

# Shorter side before the centre crop, as a share of the crop: 256 for 224.
_RESIZE_SHARE = 256 / 224


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


class ImageLoader:
    """Batches of a split's images, decoded by DALI; `for images, labels in loader` runs to the end of the epoch.

    A new `for` goes on where the last one stopped: the rest of the epoch, or the next epoch. `state_dict()` says
    what was handed over, never what was prefetched; loaded at any world size or batch size it continues with
    exactly the samples not yet served. Every rank of a job makes one with the same arguments but `rank`.

    Args:
        split: of a data-set version, with images.
        batch_size: samples of this rank per step.
        training: random windows and flips in shuffled order; otherwise the centre, in table order.
        cache: the node's; None reads a local repository in place, and a remote one into memory.
        size: side of the output in pixels.
        resize: evaluation: shorter side before the centre crop; default size * 256 / 224.
        augment: training: how windows are drawn.
        mean: of each channel, in 0..1.
        std: likewise.
        seed: of order and augmentation.
        shuffle: "global", "windowed" or None; default "global" in training, None otherwise.
        lanes: see `OrderConfig`.
        block: see `OrderConfig`.
        sticky: see `OrderConfig`.
        rank: data-parallel rank of this process.
        world_size: number of data-parallel ranks.
        tail: "drop", "short" or "pad" (masked) where the last samples fill no global batch; default "drop" in
            training, "pad" otherwise. With "short" and several ranks, a rank may get an empty last batch.
        device: "cpu", or the GPU that decodes and receives the images, "cuda" or "cuda:1".
        num_threads: decoding threads; default the processors this process may use.
        prefetch: batches under way while the caller trains.

    Raises:
        ConfigError: an argument is out of range; no images; a batch larger than the epoch with "drop".
        CacheFullError: the cache's budget is below the window that the order needs; says the number.
    """

    def __init__(
        self,
        split: Split,
        *,
        batch_size: int,
        training: bool,
        cache: Cache | None = None,
        size: int = 224,
        resize: int | None = None,
        augment: AugmentConfig | None = None,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        seed: int = 0,
        shuffle: Shuffle | str = "auto",
        lanes: int = 1,
        block: int | None = None,
        sticky: bool = False,
        rank: int = 0,
        world_size: int = 1,
        tail: Tail | None = None,
        device: str = "cpu",
        num_threads: int | None = None,
        prefetch: int = 2,
    ) -> None:
        wanted: Any = ("global" if training else None) if shuffle == "auto" else shuffle
        self.split = split
        self.batch_size = batch_size
        self.order = OrderConfig(seed=seed, shuffle=wanted, lanes=lanes, block=block, sticky=sticky)
        self.tail = parse_tail(tail or ("drop" if training else "pad"))
        self._training = training
        self._device = device
        self._world_size = world_size
        self._augment = augment or AugmentConfig()
        self._resize = round(size * _RESIZE_SHARE) if resize is None else resize
        _check_sizes(batch_size=batch_size, size=size, prefetch=prefetch, num_threads=num_threads)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank is {rank}; expected 0 <= rank < world_size = {world_size}")
        if self._resize < size:
            raise ConfigError(f"resize is {self._resize}, below size {size}: the crop would not fit")
        self._check_split()
        self._pipeline_config = PipelineConfig(
            batch_size=batch_size,
            size=size,
            mean=mean,
            std=std,
            num_threads=len(os.sched_getaffinity(0)) if num_threads is None else num_threads,
            prefetch=prefetch,
            device_id=_device_id(device),
            max_width=split.table.largest("max_width"),
            max_height=split.table.largest("max_height"),
        )
        if cache is not None:
            self._check_window(cache, batch_size * world_size * (prefetch + 1))
        own_lanes = lanes_of_rank(batch_size * world_size, rank=rank, world_size=world_size, lanes=lanes)
        self._followed = (
            None if cache is None else FollowedShards(cache, split, self.order, own_lanes, num_ranks=world_size)
        )
        self._has_labels = LABEL in split.table.sample_schema.names
        self._batches = SampleBatches(
            split,
            self._followed or split.origin,
            self.order,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            tail=self.tail,
            blob=IMAGE,
            columns=(WIDTH, HEIGHT, LABEL) if self._has_labels else (WIDTH, HEIGHT),
        )
        self._cursor = Cursor(0, 0)
        self._pipeline: DecodePipeline | None = None
        self._stream: Iterator[SampleBatch] | None = None
        self._under_way: deque[tuple[SampleBatch, Windows]] = deque()

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return count_steps(0, len(self.split), self._global_batch, self.tail)

    @property
    def epoch(self) -> int:
        """The epoch that a new `for` serves the rest of, counted from 0.

        Inside the loop's last batch that rest is empty: a `for` from there yields nothing and ends the epoch.
        """
        return self._cursor.epoch

    @property
    def progress(self) -> float:
        """Epochs served so far, with the share of the current one: for schedules that outlive a resize."""
        return self._cursor.epoch + self._cursor.position / len(self.split)

    @property
    def steps_left(self) -> int:
        """Steps from here to the end of the epoch."""
        return count_steps(self._cursor.position, len(self.split), self._global_batch, self.tail)

    def __iter__(self) -> Iterator[ImageBatch]:
        """Yield the rest of the epoch.

        Raises:
            BadSampleError: an image does not decode; names it. The state still stands before its batch.
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: from the cache or the repository.
        """
        epoch = self._cursor.epoch
        while self._cursor.epoch == epoch and self.steps_left:
            batch, self._cursor = self._next()
            yield batch
        if self._cursor.epoch == epoch:
            self._cursor = Cursor(epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands after the batches handed over so far, as JSON values."""
        return OrderState(self.split.digest, self._cursor.epoch, self._cursor.position, self.order).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, saved at any world size, batch size, cache or device.

        Raises:
            ConfigError: not a state, or one of a later format.
            StateMismatchError: the state belongs to another version or order; says both.
        """
        wanted = OrderState.from_dict(state)
        wanted.check_matches(self.split.digest, self.order, len(self.split))
        self._discard()
        self._cursor = Cursor(wanted.epoch, wanted.position)

    def close(self) -> None:
        """Release the shards and the decoder. The loader starts anew, from where it stands, when used again."""
        self._discard()
        if self._followed is not None:
            self._followed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self._world_size

    def _next(self) -> tuple[ImageBatch, Cursor]:
        """Return the next batch and where the run stands after it, and start decoding one more."""
        if self._under_way and self._under_way[0][0].before != self._cursor:
            self._discard()  # an interrupt fell between the last batch and the cursor
        if self._pipeline is None:
            self._pipeline = DecodePipeline(self._pipeline_config)
        if self._stream is None:
            self._stream = self._batches.stream(self._cursor)
        try:
            self._fill()
            batch, _ = self._under_way[0]
            images = self._take(batch)
            self._under_way.popleft()
            self._fill()
            finished = self._finish(batch, images)
        except BaseException:
            # Ctrl-C or a failing store, anywhere in between: start anew from the cursor, which has not moved.
            self._discard()
            raise
        return finished, batch.after

    def _fill(self) -> None:
        """Start decoding until `prefetch` batches are under way; empty ones, which DALI never sees, do not count."""
        assert self._pipeline is not None
        assert self._stream is not None
        while sum(bool(batch.blobs) for batch, _ in self._under_way) < self._pipeline_config.prefetch:
            batch = next(self._stream)
            windows = self._plan_windows(batch)
            self._under_way.append((batch, windows))
            if batch.blobs:
                self._pipeline.feed(batch.blobs, windows)

    def _take(self, batch: SampleBatch) -> torch.Tensor:
        import torch

        assert self._pipeline is not None
        if not batch.blobs:
            side = self._pipeline_config.size
            return torch.empty(0, 3, side, side, device=self._device)
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
                bad.append(f"{self._batches.describe(batch, index)}: {error}")
        return bad

    def _finish(self, batch: SampleBatch, images: torch.Tensor) -> ImageBatch:
        import torch

        labels = torch.from_numpy(batch.columns[LABEL].astype(np.int64)) if self._has_labels else None
        self._batches.retire(batch)
        return ImageBatch(images, labels, torch.from_numpy(batch.mask), batch.epoch, batch.positions)

    def _plan_windows(self, batch: SampleBatch) -> Windows:
        widths, heights = batch.columns[WIDTH], batch.columns[HEIGHT]
        if self._training:
            return plan_random_windows(
                widths,
                heights,
                batch.positions,
                seed=self.order.seed,
                epoch=batch.epoch,
                config=self._augment,
            )
        return plan_centre_windows(widths, heights, size=self._pipeline_config.size, resize=self._resize)

    def _discard(self) -> None:
        """Drop what was prefetched: it belongs to a position that is no longer wanted."""
        self._pipeline = None
        self._stream = None
        self._under_way.clear()
        self._batches.close()

    def _check_split(self) -> None:
        schema = self.split.table.sample_schema
        if IMAGE not in schema.names:
            raise ConfigError(f"{self.split!r} has no images; its columns are {schema.names}")
        if len(self.split) < self._world_size:
            raise ConfigError(f"{self.split!r} has fewer samples than there are ranks: {self._world_size}")
        if not len(self):
            raise ConfigError(
                f"{self.split!r} gives no full batch of {self.batch_size} x {self._world_size} ranks with "
                "tail='drop'; use smaller batches, or tail='pad'"
            )

    def _check_window(self, cache: Cache, run: int) -> None:
        table = self.split.table
        window = window_bytes(table.samples_per_shard, table.bytes_per_shard, self.order, run)
        # At an epoch's boundary the last shards of one and the first of the next are needed together.
        needed = min(2 * window, int(footprint(table.bytes_per_shard).sum()))
        room = cache.room_bytes({info.digest for info in table.shards()})
        check_window(needed, room, f"the order of {self.split!r}")


def _device_id(device: str) -> int | None:
    kind, _, number = device.partition(":")
    if kind == "cpu" and not number:
        return None
    if kind == "cuda" and (not number or number.isdecimal()):
        return int(number or 0)
    raise ConfigError(f"device is {device!r}; expected 'cpu', 'cuda' or 'cuda:N'")


def _check_sizes(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1")
