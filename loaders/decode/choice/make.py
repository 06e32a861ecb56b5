"""Create a decoding backend by its name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from datasvc.loaders.decode.backend import Backend, BackendConfig, Framework, ImageBackend
from datasvc.loaders.decode.cpu import CpuBackend
from datasvc.loaders.profiling.step_profiler import StepProfiler

if TYPE_CHECKING:
    from datasvc.loaders.decode.gpu.dali import Graph


def make_backend(
    config: BackendConfig, backend: Backend, *, framework: Framework, profiler: StepProfiler
) -> ImageBackend:
    """Return a new backend.

    Raises:
        ConfigError: the software of the backend is not installed.
        DeviceError: the GPU cannot be used.
    """
    if backend in {"gpu-window", "gpu-whole"}:
        from datasvc.loaders.decode.gpu.gpu import GpuBackend

        graph: Graph = "window" if backend == "gpu-window" else "whole"
        if config.changes_colours:
            from datasvc.loaders.decode.gpu.gpu_colours import ColourBackend

            return ColourBackend(config, partial(GpuBackend, graph=graph, profiler=profiler), name=backend)
        return GpuBackend(config, graph, profiler=profiler)
    if config.device_id is None:
        return CpuBackend(config, backend=backend, framework=framework, profiler=profiler)
    from datasvc.loaders.decode.gpu.upload import UploadBackend

    return UploadBackend(config, backend=backend, device=f"cuda:{config.device_id}", profiler=profiler)
