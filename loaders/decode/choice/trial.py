"""Tries backends in a process of their own, on images of the data set: whether they decode them, and how fast.

A decoder on a GPU may end the process that it runs in, with a signal that nobody can catch, or never return. So it
runs in a child first. One child tries one backend after another; where it ends or is silent, that backend is refused,
and another child goes on with the rest. The GPU memory of a child is released with it.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle  # to a process that this one starts
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

from datasvc.child_process import ChildProcess
from datasvc.loaders.augment.augment import Windows
from datasvc.loaders.decode.backend import Backend, DecodeConfig, ImageBackend
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.shards.images.header import is_plain_jpeg

if TYPE_CHECKING:
    from datasvc.shards.format.mapped_file import Bytes

_MODULE: Final = "datasvc.loaders.decode.choice.trial"  # not `__name__`, which is another in the child
_DEADLINE_S: Final = 180.0  # for one backend, with the start of the child: it only bounds a hang
_MEASURED_S: Final = 0.5
_MIN_RUNS: Final = 3
# How far two decoders may be apart, in levels of 255, in the mean of an image: beyond that it is another picture.
_MAX_LEVELS_APART: Final = 16.0
_NUM_COMPARED: Final = 8


@dataclass(frozen=True)
class TrialBatch:
    """Encoded images and their windows."""

    images: Sequence[bytes]
    windows: Windows

    def arrays(self) -> list[Bytes]:
        """Return the images as backends take them."""
        return [np.frombuffer(image, np.uint8) for image in self.images]


@dataclass(frozen=True)
class TrialJob:
    """What a child is told.

    Attributes:
        config: of the backends.
        candidates: to be tried in this order.
        batches: file with the pickled batches.
    """

    config: DecodeConfig
    candidates: Sequence[Backend]
    batches: Path


@dataclass
class Trials:
    """What came of it.

    Attributes:
        rates: images per second of each backend that works.
        refused: why each other one does not.
    """

    rates: dict[Backend, float] = field(default_factory=dict)
    refused: dict[Backend, str] = field(default_factory=dict)


def try_backends(
    config: DecodeConfig,
    candidates: Sequence[Backend],
    batches: Sequence[TrialBatch],
    *,
    module: str = _MODULE,
    deadline_s: float = _DEADLINE_S,
) -> Trials:
    """Try each candidate in a child process.

    Args:
        config: of the backends.
        candidates: at least one.
        batches: distinct ones, none of them empty: the same again and again would lie in the processor's cache.
        module: that the child runs.
        deadline_s: after which a child that does not answer is ended.
    """
    trials = Trials()
    with tempfile.TemporaryDirectory(prefix="datasvc-decode-") as folder:
        path = Path(folder, "batches")
        path.write_bytes(pickle.dumps(list(batches)))
        while left := [each for each in candidates if each not in trials.rates and each not in trials.refused]:
            try:
                child = ChildProcess(module, TrialJob(config, left, path), answers=True)
            except OSError as error:
                trials.refused |= dict.fromkeys(left, f"no process could be started to try it: {error}")
                break
            with closing(child):
                for backend in left:
                    answer = _hear(child, deadline_s)
                    if "rate" not in answer:
                        trials.refused[backend] = answer["refused"]
                        break  # a device that failed once is not asked again by the same process
                    trials.rates[backend] = answer["rate"]
    return trials


def _hear(child: ChildProcess, deadline_s: float) -> dict[str, Any]:
    """Return a child's next answer; how it ended where there is none."""
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        child.process.kill()

    timer = threading.Timer(deadline_s, end)
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
    """Return how many images per second a backend decodes, with `prefetch` batches under way.

    Args:
        backend: fed nothing that was not taken.
        batches: decoded in turn.
        prefetch: batches under way.
        duration_s: for about how long; at least three batches, however slow.
        clock: seconds.
    """
    endless = itertools.cycle([(batch.arrays(), batch.windows) for batch in batches])
    under_way: deque[Any] = deque()  # backends do not hold what they are fed

    def feed() -> None:
        images, windows = next(endless)
        backend.feed(images, windows)
        under_way.append(images)

    for _ in range(prefetch):
        feed()
    num_runs, num_images, started = -1, 0, 0.0
    while True:
        _wait_for(backend.take().images)
        taken = under_way.popleft()
        num_runs += 1
        now = clock()
        if num_runs == 0:
            started = now  # the first run also starts threads and takes memory
        else:
            num_images += len(taken)
            if num_runs >= _MIN_RUNS and now - started >= duration_s:
                break
        feed()
    for _ in under_way:
        backend.take()
    return num_images / (now - started)


def _wait_for(images: Any) -> None:
    """Wait until a batch is there: a GPU may still work on what was taken."""
    if getattr(images, "is_cuda", False):
        import torch

        torch.cuda.current_stream(images.device).synchronize()


def answer_trials(job: TrialJob, make: Callable[[DecodeConfig, Backend], ImageBackend]) -> Iterator[dict[str, Any]]:
    """Yield the answer for each candidate, up to the first that is refused. Runs in the child."""
    batches = pickle.loads(job.batches.read_bytes())  # noqa: S301 - from our own parent process
    for candidate in job.candidates:
        try:
            with closing(make(job.config, candidate)) as backend:
                compare_with_pillow(backend, batches[0], job.config)
                if not any(map(is_plain_jpeg, batches[0].images)):
                    # Only JPEGs reach a GPU: where these come later they must not be the first that do.
                    compare_with_pillow(backend, _make_jpeg(), job.config)
                rate = measure_rate(backend, batches, prefetch=job.config.prefetch)
            yield {"rate": rate}  # closed before: some decoders fail when they are
        except Exception as error:  # noqa: BLE001 - handed to the parent, which says why
            yield {"refused": f"{type(error).__name__}: {str(error)[:1000]}"}
            return


def _make_jpeg() -> TrialBatch:
    encoded = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(encoded, "JPEG")  # 256 x 256
    start, shape, flip = (np.array(values, np.int32) for values in ([[40, 30]], [[150, 180]], [0]))
    return TrialBatch([encoded.getvalue()], Windows(start, shape, flip))


def compare_with_pillow(backend: ImageBackend, batch: TrialBatch, config: DecodeConfig) -> None:
    """Refuse a backend that decodes to other pictures than Pillow: some fail without an error, with zeros.

    Raises:
        RuntimeError: it does.
    """
    from datasvc.loaders.decode.worker import ImageWorker

    images, pixels = batch.arrays(), config.pixels
    backend.feed(images, batch.windows)
    decoded = backend.take()
    worker = ImageWorker(pixels, backend="pillow", framework="torch")
    out = np.empty(pixels.shape(1), pixels.dtype)
    for index in range(min(_NUM_COMPARED, len(images))):
        starts, shapes = batch.windows.starts[index].tolist(), batch.windows.shapes[index].tolist()
        reason = worker.decode(images[index], starts, shapes, out[0], flip=bool(batch.windows.flips[index]))
        if reason is not None or index in decoded.bad:
            continue
        apart = float(np.abs(_to_levels(decoded.images[index], config) - _to_levels(out[0], config)).mean())
        if not apart <= _MAX_LEVELS_APART:  # nor is it where it is no number
            raise RuntimeError(
                f"image {index} of the trial is {apart:.0f} levels of 255 off what Pillow decodes, in the mean"
            )


def _to_levels(image: Any, config: DecodeConfig) -> Any:
    """Return an image as levels of 255, `float64[...]`, whatever its format."""
    import torch

    tensor = torch.as_tensor(image)
    if config.pixels.output == "bfloat16" and tensor.dtype != torch.bfloat16:
        tensor = tensor.view(torch.bfloat16)
    levels = tensor.detach().cpu().double().numpy()
    if config.pixels.output == "uint8":
        return levels
    channels = (3, 1, 1) if config.pixels.layout == "NCHW" else (3,)
    mean, std = (np.reshape(values, channels) for values in (config.pixels.mean, config.pixels.std))
    return (levels * std + mean) * 255


def _make(config: DecodeConfig, backend: Backend) -> ImageBackend:
    from datasvc.loaders.decode.choice.make import make_backend

    return make_backend(config, backend, framework="torch", profiler=StepProfiler())


def _end_with_stdin() -> None:
    """End this process where its parent has gone or has ended the trial: even where a decoder does not return."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Run in the child: read a job, write one line of JSON for each candidate."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected here, and its memory is large
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    job: TrialJob = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent process
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    for answer in answer_trials(job, _make):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
