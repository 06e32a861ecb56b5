"""Batches decoded on the CPU: images are spread over a few threads, which write them where the batch lies."""

from __future__ import annotations

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

from datasvc.loaders.augment.augment import Windows
from datasvc.loaders.core.buffer_ring import BufferRing
from datasvc.loaders.core.pinned import empty_pinned
from datasvc.loaders.decode.backend import Backend, DecodeConfig, DecodedImages, Edit, Framework, Read
from datasvc.loaders.decode.crop import import_codec
from datasvc.loaders.decode.worker import ImageWorker
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage

if TYPE_CHECKING:
    import torch

    from datasvc.shards.format.mapped_file import Bytes

# Images that a thread takes at once: few, so that threads finish a batch together.
_MAX_AT_ONCE = 8
_SHARES_OF_A_THREAD = 4
# Besides those under way, the caller has one batch and asks for the next.
_WITH_THE_CALLER = 2


@dataclass(frozen=True)
class _DecodeJob:
    """A batch to decode: what, and where to."""

    images: Sequence[Bytes]
    starts: list[list[int]]
    shapes: list[list[int]]
    flips: list[bool]
    edit: Edit | None
    read: Read | None
    out: npt.NDArray[Any]


@dataclass(frozen=True)
class CpuRun:
    """A batch under way."""

    images: npt.NDArray[Any] | torch.Tensor
    parts: list[Future[dict[int, str]]]

    @property
    def is_decoded(self) -> bool:
        """Whether `finish` returns at once, and raises nothing."""
        return all(part.done() and not part.cancelled() and part.exception() is None for part in self.parts)


_WORKING: weakref.WeakSet[threading.Event] = weakref.WeakSet()


def _stop_all() -> None:
    for stopped in list(_WORKING):
        stopped.set()


# A program that ends, by Ctrl-C perhaps, waits for its threads: what nobody will take they leave. There is no public
# hook that runs before that wait; where this one is gone it takes as long as what was prefetched.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_stop_all)  # noqa: SLF001


class CpuBackend:
    """An `ImageBackend` of `num_threads` threads in all; equal input gives equal bytes at any number of them.

    Args:
        config: what it is built from.
        backend: "cpu" or "pillow", see `ImageWorker`.
        framework: whose resizer is used.
        profiler: times what the threads do.

    Raises:
        ConfigError: the decoder is not installed.
    """

    def __init__(
        self, config: DecodeConfig, *, backend: Backend, framework: Framework, profiler: StepProfiler
    ) -> None:
        if backend == "cpu":
            import_codec()
        if framework == "torch":
            import torch  # noqa: F401 - before the threads: imported by several at once it may be seen half made
        self._config, self._backend, self._framework = config, backend, framework
        self._profiler = profiler
        shape = config.pixels.shape(config.batch_size)
        self._ring = BufferRing(shape, config.pixels.dtype, keep=config.prefetch + _WITH_THE_CALLER)
        self._pool = ThreadPoolExecutor(config.num_threads, thread_name_prefix="datasvc-decode")
        self._own = threading.local()
        self._stopped = threading.Event()
        _WORKING.add(self._stopped)
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
        """Start on a batch beside those that `take` returns.

        Args:
            images: see `feed`.
            windows: likewise.
            edit: likewise.
            read: likewise.
            out: memory of a whole batch to decode to, left alone until `finish`; None: some that nobody uses.
        """
        count = len(images)
        memory: npt.NDArray[Any] | torch.Tensor = self._take_memory() if out is None else out
        array: npt.NDArray[Any] = memory if isinstance(memory, np.ndarray) else memory.numpy()
        work = _DecodeJob(
            images,
            windows.starts.tolist(),
            windows.shapes.tolist(),
            windows.flips.astype(bool).tolist(),
            edit,
            read,
            array[:count],
        )
        step = max(1, min(_MAX_AT_ONCE, count // (_SHARES_OF_A_THREAD * self._config.num_threads)))
        parts = [
            self._pool.submit(self._decode, work, range(start, min(start + step, count)))
            for start in range(0, count, step)
        ]
        return CpuRun(memory[:count], parts)

    def finish(self, run: CpuRun) -> DecodedImages:
        """Return what became of a batch that was started, waiting for it."""
        bad: dict[int, str] = {}
        for part in run.parts:
            bad |= part.result()
        return DecodedImages(self._deliver(run.images), bad)

    def close(self) -> None:
        """Stop, once each thread is done with the image that it is at."""
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._in_progress.clear()

    def _decode(self, work: _DecodeJob, indices: range) -> dict[int, str]:
        """Decode some images of a batch; returns why some do not."""
        with self._profiler.stage(Stage.DECODE):
            return self._decode_timed(work, indices)

    def _decode_timed(self, work: _DecodeJob, indices: range) -> dict[int, str]:
        worker, bad = self._worker(), {}
        for index in indices:
            if self._stopped.is_set():
                raise CancelledError
            image = work.images[index]
            if work.read is not None:
                image = work.read(index, worker.buffer(len(image)))
            reason = worker.decode(
                image,
                work.starts[index],
                work.shapes[index],
                work.out[index],
                flip=work.flips[index],
                edit=None if work.edit is None else partial(work.edit, index),
            )
            if reason is not None:
                bad[index] = reason
        return bad

    def _take_memory(self) -> npt.NDArray[Any] | torch.Tensor:
        """Return memory of a whole batch that nobody uses."""
        if not self._config.is_pinned:
            return self._ring.take()
        return empty_pinned(self._config.pixels.shape(self._config.batch_size), self._config.pixels.dtype)

    def _deliver(self, images: npt.NDArray[Any] | torch.Tensor) -> npt.NDArray[Any] | torch.Tensor:
        if self._config.pixels.output != "bfloat16":
            return images
        import torch

        return torch.as_tensor(images).view(torch.bfloat16)

    def _worker(self) -> ImageWorker:
        if not hasattr(self._own, "worker"):
            self._own.worker = ImageWorker(self._config.pixels, backend=self._backend, framework=self._framework)
        worker: ImageWorker = self._own.worker
        return worker
