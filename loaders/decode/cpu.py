"""CPU backend: a pool of threads decodes images directly into the memory of their batch.

`ImageLoader` uses it on the CPU. The GPU backends use it for images that the GPU does not decode.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from datasvc.extras import explain_missing
from datasvc.loaders.augment.augment import Windows
from datasvc.loaders.augment.edits import Edit
from datasvc.loaders.core.pinned import BufferRing, empty_pinned
from datasvc.loaders.decode.backend import Backend, BackendConfig, DecodedImages, Framework, Read
from datasvc.loaders.decode.pixels import corner_of, import_codec
from datasvc.loaders.decode.worker import ImageWorker
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage
from datasvc.threads import run_before_threads_end

if TYPE_CHECKING:
    import torch

    from datasvc.loaders.decode.servers import DecodeServers, ServerConnection
    from datasvc.shards.format.mapped_file import Bytes

# Small tasks, several per thread and batch, so that all threads finish a batch at nearly the same time.
_MAX_IMAGES_PER_TASK = 8
_TASKS_PER_THREAD = 4
_MAX_SENT_BYTES = 60 << 20  # a node takes 64 MiB, with a head
_TASKS_PER_CONNECTION = 2  # larger ones, because a request costs as much as an image
# The caller has up to two batches at once: it gets the next one before it drops the one that it has used.
_BATCHES_OF_CALLER = 2


@dataclass(frozen=True)
class _DecodeJob:
    """A batch to decode, and its output memory `out`.

    `starts`, `shapes`, `flips`, `boxes`, `regions` and `sizes` are those of the images' `Windows`; for the rest see
    `ImageBackend.feed`.
    """

    images: Sequence[Bytes]
    starts: list[list[int]]
    shapes: list[list[int]]
    flips: list[bool]
    boxes: list[list[float]] | None
    regions: list[list[float] | None]
    sizes: list[tuple[int, int]] | None
    edit: Edit | None
    read: Read | None
    out: npt.NDArray[Any]


@dataclass(frozen=True)
class CpuRun:
    """A batch in progress.

    Attributes:
        images: its output memory.
        parts: its tasks. The result of each has the images that cannot be decoded: index in the batch -> reason.
    """

    images: npt.NDArray[Any] | torch.Tensor
    parts: list[Future[dict[int, str]]]

    @property
    def is_decoded(self) -> bool:
        """Whether `finish` returns at once without an error."""
        return all(part.done() and not part.cancelled() and part.exception() is None for part in self.parts)


_STOP_FLAGS: weakref.WeakSet[threading.Event] = weakref.WeakSet()
_SERVERS: weakref.WeakSet[DecodeServers] = weakref.WeakSet()


def _stop_all() -> None:
    for stop_flag in list(_STOP_FLAGS):
        stop_flag.set()
    for servers in list(_SERVERS):
        servers.close()


# At exit, for example after Ctrl-C, the threads stop. Otherwise they would decode all prefetched images first.
run_before_threads_end(_stop_all)


class CpuBackend:
    """An `ImageBackend` with `num_threads` threads, and one more for each thread of a decode server.

    The output bytes do not depend on the number of threads, nor on which of them decodes an image.

    Args:
        config: settings of the backend.
        backend: "cpu" or "pillow", see `ImageWorker`.
        framework: selects the resizer, see `make_resizer`.
        profiler: measures the decode time.

    Raises:
        ConfigError: the decoder is not installed, or a decode server refuses, see `ServerOfLoader`.
    """

    def __init__(
        self, config: BackendConfig, *, backend: Backend, framework: Framework, profiler: StepProfiler
    ) -> None:
        if backend == "cpu":
            import_codec()
        if framework == "torch":
            # Before the threads start: parallel imports may get an incomplete module.
            with explain_missing("a loader that yields tensors (its numpy() yields arrays)"):
                import torch  # noqa: F401
        self._config, self._backend, self._framework = config, backend, framework
        self._profiler = profiler
        self._ring = BufferRing(config.shape, config.pixels.dtype, keep=config.prefetch + _BATCHES_OF_CALLER)
        self._servers = _connect_servers(config, backend, framework)
        # The threads take their connections from the end, so those that decode here start first.
        connections = [] if self._servers is None else self._servers.connections()
        if self._servers is not None:
            _SERVERS.add(self._servers)
        self._connections: list[ServerConnection | None] = [*reversed(connections), *[None] * config.num_threads]
        self._num_threads = len(self._connections)
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="datasvc-decode")
        self._thread_local = threading.local()
        self._stopped = threading.Event()
        _STOP_FLAGS.add(self._stopped)
        self._in_progress: deque[CpuRun] = deque()

    def feed(
        self, images: Sequence[Bytes], windows: Windows, edit: Edit | None = None, read: Read | None = None
    ) -> None:
        """See `ImageBackend`."""
        self._in_progress.append(self.start(images, windows, edit, read))

    def take(self) -> DecodedImages:
        """See `ImageBackend`."""
        decoded = self.finish(self._in_progress[0])
        self._in_progress.popleft()
        return decoded

    def start(
        self,
        images: Sequence[Bytes],
        windows: Windows,
        edit: Edit | None = None,
        read: Read | None = None,
        *,
        out: npt.NDArray[Any] | None = None,
    ) -> CpuRun:
        """Start to decode a batch that `finish`, not `take`, returns; for the other arguments see `feed`.

        `out`: memory for a full batch, which the caller does not use until `finish`; None: memory of the backend.
        """
        count = len(images)
        memory: npt.NDArray[Any] | torch.Tensor = self._take_memory(count, windows) if out is None else out
        array: npt.NDArray[Any] = memory if isinstance(memory, np.ndarray) else memory.numpy()
        job = _DecodeJob(
            images,
            windows.starts.tolist(),
            windows.shapes.tolist(),
            windows.flips.astype(bool).tolist(),
            None if windows.boxes is None else windows.boxes.tolist(),
            _regions(windows, count),
            None if windows.sizes is None else [(height, width) for height, width in windows.sizes.tolist()],
            edit,
            read,
            array[:count],
        )
        per_thread = _TASKS_PER_THREAD if self._servers is None else _TASKS_PER_CONNECTION
        task_size = max(1, min(_MAX_IMAGES_PER_TASK, count // (per_thread * self._num_threads)))
        parts = [
            self._pool.submit(self._decode, job, range(start, min(start + task_size, count)))
            for start in range(0, count, task_size)
        ]
        return CpuRun(memory[:count], parts)

    def finish(self, run: CpuRun) -> DecodedImages:
        """Wait until a batch that `start` began is decoded, and return it."""
        bad: dict[int, str] = {}
        for part in run.parts:
            bad |= part.result()
        return DecodedImages(self._deliver(run.images), bad)

    def close(self) -> None:
        """Stop each thread after its current image, and wait for all threads."""
        self._stopped.set()
        if self._servers is not None:
            self._servers.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._in_progress.clear()

    def _decode(self, job: _DecodeJob, indices: range) -> dict[int, str]:
        """Decode some images of a batch; return those that cannot be decoded: index -> reason."""
        worker, connection = self._worker()
        if self._stopped.is_set():
            raise CancelledError
        if connection is not None and self._is_small(job, indices) and connection.is_due():
            found = self._decode_elsewhere(job, indices, worker, connection)
            if found is not None:
                return found
        return self._decode_here(job, indices, worker)

    def _decode_here(self, job: _DecodeJob, indices: Sequence[int], worker: ImageWorker) -> dict[int, str]:
        """Do the work of `_decode` in this thread."""
        bad: dict[int, str] = {}
        with self._profiler.stage(Stage.DECODE):
            for index in indices:
                if self._stopped.is_set():
                    raise CancelledError
                image = job.images[index]
                if job.read is not None:
                    image = job.read(index, worker.buffer(len(image)))
                reason = worker.decode(
                    image,
                    job.starts[index],
                    job.shapes[index],
                    job.out[index] if job.sizes is None else self._corner(job.out[index], job.sizes[index]),
                    flip=job.flips[index],
                    box=None if job.boxes is None else job.boxes[index],
                    region=job.regions[index],
                    size=None if job.sizes is None else job.sizes[index],
                    edit=None if job.edit is None else partial(job.edit, index),
                )
                if reason is not None:
                    bad[index] = reason
        return bad

    def _decode_elsewhere(
        self, job: _DecodeJob, indices: range, worker: ImageWorker, connection: ServerConnection
    ) -> dict[int, str] | None:
        """Let a decode server decode some images of a batch; None: it does not. For the rest see `_decode`."""
        from datasvc.loaders.decode.serving import EncodedImage

        images = []
        for index in indices:
            blob = job.images[index]
            if job.read is not None:
                blob = job.read(index, np.empty(len(blob), np.uint8))
            box = None if job.boxes is None else job.boxes[index]
            images.append(EncodedImage(blob, job.starts[index], job.shapes[index], box, job.regions[index]))
        decoded = connection.decode(images)
        if decoded is None:
            return None
        pixels, bad = decoded
        for number, index in enumerate(indices):
            if number not in bad:
                edit = None if job.edit is None else partial(job.edit, index)
                worker.write(pixels[number], job.out[index], flip=job.flips[index], edit=edit)
        # A server may lack the memory for an image. So only this machine says that an image is bad.
        return self._decode_here(job, [indices[number] for number in bad], worker) if bad else {}

    def _is_small(self, job: _DecodeJob, indices: range) -> bool:
        """Return whether some images of a batch fit one request to a decode server."""
        return sum(len(job.images[index]) for index in indices) <= _MAX_SENT_BYTES

    def _corner(self, out: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[Any]:
        """Return the part of an image of the batch, in its frame, that a smaller image takes; the rest becomes 0."""
        rows = out.transpose(1, 2, 0) if self._config.pixels.layout == "NCHW" else out
        height, width = size
        rows[height:], rows[:height, width:] = 0, 0
        corner: npt.NDArray[Any] = corner_of(out, size, self._config.pixels.layout)
        return corner

    def _take_memory(self, count: int, windows: Windows) -> npt.NDArray[Any] | torch.Tensor:
        """Return unused memory for a full batch, or for `count` images in the frame of their windows."""
        config = self._config
        shape = config.shape if windows.frame is None else config.pixels.shape(count, windows.frame)
        if config.is_pinned:
            return empty_pinned(shape, config.pixels.dtype)
        memory = self._ring.take()
        return memory if windows.frame is None else memory.reshape(-1)[: math.prod(shape)].reshape(shape)

    def _deliver(self, images: npt.NDArray[Any] | torch.Tensor) -> npt.NDArray[Any] | torch.Tensor:
        """Return the images as they are, or as a tensor if they are bfloat16, which NumPy does not have."""
        if self._config.pixels.output != "bfloat16":
            return images
        import torch

        return torch.as_tensor(images, device="cpu").view(torch.bfloat16)

    def _worker(self) -> tuple[ImageWorker, ServerConnection | None]:
        """Return the worker of the calling thread, and its connection to a decode server if it has one.

        Workers reuse their buffers, so threads cannot share one.
        """
        if not hasattr(self._thread_local, "worker"):
            self._thread_local.worker = ImageWorker(
                self._config.pixels,
                self._config.size,
                backend=self._backend,
                framework=self._framework,
                decode_scale=self._config.decode_scale,
            )
            self._thread_local.connection = self._connections.pop()
        worker: ImageWorker = self._thread_local.worker
        connection: ServerConnection | None = self._thread_local.connection
        return worker, connection


def _connect_servers(config: BackendConfig, backend: Backend, framework: Framework) -> DecodeServers | None:
    """Return the decode servers of the settings; None without any."""
    if not config.servers:
        return None
    # Imported here because few loaders have servers.
    from datasvc.loaders.decode.servers import DecodeServers
    from datasvc.loaders.decode.serving import Decoder

    return DecodeServers(config.servers, Decoder(config.size, backend, framework, config.decode_scale))


def _regions(windows: Windows, count: int) -> list[list[float] | None]:
    """Return the region of each image of a batch; None for an image that has a window."""
    if windows.regions is None:
        return [None] * count
    return [None if math.isnan(region[0]) else region for region in windows.regions.tolist()]
