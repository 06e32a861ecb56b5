"""DALI pipelines that decode, scale, flip and normalise a window of each image, on a GPU or on the CPU.

Two graphs give equal pixels. "window" decodes only the window (`decoders.image_slice`). "whole" decodes the
complete image and then cuts the window (`decoders.image`, `slice`), for GPUs on which nvImageCodec fails on windows.

Each batch is fed as one run. DALI keeps no position in the data; the loader controls epochs, prefetch and resume.
Inputs are not copied, so they are referenced until the device has finished their run. Outputs own their memory.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from datasvc.errors import ConfigError, DeviceError
from datasvc.extras import how_to_install
from datasvc.loaders.augment.augment import Windows
from datasvc.loaders.decode.backend import Backend, BackendConfig
from datasvc.loaders.decode.gpu.device_stream import make_stream
from datasvc.loaders.decode.pixels import PixelFormat

if TYPE_CHECKING:
    import torch

    from datasvc.shards.format.mapped_file import Bytes

    _Inputs = tuple[Sequence[Bytes], Windows]

Graph = Literal["window", "whole"]
BACKENDS: Final[Mapping[Graph, Backend]] = {"window": "gpu-window", "whole": "gpu-whole"}

# Messages of DALI, nvImageCodec, torch and the driver about device failures. Numbers are `nvimgcodecStatus_t`: a
# failed allocation (5), a wrong architecture (7); but not the internal error (8), which damaged images cause too.
_DEVICE_FAILURE: Final = re.compile(
    r"cudaError|CUDA_ERROR|CUDA (?:runtime|driver|error|failure)|CUDA out of|\bnvml\b|illegal memory access"
    r"|device-side assert|out[ -]of[ -]memory|bad_alloc|(?:nvImageCodec|nvjpeg) (?:failure|error):? '?#?[57]\b",
    re.IGNORECASE,
)
_MEMORY: Final = re.compile(r"memory ?allocation|out[ -]of[ -]memory|bad_alloc|failure:? '?#?5\b", re.IGNORECASE)


@contextmanager
def device_errors(backend: Backend) -> Iterator[None]:
    """Convert a RuntimeError or MemoryError about the device or its memory, not about an image, to DeviceError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        message = str(error)
        is_memory = isinstance(error, MemoryError) or _MEMORY.search(message) is not None
        if not is_memory and not _DEVICE_FAILURE.search(message):
            raise
        if is_memory:
            advice = "there is no memory left: use a smaller batch_size or prefetch"
            cpu_advice = ", or decode='cpu'"
        else:
            advice = "the device or its driver failed: start the process again"
            cpu_advice = ", with decode='cpu' if it fails again"
        if backend in {"gpu-window", "gpu-whole"}:  # the other backends decode on the CPU already
            advice += cpu_advice
        raise DeviceError(
            f"cannot make a batch of images on a GPU with decode={backend!r}; {advice}; the error was: {message}"
        ) from error


def decoder_arguments(config: BackendConfig) -> dict[str, Any]:
    """Return the arguments of DALI's decoder: the device "mixed" (CPU and GPU), or "cpu" if there is no GPU."""
    if config.device_id is None:
        return {"device": "cpu"}
    hints = {"preallocate_width_hint": config.max_width, "preallocate_height_hint": config.max_height}
    return {"device": "mixed"} | {name: value for name, value in hints.items() if value}  # 0 is unknown


def output_arguments(pixels: PixelFormat) -> dict[str, Any]:
    """Return the arguments of DALI's normalisation; bfloat16, which DALI lacks, is converted from float32 later."""
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
    """A DALI pipeline with up to `prefetch` runs in progress.

    Raises:
        ConfigError: DALI is not installed.
        DeviceError: the GPU cannot be used, or has too little memory.
    """

    def __init__(self, config: BackendConfig, graph: Graph = "window") -> None:
        self.config = config
        with device_errors(BACKENDS[graph]):
            self._pipe = _build(config, graph)
        self._copy_stream = None if config.device_id is None else make_stream(config.device_id)
        self._fed_inputs: deque[_Inputs] = deque()
        # Inputs of taken runs, each with the event after which the device no longer reads them.
        self._taken_inputs: deque[tuple[torch.cuda.Event, _Inputs]] = deque()

    def feed(self, images: Sequence[Bytes], windows: Windows) -> None:
        """Start a run. Its arrays are referenced until its output is complete, and must not change until then.

        Args:
            images: 1 to `batch_size` encoded images.
            windows: window of each image.
        """
        while self._taken_inputs and self._taken_inputs[0][0].query():  # type: ignore[no-untyped-call]
            self._taken_inputs.popleft()
        self._fed_inputs.append((images, windows))
        self._pipe.feed_input("images", list(images))
        self._pipe.feed_input("starts", windows.starts)
        self._pipe.feed_input("shapes", windows.shapes)
        self._pipe.feed_input("flips", windows.flips)
        if self.config.has_boxes:
            assert windows.boxes is not None
            # DALI copies these. It expects (top, left) and (bottom, right); a box is (left, top, right, bottom).
            self._pipe.feed_input("box_starts", np.ascontiguousarray(windows.boxes[:, 1::-1], np.float32))
            self._pipe.feed_input("box_stops", np.ascontiguousarray(windows.boxes[:, :1:-1], np.float32))
        self._pipe.schedule_run()

    def take(self) -> torch.Tensor:
        """Return the output of the oldest run in the pixel format; the caller owns its memory.

        On a GPU the output is valid for work on the current stream; the host does not wait for it.

        Raises:
            RuntimeError: an image of the run does not decode, or the device failed; see `device_errors`. The pipeline
                cannot be used again.
        """
        return self._take_on_cpu() if self._copy_stream is None else self._take_on_gpu(self._copy_stream)

    def close(self) -> None:
        """Wait for the runs in progress, which still read their inputs. The pipeline cannot be used afterwards."""
        # Deleting the reference is not enough: the traceback of a pending exception may refer to the pipeline, and
        # DALI would continue to read the inputs and keep its memory.
        if hasattr(self._pipe, "_shutdown"):
            self._pipe._shutdown()  # noqa: SLF001 - there is no public function that waits
        self._pipe = None
        self._fed_inputs.clear()
        self._taken_inputs.clear()

    def _take_on_cpu(self) -> torch.Tensor:
        (output,) = self._pipe.share_outputs()
        # DALI's default executor counts references, so it does not reuse the memory while the tensor exists.
        shared = _to_torch(output)
        self._pipe.release_outputs()
        self._fed_inputs.popleft()
        return shared.to(self._dtype(shared))

    def _take_on_gpu(self, copy_stream: torch.cuda.Stream) -> torch.Tensor:
        """Return a copy of the oldest run's output, made on `copy_stream`; the caller's stream waits for it."""
        from torch import cuda

        current = cuda.current_stream(self.config.device_id)
        # The caller may drop a batch while kernels on its stream still have to read it. torch's allocator tracks
        # these kernels, but DALI does not. So the output is copied to torch's memory, on a separate stream that does
        # not wait for the caller's kernels.
        with cuda.stream(copy_stream):
            # DALI reuses the memory in the order of this stream, which is after the copy.
            (output,) = self._pipe.share_outputs(cuda_stream=copy_stream)
            shared = _to_torch(output)
            owned = shared.to(self._dtype(shared), copy=True)
            self._pipe.release_outputs()
            # The host does not wait, so the device may not have read the inputs of this run yet.
            self._taken_inputs.append((copy_stream.record_event(), self._fed_inputs.popleft()))
        current.wait_stream(copy_stream)  # the device waits, not the host
        owned.record_stream(current)
        return owned

    def _dtype(self, shared: torch.Tensor) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.config.pixels.output == "bfloat16" else shared.dtype


def _to_torch(output: Any) -> torch.Tensor:
    """Return a `TensorList` of DALI as a tensor of the same memory."""
    from torch.utils import dlpack

    shared: torch.Tensor = dlpack.from_dlpack(output.as_tensor())
    return shared


def _build(config: BackendConfig, graph: Graph) -> Any:
    """Return the built DALI pipeline of a graph, with the inputs of `DaliPipeline.feed`. Raises ConfigError."""
    try:
        from nvidia.dali import Pipeline, fn, types
    except ImportError as error:
        raise ConfigError(
            f"decoding on a GPU needs DALI, which cannot be imported ({error}): {how_to_install('gpu')}; or use "
            "decode='cpu'"
        ) from error
    pipe = Pipeline(
        batch_size=config.batch_size,
        num_threads=config.num_threads,
        device_id=config.device_id,
        prefetch_queue_depth=config.prefetch,
    )
    size = config.size
    with pipe:
        images = fn.external_source(name="images", no_copy=True)
        starts = fn.external_source(name="starts", no_copy=True, dtype=types.INT32, ndim=1)
        shapes = fn.external_source(name="shapes", no_copy=True, dtype=types.INT32, ndim=1)
        flips = fn.external_source(name="flips", no_copy=True, dtype=types.INT32, ndim=0)
        options = {"output_type": types.RGB, **decoder_arguments(config)}
        window = {"start": starts, "shape": shapes, "axes": [0, 1]}
        if graph == "window":
            decoded = fn.decoders.image_slice(images, **window, **options)
        else:
            decoded = fn.slice(fn.decoders.image(images, **options), **window)
        # DALI scales, because torch has no GPU kernel for bytes. Its pixels, 0 to 255, differ from Pillow's by 0.2 in
        # the mean. A box is the part of a window that is scaled; the filter reads pixels around it, as Pillow's does.
        boxes = {
            argument: fn.external_source(name=name, dtype=types.FLOAT, ndim=1)
            for argument, name in (("roi_start", "box_starts"), ("roi_end", "box_stops"))
            if config.has_boxes
        }
        scaled = fn.resize(
            decoded, resize_x=size, resize_y=size, interp_type=types.INTERP_LINEAR, antialias=True, **boxes
        )
        pipe.set_outputs(fn.crop_mirror_normalize(scaled, mirror=flips, **output_arguments(config.pixels)))
    pipe.build()
    # The first `schedule_run` would start `prefetch` runs at once, but their inputs may be missing: a batch without a
    # JPEG feeds none. DALI has no public function to start a single run.
    pipe._first_iter = False  # noqa: SLF001
    return pipe
