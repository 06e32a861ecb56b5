"""`VideoLoader`: batches of clips of videos in the access order; a resumed run serves each sample exactly once."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.ledger.masked import Masked
from datasvc.loaders.augment.augment import AugmentConfig
from datasvc.loaders.core.arguments import check_sizes
from datasvc.loaders.core.batches import BatchDecoder
from datasvc.loaders.core.mixture import Mixture, check_samples, divide_columns, holds_labels
from datasvc.loaders.core.state import changed_fields
from datasvc.loaders.decode.backend import OnBad, check_on_bad
from datasvc.loaders.decode.choice.choice import count_rank_processors
from datasvc.loaders.decode.media_loader import MediaLoader, check_media_column
from datasvc.loaders.decode.pixels import Output, PixelFormat
from datasvc.loaders.images.image_decoder import ImagePlan
from datasvc.loaders.profiling.tuning import LoaderSetting
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.loaders.video.clip_decoder import ClipDecoder, ClipSettings, VideoBatch
from datasvc.loaders.video.clips import ClipConfig, Short
from datasvc.order import OrderConfig, Shuffle, Tail
from datasvc.shards import Split
from datasvc.shards.format.schema import LABEL, VIDEO, VIDEO_FRAMES, VIDEO_HEIGHT, VIDEO_WIDTH

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_HAS_TORCH: Final = importlib.util.find_spec("torch") is not None


class VideoLoader(MediaLoader[VideoBatch[Any]]):
    """Batches of clips of a split's videos: `for clips, labels in loader` runs to the end of the epoch.

    Order, state, ranks, cache and tail work as in `ImageLoader`. A sample is one clip of one video. In training, its
    first frame, its window and its flip are drawn from (seed, epoch, position), once for all its frames; otherwise it
    is the centre of the video, with a centre crop. FFmpeg decodes on the CPU, from the key frame before the clip on.
    Batches are on the CPU, and equal to the last bit at any number of ranks and threads.

    Args:
        split: a split of a data-set version that has videos, or a mixture of several splits.
        batch_size, training, cache, seed, shuffle, order, ranks, tail, prefetch, ledger, masked: see `Loader`.
        frames: frames of a clip.
        stride: distance of two frames of a clip, in frames of the video.
        short: a video that is shorter than a clip has its last frame "repeat"ed, or is a "bad" sample.
        size: side of the output in pixels.
        pixels: format of the frames, or its dtype alone, such as "uint8"; default: float32, normalised, NCHW. It
            cannot be bfloat16. Torch scales the frames where it is installed, for `numpy()` too; otherwise Pillow,
            whose pixels differ by up to one level of 255 in training.
        augment: windows, flips and colours, without a transform.
        columns: further columns for `batch.columns`, see `ImageLoader`.
        on_bad: treatment of samples that do not decode: "raise" an error, or "mask": zeros, False in the mask, and
            the sample's name in `batch.bad`.
        num_threads: decoding threads; None: the processors of this process, divided by the ranks of the node.

    Raises:
        ConfigError: an argument is out of range; the split has no videos; a batch is larger than the epoch with
            `tail="drop"`.
        MissingPackageError: PyAV is not installed.
        CacheFullError: the cache's budget cannot hold the shards that the order needs at once.

    Attributes:
        num_bad: samples handed over so far that did not decode.
    """

    def __init__(
        self,
        split: Split | Mixture,
        *,
        batch_size: int,
        training: bool,
        frames: int = 8,
        stride: int = 2,
        short: Short = "repeat",
        size: int = 224,
        pixels: PixelFormat | Output = "float32",
        augment: AugmentConfig | None = None,
        columns: Sequence[str] = (),
        on_bad: OnBad = "raise",
        num_threads: int | None = None,
        cache: Cache | str | Path | None = None,
        seed: int | None = None,
        shuffle: Shuffle | Literal["auto"] = "auto",
        order: OrderConfig | None = None,
        ranks: DataRanks | DeviceMesh | None = None,
        tail: Tail | None = None,
        prefetch: int = 2,
        ledger: Path | str | None = None,
        masked: Masked | None = None,
    ) -> None:
        check_samples(split)
        check_sizes(size=size, num_threads=num_threads)
        clip = ClipConfig(frames, stride, short)
        pixels = PixelFormat(pixels) if isinstance(pixels, str) else pixels
        augment = augment or AugmentConfig()
        if pixels.output == "bfloat16":
            raise ConfigError("videos have no output 'bfloat16'; give 'uint8' or 'float16', and convert the clips")
        check_on_bad(on_bad)
        if augment.transform is not None:
            raise ConfigError(
                "the AugmentConfig has a transform, which would change each frame of a clip in another way: apply it "
                "to the clips of a batch"
            )
        if augment.mosaic:
            raise ConfigError("the AugmentConfig has a mosaic, which is for images with objects: leave it out")
        check_media_column(split, VIDEO, VIDEO_FRAMES, "videos")
        with explain_missing("VideoLoader"):
            import av  # noqa: F401 - threads import it

        numbers, lists = divide_columns(split, columns)
        labels = [LABEL] if holds_labels(split, columns) else []
        self._num_processors = count_rank_processors()
        self._num_threads = num_threads or self._num_processors
        super().__init__(
            split,
            blob=VIDEO,
            columns=tuple(dict.fromkeys([VIDEO_WIDTH, VIDEO_HEIGHT, VIDEO_FRAMES, *labels, *numbers])),
            batch_size=batch_size,
            training=training,
            cache=cache,
            seed=seed,
            shuffle=shuffle,
            order=order,
            ranks=ranks,
            tail=tail,
            prefetch=prefetch,
            ledger=ledger,
            masked=masked,
        )
        self._decoding = ClipSettings(
            clip=clip,
            plan=ImagePlan(training, size, self.order.seed, augment),
            pixels=pixels,
            resizer="torch" if _HAS_TORCH else "numpy",
            batch_size=batch_size,
            num_threads=self._num_threads,
            prefetch=max(1, prefetch),
            on_bad=on_bad,
            numbers=numbers,
            lists=lists,
            is_mixture=isinstance(split, Mixture),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """See `Loader.settings`."""
        decoding = self._decoding
        return {
            "kind": "video",
            **dataclasses.asdict(decoding.clip),
            "size": decoding.plan.side,
            "pixels": changed_fields(decoding.pixels),
            "augment": changed_fields(decoding.plan.augment),
            "columns": [*decoding.numbers, *decoding.lists],
        }

    @property
    def _batch_bytes(self) -> int:
        return math.prod(self._decoding.shape) * self._decoding.pixels.dtype.itemsize

    def _configure(self, setting: LoaderSetting) -> None:
        super()._configure(setting)
        threads, prefetch = setting.num_threads, max(1, setting.prefetch)
        self._decoding = dataclasses.replace(self._decoding, num_threads=threads, prefetch=prefetch)

    def _make_decoder(self) -> BatchDecoder[VideoBatch[Any]]:
        return ClipDecoder(self._decoding, describe=self._batches.describe, profiler=self.profiler)
