"""Trials of decoding backends in a child process, on images of the data set: correctness and speed.

A decoder on a GPU may crash its process, or never return, so it runs in a child process first. A child tries one
backend after another. If it crashes or does not answer, that backend is refused, and a new child tries the remaining
ones. The GPU memory of a child is freed when it exits.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle  # only between this process and those that it starts
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

from datasvc.child_process import ChildProcess, end_with_input
from datasvc.loaders.augment.augment import Windows
from datasvc.loaders.decode.backend import Backend, BackendConfig, ImageBackend
from datasvc.loaders.decode.choice.choose import make_backend
from datasvc.loaders.decode.worker import ImageWorker
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.shards.images.header import is_plain_jpeg

if TYPE_CHECKING:
    from datasvc.shards.format.mapped_file import Bytes

_MODULE: Final = "datasvc.loaders.decode.choice.trial"  # not `__name__`, which is "__main__" in the child
# Deadline for one backend, including the start of the child. Only a decoder that never returns takes longer.
_DEADLINE_S: Final = 180.0
_MEASURED_S: Final = 0.5  # approximate duration of a measurement
_MIN_BATCHES: Final = 3  # minimum number of batches in a measurement
# Maximum mean difference of two decoders, for pixel values from 0 to 255; above it, one returns wrong pixels.
_MAX_DIFFERENCE: Final = 16.0
_NUM_COMPARED: Final = 8  # images whose pixels are compared


@dataclass(frozen=True)
class TrialBatch:
    """A batch for a trial: encoded images and their windows."""

    images: Sequence[bytes]
    windows: Windows

    def arrays(self) -> list[Bytes]:
        """Return the images as arrays, the input of backends."""
        return [np.frombuffer(image, np.uint8) for image in self.images]


@dataclass(frozen=True)
class TrialJob:
    """The work of a child process: `candidates` to try, in this order, and the path of the file of `batches`."""

    config: BackendConfig
    candidates: Sequence[Backend]
    batches: Path


@dataclass
class Trials:
    """Results of trials.

    Attributes:
        rates: images per second of each backend that works.
        refused: reason for each backend that does not work.
    """

    rates: dict[Backend, float] = field(default_factory=dict)
    refused: dict[Backend, str] = field(default_factory=dict)


def try_backends(
    config: BackendConfig,
    candidates: Sequence[Backend],
    batches: Sequence[TrialBatch],
    *,
    module: str = _MODULE,
    deadline_s: float = _DEADLINE_S,
) -> Trials:
    """Try each candidate in a child process.

    Args:
        config: settings of the backends.
        candidates: backends to try, in this order.
        batches: non-empty batches; several, because a single one would stay in the processor's cache and be faster.
        module: module that the child runs.
        deadline_s: seconds after which a child that does not answer is killed.
    """
    trials = Trials()
    with tempfile.TemporaryDirectory(prefix="datasvc-decode-") as folder:
        path = Path(folder, "batches")
        # A file, because every child that is started reads the batches again.
        path.write_bytes(pickle.dumps(list(batches)))
        while untried := [name for name in candidates if name not in trials.rates and name not in trials.refused]:
            try:
                child = ChildProcess(module, TrialJob(config, untried, path), answers=True)
            except OSError as error:
                trials.refused |= dict.fromkeys(untried, f"no process could be started to try it: {error}")
                break
            with closing(child):
                for backend in untried:
                    answer = _receive_answer(child, deadline_s)
                    if "rate" not in answer:
                        trials.refused[backend] = answer["refused"]
                        break  # after a failure the device's state in the child is unknown: start a new child
                    trials.rates[backend] = answer["rate"]
    return trials


def _receive_answer(child: ChildProcess, deadline_s: float) -> dict[str, Any]:
    """Return a child's next answer; if the child exits or is killed first, a refusal with the reason."""
    is_late = threading.Event()

    def kill() -> None:
        is_late.set()
        child.process.kill()

    # A timer kills the child, because `read_line` has no deadline.
    timer = threading.Timer(deadline_s, kill)
    timer.start()
    try:
        line = child.read_line()
        status = None if line else child.process.wait()
    finally:
        timer.cancel()
    if status is None:
        answer: dict[str, Any] = json.loads(line)
        return answer
    if is_late.is_set():
        return {"refused": f"it did not answer within {deadline_s:.0f} s"}
    if status < 0:
        return {"refused": f"it ended its process with {signal.Signals(-status).name}"}
    return {"refused": f"it ended its process with status {status}"}


def measure_rate(
    backend: ImageBackend,
    batches: Sequence[TrialBatch],
    *,
    prefetch: int,
    duration_s: float = _MEASURED_S,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return how many images per second a backend decodes, with `prefetch` batches in progress.

    Args:
        backend: backend without batches in progress.
        batches: batches to decode, one after another, repeatedly.
        prefetch: number of batches in progress at the same time.
        duration_s: approximate duration; at least `_MIN_BATCHES` batches are measured.
        clock: monotonic clock in seconds.
    """
    endless = itertools.cycle([(batch.arrays(), batch.windows) for batch in batches])
    in_progress: deque[Any] = deque()  # keeps the images alive, as backends require

    def feed() -> None:
        images, windows = next(endless)
        backend.feed(images, windows)
        in_progress.append(images)

    for _ in range(prefetch):
        feed()
    num_images = 0
    for num_taken in itertools.count():
        _wait_for(backend.take().images)
        images = in_progress.popleft()
        now = clock()
        if num_taken == 0:
            started = now  # the first batch is not measured, because the backend starts its threads for it
        else:
            num_images += len(images)
            if num_taken >= _MIN_BATCHES and now - started >= duration_s:
                break
        feed()
    for _ in in_progress:  # leave the backend without batches in progress
        backend.take()
    return num_images / (now - started)


def _wait_for(images: Any) -> None:
    """Wait until a batch is complete: a GPU may still compute it after `take` has returned."""
    if getattr(images, "is_cuda", False):
        import torch

        torch.cuda.current_stream(images.device).synchronize()


def answer_trials(job: TrialJob, make: Callable[[BackendConfig, Backend], ImageBackend]) -> Iterator[dict[str, Any]]:
    """Yield the answer for each candidate; stop after the first that is refused. Runs in the child."""
    batches = pickle.loads(job.batches.read_bytes())  # noqa: S301 - from our own parent process
    for candidate in job.candidates:
        try:
            with closing(make(job.config, candidate)) as backend:
                compare_with_pillow(backend, batches[0], job.config)
                if not any(map(is_plain_jpeg, batches[0].images)):
                    # A GPU decodes only JPEGs. Without this trial, its decoder would get its first JPEG in the
                    # loader's process, and could crash that process.
                    compare_with_pillow(backend, _make_jpeg(job.config), job.config)
                rate = measure_rate(backend, batches, prefetch=job.config.prefetch)
            yield {"rate": rate}  # after `close`, because some decoders fail there
        except Exception as error:  # noqa: BLE001 - the parent reports it
            yield {"refused": f"{type(error).__name__}: {str(error)[:1000]}"}
            return


def _make_jpeg(config: BackendConfig) -> TrialBatch:
    """Return a batch of one JPEG, 256 x 256 pixels, with a window inside it."""
    encoded = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(encoded, "JPEG")
    start, shape, flip = (np.array(values, np.int32) for values in ([[40, 30]], [[150, 180]], [0]))
    boxes = np.array([[10.5, 20.25, 160.75, 140.0]]) if config.has_boxes else None
    return TrialBatch([encoded.getvalue()], Windows(start, shape, flip, boxes))


def compare_with_pillow(backend: ImageBackend, batch: TrialBatch, config: BackendConfig) -> None:
    """Compare a backend's images with Pillow's, because some decoders fail without an error and return zeros.

    Raises:
        RuntimeError: an image differs by more than a decoder's rounding.
    """
    images, pixels = batch.arrays(), config.pixels
    backend.feed(images, batch.windows)
    decoded = backend.take()
    worker = ImageWorker(pixels, config.size, backend="pillow", framework="torch")
    out = np.empty(pixels.shape(1, config.size), pixels.dtype)
    for index in range(min(_NUM_COMPARED, len(images))):
        starts, shapes = batch.windows.starts[index].tolist(), batch.windows.shapes[index].tolist()
        box = None if batch.windows.boxes is None else batch.windows.boxes[index].tolist()
        reason = worker.decode(images[index], starts, shapes, out[0], flip=bool(batch.windows.flips[index]), box=box)
        if reason is not None or index in decoded.bad:
            continue  # a damaged image has no pixels to compare
        difference = float(np.abs(_to_levels(decoded.images[index], config) - _to_levels(out[0], config)).mean())
        if not difference <= _MAX_DIFFERENCE:  # not `>`, so that NaN is refused too
            raise RuntimeError(
                f"image {index} of the trial differs from Pillow's by {difference:.0f} levels of 255 on average; "
                f"expected at most {_MAX_DIFFERENCE:.0f}"
            )


def _to_levels(image: Any, config: BackendConfig) -> Any:
    """Return an image of any format as pixel values from 0 to 255, `float64[...]`."""
    import torch

    tensor = torch.as_tensor(image, device="cpu")
    if config.pixels.output == "bfloat16" and tensor.dtype != torch.bfloat16:
        tensor = tensor.view(torch.bfloat16)  # an array has the bits as uint16, see `PixelFormat.dtype`
    values = tensor.detach().cpu().double().numpy()
    if config.pixels.output == "uint8":
        return values
    channels = (3, 1, 1) if config.pixels.layout == "NCHW" else (3,)
    mean, std = (np.reshape(numbers, channels) for numbers in (config.pixels.mean, config.pixels.std))
    return (values * std + mean) * 255  # undo the normalisation


def main() -> None:
    """Run the child process: read a `TrialJob` from stdin, and write one line of JSON for each candidate."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps: crashes are expected, and the memory is large
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr, so that stdout has answers only
    job: TrialJob = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent process
    end_with_input()  # exit when stdin ends: the parent has exited, or has stopped waiting for a trial
    for answer in answer_trials(job, partial(make_backend, framework="torch", profiler=StepProfiler())):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
