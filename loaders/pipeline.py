"""The DALI graph: decode a window of each image, scale it, flip it, normalise it. On the CPU or a GPU.

Batches are fed by hand, one per run, so that epochs, prefetch and resume are ours: DALI keeps no position. Inputs are
not copied; whoever feeds a batch keeps it alive until its output was taken. Outputs own their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datasvc.errors import ConfigError
from loaders.augment import Windows

if TYPE_CHECKING:
    import torch

    from datasvc.shards.reader import Bytes


@dataclass(frozen=True)
class PipelineConfig:
    """What the graph is built from.

    Attributes:
        batch_size: most samples of a run.
        size: side of the output in pixels.
        mean: of each channel, in 0..1.
        std: likewise.
        num_threads: decoding threads.
        prefetch: runs under way at once.
        device_id: GPU that decodes; None decodes on the CPU.
        max_width: widest image of the data set, 0 if unknown: GPU memory is allocated once, for it.
        max_height: likewise.
    """

    batch_size: int
    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    num_threads: int
    prefetch: int
    device_id: int | None = None
    max_width: int = 0
    max_height: int = 0


def decoder_arguments(config: PipelineConfig) -> dict[str, Any]:
    """Return how the decoder is called. Without a GPU no `mixed` operator may be in a graph."""
    if config.device_id is None:
        return {"device": "cpu"}
    hints = {"preallocate_width_hint": config.max_width, "preallocate_height_hint": config.max_height}
    return {"device": "mixed"} | {name: value for name, value in hints.items() if value}


class DecodePipeline:
    """A built DALI pipeline with `prefetch` runs under way.

    Args:
        config: what it is built from.

    Raises:
        ConfigError: DALI is not installed.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config
        self._pipe = _build(config)
        self._num_fed = 0

    def feed(self, images: Sequence[Bytes], windows: Windows) -> None:
        """Start a run. The arrays must stay alive and unchanged until `take` gave its output.

        Args:
            images: encoded images, 1 to `batch_size`.
            windows: one for each.
        """
        self._pipe.feed_input("images", list(images))
        self._pipe.feed_input("starts", windows.starts)
        self._pipe.feed_input("shapes", windows.shapes)
        self._pipe.feed_input("flips", windows.flips)
        # DALI's first call schedules `prefetch` runs at once, so as many inputs must be there by then.
        self._num_fed += 1
        if self._num_fed >= self.config.prefetch:
            self._pipe.schedule_run()

    def take(self) -> torch.Tensor:
        """Return the oldest run's output, `float32[n, 3, size, size]`, waiting for it; the caller owns it.

        Raises:
            RuntimeError: an image of the run does not decode; the pipeline cannot be used again.
        """
        import torch

        (output,) = self._pipe.share_outputs()
        # The default executor counts references, so the memory is not used again while the tensor lives.
        tensor = torch.utils.dlpack.from_dlpack(output.as_tensor())
        self._pipe.release_outputs()
        return tensor


def _build(config: PipelineConfig) -> Any:
    try:
        from nvidia.dali import Pipeline, fn, types
    except ImportError as error:
        raise ConfigError(
            f"images are decoded by DALI, which cannot be imported ({error}); install nvidia-dali-cuda130"
        ) from error
    pipe = Pipeline(
        batch_size=config.batch_size,
        num_threads=config.num_threads,
        device_id=config.device_id,
        prefetch_queue_depth=config.prefetch,
    )
    with pipe:
        images = fn.external_source(name="images", no_copy=True)
        starts = fn.external_source(name="starts", no_copy=True, dtype=types.INT32, ndim=1)
        shapes = fn.external_source(name="shapes", no_copy=True, dtype=types.INT32, ndim=1)
        flips = fn.external_source(name="flips", no_copy=True, dtype=types.INT32, ndim=0)
        decoded = fn.decoders.image_slice(
            images,
            start=starts,
            shape=shapes,
            axes=[0, 1],
            output_type=types.RGB,
            **decoder_arguments(config),
        )
        scaled = fn.resize(
            decoded,
            resize_x=config.size,
            resize_y=config.size,
            interp_type=types.INTERP_LINEAR,
            antialias=True,
        )
        normalised = fn.crop_mirror_normalize(
            scaled,
            mirror=flips,
            dtype=types.FLOAT,
            mean=[255 * value for value in config.mean],
            std=[255 * value for value in config.std],
            output_layout="CHW",
        )
        pipe.set_outputs(normalised)
    pipe.build()
    return pipe
