"""The DALI graph: decode a window of each image, scale it, flip it, normalise it. For GPUs; it runs on the CPU too.

Batches are fed by hand, one per run, so that epochs, prefetch and resume are ours: DALI keeps no position. Inputs are
not copied; whoever feeds a batch keeps it alive until its output was taken. Outputs own their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from datasvc.errors import ConfigError
from loaders.augment import Windows
from loaders.decode.backend import DecodeConfig
from loaders.decode.pixels import PixelFormat

if TYPE_CHECKING:
    import torch

    from datasvc.shards.mapped_file import Bytes


def decoder_arguments(config: DecodeConfig) -> dict[str, Any]:
    """Return how the decoder is called. Without a GPU no `mixed` operator may be in a graph."""
    if config.device_id is None:
        return {"device": "cpu"}
    hints = {"preallocate_width_hint": config.max_width, "preallocate_height_hint": config.max_height}
    return {"device": "mixed"} | {name: value for name, value in hints.items() if value}


def output_arguments(pixels: PixelFormat) -> dict[str, Any]:
    """Return how pixels are normalised; DALI has no bfloat16, which is made of its floats."""
    from nvidia.dali import types

    if pixels.output == "uint8":
        normalised: dict[str, Any] = {"dtype": types.UINT8, "mean": [0.0] * 3, "std": [1.0] * 3}
    else:
        normalised = {
            "dtype": types.FLOAT16 if pixels.output == "float16" else types.FLOAT,
            "mean": [255 * value for value in pixels.mean],
            "std": [255 * value for value in pixels.std],
        }
    return normalised | {"output_layout": "CHW" if pixels.layout == "NCHW" else "HWC"}


class DaliPipeline:
    """A built DALI pipeline with `prefetch` runs under way.

    Args:
        config: what it is built from.

    Raises:
        ConfigError: DALI is not installed.
    """

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config
        self._pipe = _build(config)
        self._copies = None if config.device_id is None else _make_stream(config.device_id)
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
        """Return the oldest run's output, as the format says, waiting for it; the caller owns it.

        Raises:
            RuntimeError: an image of the run does not decode; the pipeline cannot be used again.
        """
        import torch

        (output,) = self._pipe.share_outputs()
        # The default executor counts references, so the memory is not used again while the tensor lives.
        shared: torch.Tensor = torch.utils.dlpack.from_dlpack(output.as_tensor())
        self._pipe.release_outputs()
        dtype = torch.bfloat16 if self.config.pixels.output == "bfloat16" else shared.dtype
        if self._copies is None:
            return shared.to(dtype)
        # A batch may be dropped while kernels that read it still wait on the caller's stream. torch's allocator knows
        # of them, DALI does not. On a stream of its own the copy does not wait for these kernels.
        with torch.cuda.stream(self._copies):
            owned = shared.to(dtype, copy=True)
        self._copies.synchronize()
        owned.record_stream(torch.cuda.current_stream(owned.device))
        return owned

    def close(self) -> None:
        """Wait for the runs under way, which read what was fed; nothing can be fed or taken any more."""
        self._pipe = None  # its destructor waits


def _make_stream(device_id: int) -> torch.cuda.Stream:
    from torch import cuda

    make: Any = cuda.Stream  # which has no types
    stream: torch.cuda.Stream = make(device_id)
    return stream


def _build(config: DecodeConfig) -> Any:
    try:
        from nvidia.dali import Pipeline, fn, types
    except ImportError as error:
        raise ConfigError(
            f"a GPU decodes with DALI, which cannot be imported ({error}); install nvidia-dali-cuda130, or use "
            "decode='cpu'"
        ) from error
    pipe = Pipeline(
        batch_size=config.batch_size,
        num_threads=config.num_threads,
        device_id=config.device_id,
        prefetch_queue_depth=config.prefetch,
    )
    size = config.pixels.size
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
        # DALI's own kernel: a fifth of a level off Pillow's in the mean; torch has none for bytes on a GPU.
        scaled = fn.resize(decoded, resize_x=size, resize_y=size, interp_type=types.INTERP_LINEAR, antialias=True)
        pipe.set_outputs(fn.crop_mirror_normalize(scaled, mirror=flips, **output_arguments(config.pixels)))
    pipe.build()
    return pipe
