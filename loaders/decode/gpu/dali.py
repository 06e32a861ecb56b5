"""The DALI graphs: decode a window of each image, scale it, flip it, normalise it. For GPUs; they run on the CPU too.

There are two. "window" decodes just the window (`decoders.image_slice`); "whole" decodes the image and then cuts the
window out (`decoders.image`, `slice`), for GPUs on which nvImageCodec fails on windows. Both give the same pixels.

Batches are fed by hand, one per run, so that epochs, prefetch and resume are ours: DALI keeps no position. Inputs are
not copied; they are kept until the device is done with their run. Outputs own their memory.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

from datasvc.errors import ConfigError, DeviceError
from datasvc.loaders.augment.augment import Windows
from datasvc.loaders.decode.backend import Backend, DecodeConfig
from datasvc.loaders.decode.pixels import PixelFormat

if TYPE_CHECKING:
    import torch

    from datasvc.loaders.decode.gpu.device_stream import StreamEvent
    from datasvc.shards.format.mapped_file import Bytes

    _Inputs = tuple[Sequence[Bytes], Windows]

Graph = Literal["window", "whole"]
_BACKENDS: Final[Mapping[Graph, Backend]] = {"window": "gpu-window", "whole": "gpu-whole"}

# What DALI, nvImageCodec, torch and the driver say of the device. Numbers are those of `nvimgcodecStatus_t`: a failed
# allocation, a wrong architecture. Its internal error (8) is also that of a damaged image, so it is not among them.
_DEVICE_FAILURE: Final = re.compile(
    r"cudaError|CUDA_ERROR|CUDA (?:runtime|driver|error|failure)|CUDA out of|\bnvml\b|illegal memory access"
    r"|device-side assert|out[ -]of[ -]memory|bad_alloc|(?:nvImageCodec|nvjpeg) (?:failure|error):? '?#?[57]\b",
    re.IGNORECASE,
)
_MEMORY: Final = re.compile(r"memory ?allocation|out[ -]of[ -]memory|bad_alloc|failure:? '?#?5\b", re.IGNORECASE)


@contextmanager
def device_errors(backend: Backend) -> Iterator[None]:
    """Raise DeviceError for a RuntimeError or MemoryError that is about the device or its memory, not an image."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        said = str(error)
        is_memory = isinstance(error, MemoryError) or _MEMORY.search(said) is not None
        if not is_memory and not _DEVICE_FAILURE.search(said):
            raise
        smaller = "there is no memory left: use a smaller batch_size or prefetch"
        restart = "the device or its driver failed: start the process again"
        if backend in {"gpu-window", "gpu-whole"}:
            smaller, restart = f"{smaller}, or decode='cpu'", f"{restart}, with decode='cpu' if it fails again"
        raise DeviceError(
            f"a batch of images was made on a GPU, with decode={backend!r}; {smaller if is_memory else restart}; "
            f"the error was: {said}"
        ) from error


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
        graph: which one.

    Raises:
        ConfigError: DALI is not installed.
        DeviceError: the GPU cannot be used, or has too little memory.
    """

    def __init__(self, config: DecodeConfig, graph: Graph = "window") -> None:
        self.config = config
        with device_errors(_BACKENDS[graph]):
            self._pipe = _build(config, graph)
        self._copies = None if config.device_id is None else _make_stream(config.device_id)
        self._fed: deque[_Inputs] = deque()
        self._read: deque[tuple[StreamEvent, _Inputs]] = deque()  # taken, but the device may still work on them

    def feed(self, images: Sequence[Bytes], windows: Windows) -> None:
        """Start a run. The arrays must not change until its output is there; they are kept as long.

        Args:
            images: encoded images, 1 to `batch_size`.
            windows: one for each.
        """
        while self._read and self._read[0][0].query():
            self._read.popleft()
        self._fed.append((images, windows))
        self._pipe.feed_input("images", list(images))
        self._pipe.feed_input("starts", windows.starts)
        self._pipe.feed_input("shapes", windows.shapes)
        self._pipe.feed_input("flips", windows.flips)
        self._pipe.schedule_run()

    def take(self) -> torch.Tensor:
        """Return the oldest run's output, as the format says; the caller owns it.

        On a GPU it is ready in the order of the current stream: the host does not wait for it.

        Raises:
            RuntimeError: an image of the run does not decode, or the device failed; see `device_errors`. The pipeline
                cannot be used again.
        """
        return self._take_on_cpu() if self._copies is None else self._take_on_gpu(self._copies)

    def close(self) -> None:
        """Wait for the runs under way, which read what was fed; nothing can be fed or taken any more."""
        # Dropping it is not enough: the traceback of an exception in flight may refer to it, and DALI would go on
        # reading what was fed, and keep its memory.
        if hasattr(self._pipe, "_shutdown"):
            self._pipe._shutdown()  # noqa: SLF001 - there is no public way to it; it waits
        self._pipe = None
        self._fed.clear()
        self._read.clear()

    def _take_on_cpu(self) -> torch.Tensor:
        (output,) = self._pipe.share_outputs()
        # The default executor counts references, so the memory is not used again while the tensor lives.
        shared = _to_torch(output)
        self._pipe.release_outputs()
        self._fed.popleft()
        return shared.to(self._dtype(shared))

    def _take_on_gpu(self, copies: torch.cuda.Stream) -> torch.Tensor:
        from torch import cuda

        current = cuda.current_stream(self.config.device_id)
        # A batch may be dropped while kernels that read it still wait on the caller's stream. torch's allocator knows
        # of them, DALI does not. On a stream of its own the copy does not wait for these kernels.
        with cuda.stream(copies):
            # Bound to that stream, DALI's memory is used again after the copy, in its order.
            (output,) = self._pipe.share_outputs(cuda_stream=copies)
            shared = _to_torch(output)
            owned = shared.to(self._dtype(shared), copy=True)
            self._pipe.release_outputs()
            # The host does not wait, so the run may not even have begun to read what was fed.
            self._read.append((copies.record_event(), self._fed.popleft()))
        current.wait_stream(copies)  # on the device
        owned.record_stream(current)
        return owned

    def _dtype(self, shared: torch.Tensor) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.config.pixels.output == "bfloat16" else shared.dtype


def _to_torch(output: Any) -> torch.Tensor:
    """Return a `TensorList` of DALI as a tensor over the same memory."""
    from torch.utils import dlpack

    shared: torch.Tensor = dlpack.from_dlpack(output.as_tensor())
    return shared


def _make_stream(device_id: int) -> torch.cuda.Stream:
    from torch import cuda

    make: Any = cuda.Stream  # which has no types
    stream: torch.cuda.Stream = make(device_id)
    return stream


def _build(config: DecodeConfig, graph: Graph) -> Any:
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
        how = {"output_type": types.RGB, **decoder_arguments(config)}
        window = {"start": starts, "shape": shapes, "axes": [0, 1]}
        if graph == "window":
            decoded = fn.decoders.image_slice(images, **window, **how)
        else:
            decoded = fn.slice(fn.decoders.image(images, **how), **window)
        # DALI's own kernel: a fifth of a level off Pillow's in the mean; torch has none for bytes on a GPU.
        scaled = fn.resize(decoded, resize_x=size, resize_y=size, interp_type=types.INTERP_LINEAR, antialias=True)
        pipe.set_outputs(fn.crop_mirror_normalize(scaled, mirror=flips, **output_arguments(config.pixels)))
    pipe.build()
    # Its first call would schedule `prefetch` runs at once, for which inputs may not be there: a batch without a JPEG
    # gives it none. DALI has no public way to schedule one.
    pipe._first_iter = False  # noqa: SLF001
    return pipe
