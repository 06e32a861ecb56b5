"""`ImageLoader`: batches of decoded images in the access order; a resumed run serves each sample exactly once."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy.typing as npt

from datasvc.cache import Cache
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.errors import ConfigError
from datasvc.ledger.masked import Masked
from datasvc.loaders.augment.augment import AugmentConfig, parse_evaluation
from datasvc.loaders.augment.fit import Fit, parse_size
from datasvc.loaders.augment.mosaic import check_groups
from datasvc.loaders.augment.objects import ObjectConfig
from datasvc.loaders.core.arguments import check_sizes
from datasvc.loaders.core.batches import BatchDecoder, SampleBatches
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.core.mixture import Mixture, check_samples, divide_columns, holds_labels, largest
from datasvc.loaders.core.pinned import warn_without_gpu
from datasvc.loaders.core.state import DECODE, DECODE_SCALE, EVALUATION, changed_fields
from datasvc.loaders.decode.backend import Backend, BackendConfig, Decode, DecodeConfig, Framework
from datasvc.loaders.decode.choice.choice import DecodeChoice, count_rank_processors, parse_backend
from datasvc.loaders.decode.choice.choose import ON_GPU, find_missing, make_backend, plan_candidates
from datasvc.loaders.decode.choice.trial import TrialBatch
from datasvc.loaders.decode.gpu.device_stream import current_gpu
from datasvc.loaders.decode.masks import MaskDecoder
from datasvc.loaders.decode.pixels import Output, PixelFormat
from datasvc.loaders.decode.reduced import DecodeScale, may_reduce, parse_decode_scale
from datasvc.loaders.decode_sharing import DecodeGroup, Sharing
from datasvc.loaders.images.annotations import AnnotationColumns
from datasvc.loaders.images.image_batch import BatchDisplay, ImageBatch
from datasvc.loaders.images.image_decoder import ImageDecoder, ImagePlan, image_sizes
from datasvc.loaders.profiling.bottleneck import Resources
from datasvc.loaders.profiling.tuning import LoaderSetting
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.order import OrderConfig, Shuffle, Tail
from datasvc.shards import Split
from datasvc.shards.format.schema import HEIGHT, IMAGE, LABEL, WIDTH

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

_LOG = logging.getLogger(__name__)
# To choose a backend, each is measured on a few batches, of limited size: they are copied to another process.
_TRIAL_BATCHES: Final = 4
_TRIAL_BYTES: Final = 256 << 20


class ImageLoader(Loader["ImageBatch[torch.Tensor]"]):
    """Batches of the decoded images of a split. `for images, labels in loader` runs to the end of the epoch.

    A new `for` continues after the last batch that was handed over, in the same epoch or at the start of the next
    one. `state_dict()` counts the batches that were handed over, not those that are prefetched. A state can be loaded
    at any world size and batch size; the run then continues with exactly the samples not yet served. Every rank of a
    job creates a loader with the same arguments except `ranks`.

    Args:
        split: a split of a data-set version that has images, or a mixture of several splits.
        batch_size, training, cache, seed, shuffle, order, ranks, tail, ledger, masked: see `Loader`. `training=True`
            also draws random windows (crops) and flips; False crops the centre, see `AugmentConfig.evaluation`.
        size: side of the output in pixels; `Fit`: images keep their own shape, and a batch has that of its largest;
            None: `Fit()`, so that images are not scaled either.
        pixels: format of the output, or its dtype alone, such as "uint8"; default: float32, normalised, NCHW.
        augment: windows, flips and colours of the images, and a transform of your own.
        images: columns of images, such as ("left", "right"). All images of a sample have the window and the flip of
            the first one, and its colours; images of other sizes show the same part of the scene, edge to edge. The
            first one gives `batch.images`. Without the name "image", its size is not stored, and is read from its
            header.
        masks: columns of segmentation masks, for `batch.masks`.
        boxes: column of boxes, for `batch.objects`: per sample a list of left, top, right and bottom in pixels of the
            first image, upright.
        keypoints: column of keypoints, for `batch.objects`: per object a list of x, y and visibility, flat or nested.
        polygons: column of polygons, for the masks of `batch.objects`: per object a list of lists of x and y in turn.
            Objects without polygons have the mask of the data set's `mask_runs`, the run lengths of COCO; without
            these too, they are left out.
        objects: which boxes are kept, what else objects have, and how keypoints flip.
        columns: further columns for `batch.columns`. Numbers and booleans become tensors; null is an error there.
            Everything else becomes lists of Python values, with None for null.
        device: device of all tensors of a batch: "cpu", "cuda:1", or "cuda" for torch's current device at the
            creation of the loader.
        decode: how images are decoded, or the name of the backend alone, such as "cpu".
        decode_group: a `DecodeGroup`, or its name alone. Jobs on this node with otherwise equal arguments share
            batches: one of them decodes each batch for all.

    Raises:
        ConfigError: an argument is out of range; the split has no images; a batch is larger than the epoch with
            `tail="drop"`; the decoder is not installed.
        CacheFullError: the cache's budget cannot hold the shards that the order needs at once.

    Attributes:
        num_bad: samples handed over so far that did not decode.
        num_bad_boxes: boxes dropped so far because they lie outside of their image or have no area.
        box_classes: names of the classes of `box_labels`, by label.
        sharing: membership in the decode group, with its counters; None without a group.
    """

    def __init__(
        self,
        split: Split | Mixture,
        *,
        batch_size: int,
        training: bool,
        cache: Cache | str | Path | None = None,
        size: int | Fit | None = 224,
        seed: int | None = None,
        shuffle: Shuffle | Literal["auto"] = "auto",
        order: OrderConfig | None = None,
        ranks: DataRanks | DeviceMesh | None = None,
        tail: Tail | None = None,
        pixels: PixelFormat | Output = "float32",
        augment: AugmentConfig | None = None,
        images: Sequence[str] = (IMAGE,),
        masks: Sequence[str] = (),
        boxes: str | None = None,
        keypoints: str | None = None,
        polygons: str | None = None,
        objects: ObjectConfig | None = None,
        columns: Sequence[str] = (),
        device: str | torch.device = "cpu",
        decode: DecodeConfig | Decode = "auto",
        ledger: Path | str | None = None,
        decode_group: DecodeGroup | str | None = None,
        masked: Masked | None = None,
    ) -> None:
        check_samples(split)
        size = parse_size(size)
        check_sizes(size=None if isinstance(size, Fit) else size)
        pixels = PixelFormat(pixels) if isinstance(pixels, str) else pixels
        decode = DecodeConfig(decode) if isinstance(decode, str) else decode
        group = DecodeGroup(decode_group) if isinstance(decode_group, str) else decode_group
        augment = augment or AugmentConfig()
        self._annotations = AnnotationColumns.of(
            split, images, masks, boxes, keypoints, polygons, objects, may_flip=training and augment.flip > 0
        )
        self.box_classes = self._annotations.classes
        sizes = [WIDTH, HEIGHT] if self._annotations.has_stored_sizes else []
        self._number_columns, self._list_columns = divide_columns(split, columns)
        labels = [LABEL] if holds_labels(split, columns) else []
        super().__init__(
            split,
            blob=self._annotations.images[0],
            columns=tuple(dict.fromkeys([*sizes, *labels, *self._number_columns])),
            batch_size=batch_size,
            training=training,
            cache=cache,
            seed=seed,
            shuffle=shuffle,
            order=order,
            ranks=ranks,
            tail=tail,
            prefetch=decode.prefetch,
            ledger=ledger,
            masked=masked,
        )
        self._plan = ImagePlan(training, size, self.order.seed, augment)
        if training and augment.mosaic:
            if not (self._annotations.has_objects or self._annotations.has_masks):
                raise ConfigError("AugmentConfig(mosaic=) is given without boxes=, keypoints=, polygons= or masks=")
            lanes, world_size = self.order.lanes, self.ranks.world_size
            check_groups(batch_size=batch_size, world_size=world_size, lanes=lanes, tail=self.tail)
        self._config = self._configure_backend(pixels, decode, _device_id(str(device)))
        self._requested_scale = decode.decode_scale
        self._choice = self._plan_choice(decode.backend)
        self._on_bad = decode.on_bad
        # The kind of batches that the decoder makes now: their framework, and whether they are in page-locked memory.
        self._framework: Framework = "torch"
        self._is_pinned = False
        self.num_bad = self.num_bad_boxes = 0
        if group is not None and self._config.device_id is not None:
            raise ConfigError(
                f"device is '{device}'; a decode group decodes on the CPU only: give device='cpu', or leave out "
                "decode_group"
            )
        self._group = group
        self._shared_by = {"augment": augment, "columns": tuple(columns), "decode": decode, **self._annotated}
        self.sharing = self._join_group()

    def _configure_backend(self, pixels: PixelFormat, decode: DecodeConfig, device_id: int | None) -> BackendConfig:
        width, height = largest(self.split, "max_width"), largest(self.split, "max_height")
        # The widths and heights of other columns than "image" are not known. Pixels of `has_boxes` are torchvision's.
        is_large = self._annotations.images != (IMAGE,) or may_reduce(width, height, self._plan.side)
        fit, batch_size = self._plan.size, self.batch_size * len(self._annotations.images)
        self._can_reduce = is_large and not self._plan.has_boxes and not isinstance(fit, Fit)
        frame = None
        if isinstance(fit, Fit):
            if device_id is not None or decode.servers:
                raise ConfigError(
                    f"size is {fit}, whose images are decoded on this CPU: leave out decode servers, give "
                    "device='cpu', and move the batches of pin() by to('cuda', non_blocking=True)"
                )
            known = (width, height) if self._annotations.has_stored_sizes else (0, 0)
            frame = fit.largest_frame(*known, batch_size * 3 * pixels.dtype.itemsize)
        return BackendConfig(
            batch_size=batch_size,
            size=self._plan.side,
            frame=frame,
            pixels=pixels,
            num_threads=decode.num_threads or count_rank_processors(),
            prefetch=max(1, decode.prefetch),  # without prefetch, one batch is in progress during the call
            device_id=device_id,
            max_width=width,
            max_height=height,
            changes_colours=self._plan.changes_colours,
            has_boxes=self._plan.has_boxes,
            servers=decode.servers,
            decode_scale=decode.decode_scale if self._can_reduce else "full",
        )

    def _plan_choice(self, backend: Decode) -> DecodeChoice:
        """Return the choice among the backends that can decode here; warn if only the slow one can."""
        missing = find_missing()
        candidates = plan_candidates(
            backend,
            on_gpu=self._config.device_id is not None,
            has_transform=self._plan.augment.transform is not None,
            missing=missing,
            has_other_images=self._annotations.images != (IMAGE,),
            has_servers=bool(self._config.servers),
        )
        if backend == "auto" and candidates[0] == "pillow":
            _LOG.warning("images are decoded by Pillow, about half as fast as decode='cpu': %s", missing["cpu"])
        return DecodeChoice(backend, candidates, config=self._config, ranks=self.ranks)

    def _join_group(self) -> Sharing[ImageBatch[torch.Tensor]] | None:
        """Return the membership in the decode group of the jobs with equal batches; None without a group."""
        if self._group is None:
            return None
        arguments = {
            "batch_size": self.batch_size,
            "training": self.training,
            "size": self._plan.size,
            "ranks": self.ranks,
            "tail": self.tail,
            "pixels": self._config.pixels,
            **self._shared_by,
        }
        return Sharing(self, self._group, arguments)

    def __iter__(self) -> Iterator[ImageBatch[torch.Tensor]]:
        """Yield the remaining batches of the epoch; see `Loader`."""
        return self._serve("torch")

    def numpy(self) -> Iterator[ImageBatch[npt.NDArray[Any]]]:
        """Yield the remaining batches of the epoch as NumPy arrays, without importing torch.

        Batches and state are those of `for batch in loader`. In training, pixels differ by up to one level of 255,
        because Pillow scales the images here instead of torch.

        Raises:
            ConfigError: `device` is a GPU, or the output dtype is "bfloat16", which NumPy does not have.
            BadSampleError, CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `Loader`.
        """
        if self._config.device_id is not None or self._config.pixels.output == "bfloat16":
            raise ConfigError(
                "numpy() needs batches in CPU memory and a dtype of NumPy: create the loader with device='cpu' and "
                "an output other than 'bfloat16'"
            )
        return self._serve("numpy")

    def pin(self) -> Iterator[ImageBatch[torch.Tensor]]:
        """Yield the remaining batches of the epoch in page-locked memory, for `to(device, non_blocking=True)`.

        Batches and state are those of `for batch in loader`. The memory of a batch is reused only after its last
        reference is gone and all copies from it are done. Without a GPU, it is ordinary memory, with a warning.

        Raises:
            ConfigError: `device` is a GPU, so batches are on the GPU already.
            BadSampleError, CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `Loader`.
        """
        if self._config.device_id is not None:
            raise ConfigError(
                f"pin() is for batches on the CPU, and device is 'cuda:{self._config.device_id}'; iterate over the "
                "loader itself"
            )
        warn_without_gpu()
        return self._serve("torch", is_pinned=True)

    def _serve(self, framework: Framework, *, is_pinned: bool = False) -> Iterator[ImageBatch[Any]]:
        """Yield the remaining batches of the epoch, for one framework, and in page-locked memory if `is_pinned`."""
        batches = super().__iter__()
        while True:
            # Checked before each batch, because the caller may use several iterators in turn. Prefetched batches of
            # another kind are dropped, and decoded again as this kind.
            if (self._framework, self._is_pinned) != (framework, is_pinned):
                with self._thread_guard:
                    self._discard()
                    self._framework, self._is_pinned = framework, is_pinned
            batch = next(batches, None)
            if batch is None:
                return
            self.num_bad += len(batch.bad)
            self.num_bad_boxes += batch.num_bad_boxes
            yield batch

    def close(self) -> None:
        """Close the loader as `Loader.close` does, and leave the decode group."""
        super().close()
        if self.sharing is not None:
            self.sharing.close()

    def _make_decoder(self) -> BatchDecoder[ImageBatch[Any]]:
        # The batches of a decode group are in shared memory, which is not page-locked; `_deliver` copies them.
        config = dataclasses.replace(self._config, is_pinned=self._is_pinned and self.sharing is None)
        # All ranks choose the backend together, and find each other by the identity, so it must be equal on all of
        # them. It is made from the state of `super()`, which lacks the backend: that may still differ.
        identity = super().state_dict() | {"batch_size": self.batch_size}
        backend = self._choice.settle(self._draw_trial, loader_identity=identity)
        decoder = ImageDecoder(
            make_backend(config, backend, framework=self._framework, profiler=self.profiler),
            framework=self._framework,
            columns=self._annotations,
            masks=MaskDecoder(config.num_threads) if self._annotations.has_masks else None,
            plan=self._plan,
            describe=self._batches.describe,
            numbers=self._number_columns,
            lists=self._list_columns,
            on_bad=self._on_bad,
            is_mixture=isinstance(self.split, Mixture),
            device=None if self._config.device_id is None else f"cuda:{self._config.device_id}",
            display=BatchDisplay(config.pixels, self.split.classes),
            profiler=self.profiler,
        )
        if self.sharing is None:
            return decoder
        scale = self._config.decode_scale
        return self.sharing.make_decoder(decoder, batches=self._framework, backend=self.decode, decode_scale=scale)

    @property
    def decode(self) -> Backend:
        """The backend: "cpu", "gpu-window", "gpu-whole" or "pillow". With a GPU it may change at the first batch."""
        return self._choice.backend

    @property
    def settings(self) -> dict[str, Any]:
        """See `Loader.settings`; of a transform, only the name."""
        augment = dataclasses.replace(self._plan.augment, transform=None)
        settings = {
            "kind": "images",
            "size": changed_fields(self._plan.size) if isinstance(self._plan.size, Fit) else self._plan.size,
            "pixels": changed_fields(self._config.pixels),
            "augment": changed_fields(augment),
            "columns": [*self._number_columns, *self._list_columns],
            "decode": self._choice.state,
            **self._annotated,
        }
        transform = self._plan.augment.transform
        if transform is not None:
            kind = transform if hasattr(transform, "__qualname__") else type(transform)
            settings["transform"] = f"{kind.__module__}:{kind.__qualname__}"
        return settings

    @property
    def _annotated(self) -> dict[str, Any]:
        """The arguments from `images` to `objects` that differ from their defaults, as JSON values."""
        columns = self._annotations
        given: dict[str, Any] = {} if columns.images == (IMAGE,) else {"images": list(columns.images)}
        given |= {"masks": list(columns.masks)} if columns.masks else {}
        if columns.has_objects:
            given |= {"boxes": columns.boxes, "keypoints": columns.keypoints}
            given |= {"polygons": columns.polygons} if columns.polygons else {}
            given["objects"] = changed_fields(columns.objects)
        return given

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `Loader`, with settings that pixels depend on: backend, decode scale and evaluation."""
        settings: dict[str, Any] = {DECODE: self._choice.state, EVALUATION: self._plan.evaluation}
        # States of earlier releases have no "full", which is the scale of a GPU, whatever its settings are.
        if self._config.decode_scale != "full" and self._choice.state not in ON_GPU:
            settings[DECODE_SCALE] = self._config.decode_scale
        return super().state_dict() | {name: value for name, value in settings.items() if value is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as in `Loader`, with the backend and the decode scale of the state if `decode` allows them.

        Otherwise it logs a warning; also if the state is of another kind of evaluation.
        """
        # Parsed before anything changes: after an error for an unknown backend, the loader must be as before.
        decode = parse_backend(state[DECODE]) if DECODE in state else None
        # States of older releases lack the field; their loaders had the evaluation "window".
        evaluation = parse_evaluation(state.get(EVALUATION, "window"))
        scale = parse_decode_scale(state.get(DECODE_SCALE, "full"))
        super().load_state_dict(state)
        self._choice.restore(decode)
        self._restore_scale(scale)
        if self._plan.evaluation not in {None, evaluation}:
            _LOG.warning(
                "the state was saved by a loader with evaluation=%r; this one has evaluation=%r, so pixels and "
                "accuracies differ: give AugmentConfig(evaluation=%r) to continue that evaluation",
                evaluation,
                self._plan.evaluation,
                evaluation,
            )

    def _restore_scale(self, scale: DecodeScale) -> None:
        if not self._can_reduce:
            return
        if scale == "full" or self._requested_scale == "auto":
            self._config = dataclasses.replace(self._config, decode_scale=scale)
            return
        _LOG.warning(
            "the state was saved by a loader with decode_scale=%r, and this one decodes at full size, so pixels of "
            "large photos differ by up to one level of 255 in the mean: to continue with equal ones, give "
            "DecodeConfig(decode_scale=%r)",
            scale,
            scale,
        )

    def _change_order(
        self, order: OrderConfig, cached_stores: list[PrefetchingShardStore], batches: SampleBatches
    ) -> None:
        super()._change_order(order, cached_stores, batches)
        self._share_again()

    def _change_masks(self, masked: Masked) -> None:
        super()._change_masks(masked)
        self._share_again()

    def _share_again(self) -> None:
        """Join the decode group with the settings of now: jobs with another order or other masks share no batches."""
        if self.sharing is not None:
            self.sharing.close()
            self.sharing = self._join_group()

    def _deliver(self, decoded: ImageBatch[Any]) -> ImageBatch[Any]:
        # If the images were decoded to page-locked memory, this copies only the other tensors.
        return decoded.pin_memory() if self._is_pinned else decoded

    def _bad_samples(self, finished: ImageBatch[Any]) -> Collection[int]:
        return finished.bad

    def _resources(self) -> Resources:
        return dataclasses.replace(
            super()._resources(),
            unit="images",
            decoder=self.decode,
            num_threads=self._config.num_threads,
            num_processors=count_rank_processors(),
            is_shared=self.sharing is not None,
            batch_bytes=math.prod(self._config.shape) * self._config.pixels.dtype.itemsize,
            device_id=self._config.device_id,
        )

    def _configure(self, setting: LoaderSetting) -> None:
        threads, prefetch = setting.num_threads, max(1, setting.prefetch)
        self._config = dataclasses.replace(self._config, num_threads=threads, prefetch=prefetch)

    def _draw_trial(self) -> list[TrialBatch]:
        """Return the next batches, with which the backends are measured. The run's cursor does not move."""
        drawn: list[TrialBatch] = []
        size_bytes = 0
        try:
            for batch in islice(self._batches.stream(self._cursor), _TRIAL_BATCHES):
                if batch is None:  # of rounds that are not known yet
                    break
                if batch.blobs:  # the last batch of a rank may be empty
                    windows = self._plan.windows(batch, *image_sizes(batch, self._annotations))
                    drawn.append(TrialBatch([blob.tobytes() for blob in batch.blobs], windows))
                    size_bytes += sum(map(len, drawn[-1].images))
                # Release its shards: a cache that cannot hold those of all these batches would wait forever.
                self._batches.retire(batch)
                if size_bytes > _TRIAL_BYTES:
                    break
        finally:
            self._batches.close()
        return drawn


def _device_id(device: str) -> int | None:
    """Return the number of a GPU, or None for the CPU. Raises ConfigError: `device` is neither."""
    kind, _, number = device.partition(":")
    if kind == "cpu" and number in {"", "0"}:
        return None
    if kind == "cuda" and number.isdecimal():
        return int(number)
    if device == "cuda":
        return current_gpu()
    raise ConfigError(f"device is {device!r}; expected 'cpu', 'cuda' or 'cuda:N'")
