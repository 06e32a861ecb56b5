"""ImageLoader: decoded image batches in the access order, exact to the sample over any restart."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.order import OrderConfig, Shuffle, Tail, parse_tail
from datasvc.shards import Split
from datasvc.shards.schema import HEIGHT, IMAGE, LABEL, WIDTH
from loaders.augment import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    AugmentConfig,
    Windows,
    plan_centre_windows,
    plan_random_windows,
)
from loaders.batches import SampleBatch
from loaders.data_ranks import choose_data_ranks
from loaders.image_decoder import ImageBatch, ImageDecoder
from loaders.loader import Decoder, Loader, check_sizes
from loaders.pipeline import PipelineConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Shorter side before the centre crop, as a share of the crop: 256 for 224.
_RESIZE_SHARE = 256 / 224


class ImageLoader(Loader[ImageBatch]):
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
        data_rank: of this process, with `data_world_size`: which part of each global batch it gets. Tensor- and
            pipeline-parallel peers give the same rank, and get the same batches.
        data_world_size: number of data ranks.
        mesh: a `torch.distributed` device mesh, instead of these two.
        mesh_axis: name of its data axis, where it has more than one.
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
        data_rank: int | None = None,
        data_world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        mesh_axis: str | None = None,
        tail: Tail | None = None,
        device: str = "cpu",
        num_threads: int | None = None,
        prefetch: int = 2,
    ) -> None:
        wanted: Any = ("global" if training else None) if shuffle == "auto" else shuffle
        self._training = training
        self._device = device
        self._augment = augment or AugmentConfig()
        self._resize = round(size * _RESIZE_SHARE) if resize is None else resize
        check_sizes(size=size, num_threads=num_threads)
        if self._resize < size:
            raise ConfigError(f"resize is {self._resize}, below size {size}: the crop would not fit")
        columns = split.table.sample_schema.names
        if IMAGE not in columns:
            raise ConfigError(f"{split!r} has no images; its columns are {columns}")
        super().__init__(
            split,
            blob=IMAGE,
            columns=(WIDTH, HEIGHT, LABEL) if LABEL in columns else (WIDTH, HEIGHT),
            batch_size=batch_size,
            order=OrderConfig(seed=seed, shuffle=wanted, lanes=lanes, block=block, sticky=sticky),
            tail=parse_tail(tail or ("drop" if training else "pad")),
            ranks=choose_data_ranks(data_rank, data_world_size, mesh, mesh_axis),
            cache=cache,
            prefetch=prefetch,
        )
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

    def _make_decoder(self) -> Decoder[ImageBatch]:
        return ImageDecoder(
            self._pipeline_config,
            device=self._device,
            plan_windows=self._plan_windows,
            describe=self._batches.describe,
        )

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


def _device_id(device: str) -> int | None:
    kind, _, number = device.partition(":")
    if kind == "cpu" and not number:
        return None
    if kind == "cuda" and (not number or number.isdecimal()):
        return int(number or 0)
    raise ConfigError(f"device is {device!r}; expected 'cpu', 'cuda' or 'cuda:N'")
