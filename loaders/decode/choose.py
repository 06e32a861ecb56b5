"""Which backend decodes: what was asked for, or the fastest of those that can; measured where more than one can."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, get_args

from datasvc.errors import ConfigError
from loaders.augment import Windows
from loaders.decode.backend import Backend, ImageBackend
from loaders.decode.crop import import_codec

if TYPE_CHECKING:
    from datasvc.shards.mapped_file import Bytes

Decode = Literal["auto", "cpu", "gpu", "pillow"]
_RUNS_MEASURED: Final = 3  # at least, however slow


def find_missing() -> dict[Backend, str]:
    """Return the backends that this machine lacks the software for, and what to do about each."""
    missing: dict[Backend, str] = {}
    try:
        import_codec()
    except ConfigError as error:
        missing["cpu"] = str(error)
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        missing["gpu"] = "a GPU decodes with DALI, which is not installed; install nvidia-dali-cuda130"
    return missing


def plan_candidates(
    wanted: Decode, *, on_gpu: bool, has_edits: bool, missing: Mapping[Backend, str]
) -> Sequence[Backend]:
    """Return the backends that may decode, at least one; more than one are to be measured.

    Args:
        wanted: by the user.
        on_gpu: whether images shall lie on a GPU.
        has_edits: whether colours or a transform change the images, which is done on the CPU.
        missing: backends that cannot be used here, and why.

    Raises:
        ConfigError: what is wanted cannot be had; says why.
    """
    if wanted not in get_args(Decode):
        raise ConfigError(f"decode is {wanted!r}; expected one of {', '.join(get_args(Decode))}")
    refused = dict(missing)
    if has_edits:
        refused["gpu"] = "colours and transforms are changed on the CPU; use decode='cpu', or none of them"
    if not on_gpu:
        refused["gpu"] = "decode='gpu' leaves the images on a GPU; give device='cuda' too"
    if wanted != "auto":
        if wanted in refused:
            raise ConfigError(refused[wanted])
        return [wanted]
    able: list[Backend] = [backend for backend in ("cpu", "gpu") if backend not in refused]
    return able or ["pillow"]


def choose_fastest(rates: Mapping[Backend, float]) -> Backend:
    """Return the backend with the highest rate; the first of equals."""
    return max(rates, key=lambda backend: rates[backend])


def measure_rate(
    backend: ImageBackend,
    images: Sequence[Bytes],
    windows: Windows,
    *,
    prefetch: int,
    duration_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return how many images per second a backend decodes, with `prefetch` batches under way.

    Args:
        backend: newly made; it is closed.
        images: of one batch, decoded again and again.
        windows: one for each.
        prefetch: batches under way.
        duration_s: for about how long.
        clock: seconds.
    """
    try:
        for _ in range(prefetch):
            backend.feed(images, windows)
        num_runs, started = -1, 0.0
        while True:
            backend.take()
            num_runs += 1
            now = clock()
            if num_runs == 0:
                started = now  # the first run also starts threads and takes memory
            elif num_runs >= _RUNS_MEASURED and now - started >= duration_s:
                return num_runs * len(images) / (now - started)
            backend.feed(images, windows)
    finally:
        backend.close()
