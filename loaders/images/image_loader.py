"""ImageLoader: decoded image batches in the access order, exact to the sample over any restart."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import numpy.typing as npt

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.loaders.augment.augment import IMAGENET_MEAN, IMAGENET_STD, AugmentConfig
from datasvc.loaders.augment.transform import Transform
from datasvc.loaders.core.data_ranks import choose_data_ranks
from datasvc.loaders.core.loader import BatchDecoder, Loader, check_sizes, choose_shuffle, choose_tail
from datasvc.loaders.core.mixture import Mixture, check_column, columns_of, largest
from datasvc.loaders.core.other_columns import sort_columns
from datasvc.loaders.core.pinned import PinnedDecoder, warn_without_gpu
from datasvc.loaders.core.state import DECODE
from datasvc.loaders.decode.backend import Backend, DecodeConfig, Framework
from datasvc.loaders.decode.choice.choice import DecodeChoice, parse_backend
from datasvc.loaders.decode.choice.choose import Decode, find_missing, plan_candidates
from datasvc.loaders.decode.choice.make import make_backend
from datasvc.loaders.decode.choice.rank_processors import count_rank_processors
from datasvc.loaders.decode.choice.trial import TrialBatch
from datasvc.loaders.decode.gpu.device_stream import current_gpu
from datasvc.loaders.decode.pixels import Layout, Output, PixelFormat
from datasvc.loaders.decode_sharing import DecodeGroup, Sharing, parse_decode_group
from datasvc.loaders.images.image_batch import ImageBatch
from datasvc.loaders.images.image_decoder import ImageDecoder, OnBad
from datasvc.loaders.images.image_plan import ImagePlan
from datasvc.loaders.profiling.bottleneck import Resources
from datasvc.order import OrderConfig, Shuffle, Tail
from datasvc.shards import Split
from datasvc.shards.format.schema import HEIGHT, IMAGE, LABEL, WIDTH

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

_LOG = logging.getLogger(__name__)
# What backends are tried on: distinct batches, and no more bytes of them than another process gets quickly.
_TRIAL_BATCHES: Final = 4
_TRIAL_BYTES: Final = 256 << 20


class ImageLoader(Loader["ImageBatch[torch.Tensor]"]):
    """Batches of a split's images, decoded; `for images, labels in loader` runs to the end of the epoch.

    A new `for` goes on where the last one stopped: the rest of the epoch, or the next epoch. `state_dict()` says
    what was handed over, never what was prefetched; loaded at any world size or batch size it continues with
    exactly the samples not yet served. Every rank of a job makes one with the same arguments but `rank`.

    Args:
        split: of a data-set version, with images; or a mixture of several.
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
        output: "float32", "float16" or "bfloat16", normalised; or "uint8", as decoded.
        layout: "NCHW" or "NHWC".
        columns: others to deliver beside, `batch.columns[name]`: numbers and booleans as tensors, which no sample may
            lack, everything else as a list of Python values, None for null.
        transform: training and evaluation: called for each image from any thread with `uint8[size, size, 3]`, cropped
            and mirrored, and a random generator of (seed, epoch, position); it returns such pixels.
        on_bad: "raise" where a sample does not decode, or "mask": its image is zeros, its mask False, its name in
            `batch.bad`.
        device: where images, labels, mask and numbers shall lie: "cpu", "cuda:1", or "cuda", which is torch's current
            device when the loader is made.
        decode: "cpu" decodes just the window of each image, in threads; "pillow" is slower and needs nothing else
            installed; "gpu-window" lets DALI decode the window on `device`, "gpu-whole" the image, of which it then
            cuts the window; "gpu" is the faster of these two that works. "auto" is the CPU, or without that decoder
            Pillow; for a GPU the fastest of all that work. What is to be chosen is tried in another process, on the
            first batches, on data rank 0 for all ranks of a torch.distributed process group; it is logged, and part
            of the state. The windows are the same, and so are the pixels, to a level or two of 255 between "cpu" and
            "pillow", to some eight on a GPU.
        num_threads: decoding threads in all; default the processors this process may use, divided among the ranks
            that the launcher started on this node. Where it binds each to its own processors, give their number.
        prefetch: batches under way while the caller trains; 0: each is decoded in the call for it.
        ledger: folder that records what was handed over, see `Loader`.
        decode_group: name, or `DecodeGroup`, of jobs on this node with otherwise equal arguments: one process decodes
            each batch once for all of them.

    Raises:
        ConfigError: an argument is out of range; no images; a batch larger than the epoch with "drop"; what is to
            decode is not installed.
        CacheFullError: the cache's budget is below the window that the order needs; says the number.

    Attributes:
        num_bad: samples handed over so far that did not decode.
        sharing: this loader's part in its share, with what it counted; None without one.
    """

    def __init__(
        self,
        split: Split | Mixture,
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
        output: Output = "float32",
        layout: Layout = "NCHW",
        columns: Sequence[str] = (),
        transform: Transform | None = None,
        on_bad: OnBad = "raise",
        device: str = "cpu",
        decode: Decode = "auto",
        num_threads: int | None = None,
        prefetch: int = 2,
        ledger: Path | str | None = None,
        decode_group: DecodeGroup | str | None = None,
    ) -> None:
        arguments = dict(locals())
        check_sizes(size=size, num_threads=num_threads)
        self._plan = ImagePlan(training, size, resize, seed, augment or AugmentConfig(), transform)
        if on_bad not in get_args(OnBad):
            raise ConfigError(f"on_bad is {on_bad!r}; expected one of {', '.join(get_args(OnBad))}")
        check_column(split, IMAGE, "images")
        stored = columns_of(split)
        self._numbers, self._lists = sort_columns(split, columns)
        super().__init__(
            split,
            blob=IMAGE,
            columns=tuple(dict.fromkeys([WIDTH, HEIGHT, *([LABEL] if LABEL in stored else []), *self._numbers])),
            batch_size=batch_size,
            order=OrderConfig(
                seed=seed, shuffle=choose_shuffle(shuffle, training=training), lanes=lanes, block=block, sticky=sticky
            ),
            tail=choose_tail(tail, training=training),
            ranks=choose_data_ranks(data_rank, data_world_size, mesh, mesh_axis),
            cache=cache,
            prefetch=prefetch,
            ledger=ledger,
        )
        self._config = DecodeConfig(
            batch_size=batch_size,
            pixels=PixelFormat(size, output, layout, mean, std),
            num_threads=count_rank_processors() if num_threads is None else num_threads,
            prefetch=max(1, prefetch),  # in the call there is one
            device_id=_device_id(device),
            max_width=largest(split, "max_width"),
            max_height=largest(split, "max_height"),
            changes_colours=self._plan.changes_colours,
        )
        self._on_bad = on_bad
        self._framework: Framework = "torch"
        self._is_pinned = False
        candidates = plan_candidates(
            decode,
            on_gpu=self._config.device_id is not None,
            has_transform=transform is not None,
            missing=find_missing(),
        )
        self._choice = DecodeChoice(decode, candidates, config=self._config, ranks=self.ranks)
        if decode == "auto" and candidates[0] == "pillow":
            _LOG.warning("images are decoded by Pillow, about half as fast: %s", find_missing()["cpu"])
        self.num_bad = 0
        self.sharing: Sharing[ImageBatch[torch.Tensor]] | None = None
        if decode_group is not None:
            if self._config.device_id is not None:
                raise ConfigError(f"device is {device!r}; jobs share what the CPU decodes: give device='cpu'")
            self.sharing = Sharing(self, parse_decode_group(decode_group), arguments, cache)
            self._source = self.sharing.planned

    def __iter__(self) -> Iterator[ImageBatch[torch.Tensor]]:
        """Yield the rest of the epoch; see `Loader`."""
        return self._serve("torch")

    def numpy(self) -> Iterator[ImageBatch[npt.NDArray[Any]]]:
        """Yield the rest of the epoch as NumPy arrays; torch is not imported.

        It is the same run as that of `for batch in loader`: the same batches, the same state. Pixels differ from
        torch's by a level of 255 at most, as Pillow scales them here.

        Raises:
            ConfigError: `device` is a GPU, or `output` is "bfloat16", which NumPy does not have.
            BadSampleError, CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `Loader`.
        """
        if self._config.device_id is not None or self._config.pixels.output == "bfloat16":
            raise ConfigError("NumPy arrays lie in the memory of the CPU and have no bfloat16; give other arguments")
        return self._serve("numpy")

    def pin(self) -> Iterator[ImageBatch[torch.Tensor]]:
        """Yield the rest of the epoch in page-locked memory, for copies to a GPU with `non_blocking=True`.

        It is the same run as that of `for batch in loader`. A batch is yours until you drop it; copies of it that are
        still under way then end before its memory is used again. Where torch finds no GPU the memory is ordinary, and
        a warning says so.

        Raises:
            ConfigError: `device` is a GPU: batches are there already.
            BadSampleError, CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `Loader`.
        """
        if self._config.device_id is not None:
            raise ConfigError(f"pin() is for batches on the CPU, and device is 'cuda:{self._config.device_id}'")
        warn_without_gpu()
        return self._serve("torch", is_pinned=True)

    def _serve(self, framework: Framework, *, is_pinned: bool = False) -> Iterator[ImageBatch[Any]]:
        batches = super().__iter__()
        while True:
            if (self._framework, self._is_pinned) != (framework, is_pinned):
                with self._alone:
                    self._discard()
                    self._framework, self._is_pinned = framework, is_pinned
            batch = next(batches, None)
            if batch is None:
                return
            self.num_bad += len(batch.bad)
            yield batch

    def close(self) -> None:
        """See `Loader`; leaves the share."""
        super().close()
        if self.sharing is not None:
            self.sharing.close()

    def _make_decoder(self) -> BatchDecoder[ImageBatch[Any]]:
        decoder = self._make_unpinned()
        return PinnedDecoder(decoder) if self._is_pinned else decoder

    def _make_unpinned(self) -> BatchDecoder[ImageBatch[Any]]:
        """Return a decoder that leaves everything but images of its own in ordinary memory."""
        if self.sharing is not None:
            return self.sharing.make_decoder(
                iter if self._framework == "torch" else methodcaller("numpy"), self._framework
            )
        return ImageDecoder(
            make_backend(
                dataclasses.replace(self._config, is_pinned=self._is_pinned),
                # Not its own state, which says what decodes: ranks differ in that before they have agreed.
                self._choice.settle(
                    self._draw_trial, question=super().state_dict() | {"batch_size": self.batch_size}
                ),
                framework=self._framework,
                stopwatch=self.stopwatch,
            ),
            framework=self._framework,
            plan=self._plan,
            describe=self._batches.describe,
            numbers=self._numbers,
            lists=self._lists,
            on_bad=self._on_bad,
            is_mixture=isinstance(self.split, Mixture),
            device=None if self._config.device_id is None else f"cuda:{self._config.device_id}",
            stopwatch=self.stopwatch,
        )

    @property
    def decode(self) -> Backend:
        """What decodes: "cpu", "gpu-window", "gpu-whole" or "pillow". On a GPU the first batch may settle it."""
        return self._choice.backend

    def state_dict(self) -> dict[str, Any]:
        """See `Loader`; it also says what decodes, once that is settled: pixels differ between backends."""
        decode = self._choice.state
        return super().state_dict() | ({} if decode is None else {DECODE: decode})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, decoded as in the run that saved it where `decode` allows that, else with a warning.

        Raises:
            ConfigError, StateMismatchError: see `Loader`.
        """
        decode = parse_backend(state[DECODE]) if DECODE in state else None
        super().load_state_dict(state)
        self._choice.restore(decode)

    def _bad_samples(self, finished: ImageBatch[Any]) -> Collection[int]:
        return finished.bad

    def _means(self) -> Resources:
        return dataclasses.replace(
            super()._means(),
            unit="images",
            decoder=self.decode,
            num_threads=self._config.num_threads,
            num_processors=count_rank_processors(),
            is_shared=self.sharing is not None,
        )

    def _draw_trial(self) -> list[TrialBatch]:
        """Return the next batches for a trial; where the run stands does not change."""
        drawn: list[TrialBatch] = []
        size_bytes = 0
        try:
            for batch in islice(self._batches.stream(self._cursor), _TRIAL_BATCHES):
                if batch.blobs:
                    drawn.append(TrialBatch([blob.tobytes() for blob in batch.blobs], self._plan.windows(batch)))
                    size_bytes += sum(map(len, drawn[-1].images))
                self._batches.retire(batch)  # or a cache without room for so many would wait for ever
                if size_bytes > _TRIAL_BYTES:
                    break
        finally:
            self._batches.close()
        return drawn


def _device_id(device: str) -> int | None:
    kind, _, number = device.partition(":")
    if kind == "cpu" and number in {"", "0"}:
        return None
    if kind == "cuda" and number.isdecimal():
        return int(number)
    if device == "cuda":
        return current_gpu()
    raise ConfigError(f"device is {device!r}; expected 'cpu', 'cuda' or 'cuda:N'")
