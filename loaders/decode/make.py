"""Makes backends: one, or one of several that is still to be measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from loaders.decode.backend import Backend, DecodeConfig, Framework, ImageBackend
from loaders.decode.cpu import CpuBackend
from loaders.decode.fastest import FastestBackend
from loaders.stopwatch import Stopwatch


def make_backend(
    config: DecodeConfig,
    candidates: Sequence[Backend],
    *,
    framework: Framework,
    stopwatch: Stopwatch,
    on_choice: Callable[[Backend, Mapping[Backend, float]], None],
) -> ImageBackend:
    """Return the only candidate, or a backend that measures them on its first batch.

    Args:
        config: what it is built from.
        candidates: at least one.
        framework: of the batches.
        stopwatch: times what the threads do.
        on_choice: is told which was chosen, if there was a choice.

    Raises:
        ConfigError: software is missing.
    """
    makers = {backend: partial(_make, config, backend, framework, stopwatch) for backend in candidates}
    if len(makers) == 1:
        return makers[candidates[0]]()
    return FastestBackend(makers, prefetch=config.prefetch, on_choice=on_choice, stopwatch=stopwatch)


def _make(config: DecodeConfig, backend: Backend, framework: Framework, stopwatch: Stopwatch) -> ImageBackend:
    if backend == "gpu":
        from loaders.decode.gpu import GpuBackend

        return GpuBackend(config)
    if config.device_id is None:
        return CpuBackend(config, backend=backend, framework=framework, stopwatch=stopwatch)
    from loaders.decode.upload import UploadBackend

    return UploadBackend(config, backend=backend, device=f"cuda:{config.device_id}", stopwatch=stopwatch)
